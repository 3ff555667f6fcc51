"""The explorer in a page of its own: what it was asked while it was saved, it answers from the file.

The page holds rows and modules as lists, which it narrows itself; small tensors whole, which it cuts and zooms itself; and of the rest
the answers that views gave. What is not in it, it says. No script but ours runs in it, and it asks for nothing from outside.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from markupsafe import Markup

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.show import html, wire
from llmdebug_nb.show.bundle import PAGE, bundle
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.view_data import ViewData

_DETAILS = 500  # tensors that are told of in full
_CURVES = (
    100  # of these, those with their figures over all steps: each is a look through the whole run
)
_ELEMENTS = 1 << 20  # of tensors that are held whole, all together
_CELLS = 256
_BINS, _POINTS, _WORST = 64, 400, 20
_SCATTERED, _GRID = 1024, 64  # elements that are points, cells of a side where there are more
_SAVED = re.compile(
    r'<script type="application/octet-stream" id="saved">([A-Za-z0-9+/=]*)</script>'
)


def page(view: ViewData, state: wire.State) -> str:
    """Return the page for a `RunView` or a `ReportView`. Raises FrontEndMissingError."""
    saved = json.dumps(contents(view, state), allow_nan=False, separators=(",", ":"))
    data = base64.b64encode(gzip.compress(saved.encode(), mtime=0)).decode()
    return _whole(view.overview()["title"], html.fragment(view), data)


def rebuild(text: str) -> str | None:
    """Return a page made anew around the data of one that was saved: no script of the file is in it. None: it has no such data."""
    found = _SAVED.search(text)
    return None if found is None else _whole("", "", found[1])


def _whole(title: str, fallback: str, data: str) -> str:
    script = bundle(PAGE)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return html.render(
        "saved_page.html",
        title=title,
        policy=policy,
        fallback=fallback,
        data=data,
        script=Markup(script),
    )


def contents(view: ViewData, state: wire.State) -> wire.SavedPage:
    """Return what the page answers from."""
    overview: wire.Overview = view.overview()
    rows = _rows(view, overview, state)
    answers = _Answers(view, state)
    if overview["kind"] == "report":
        answers.ask("layers")
    for at in range(len(overview["findings"])):
        answers.ask("finding", finding=at)
    for row in islice(_wanted(overview, state, rows), _DETAILS):
        answers.tell_of(row)
    if len(rows) < overview["rows"]:
        which = "those of the step that it was saved at" + (
            ", and mismatches" if overview["kind"] == "report" else ""
        )
        overview["notes"].insert(
            0, f"This page holds {len(rows):,} of {overview['rows']:,} rows: {which}."
        )
    nodes = [
        node
        for parent in (-1, *view.tree.kids)
        for node in view.tree.children(parent, 0, 1 << 30)["nodes"]
    ]
    nodes = sorted({node["id"]: node for node in nodes}.values(), key=lambda node: node["id"])
    return {
        "state": state,
        "snapshot": overview,
        "nodes": nodes,
        "parents": [view.tree.nodes[node["id"]].parent for node in nodes],
        "rows": list(rows.values()),
        "homes": [view.tree.nearest(row["path"]) for row in rows.values()],
        "answers": answers.kept,
    }


def _rows(view: ViewData, overview: wire.Overview, state: wire.State) -> dict[int, wire.Row]:
    """Return all rows; where they are too many, those of the step and the mismatches, by their numbers."""
    if overview["rows"] <= html.MAX_ROWS:
        found = list(_listed(view, -1, False))
    else:
        found = [*_listed(view, state["position"], False), *_listed(view, -1, True)]
    return {row["id"]: row for row in sorted(found, key=lambda row: row["id"])}


def _listed(view: ViewData, step: int, mismatch: bool) -> Iterator[wire.Row]:
    start, total = 0, 1
    while start < min(total, html.MAX_ROWS):
        n = min(1000, html.MAX_ROWS - start)
        found: wire.Page = view.rows(
            {
                "op": "rows",
                "step": step,
                **EVERYTHING,
                "every": step < 0,
                "mismatch": mismatch,
                "start": start,
                "n": n,
            }
        )
        yield from found["rows"]
        start, total = start + n, found["total"]


def _wanted(
    overview: wire.Overview, state: wire.State, rows: dict[int, wire.Row]
) -> Iterator[wire.Row]:
    """Yield rows, what is looked at and what leads to the error first, each once."""
    first = [
        state["selected"],
        overview["first_bad"],
        *(finding["row"] for finding in overview["findings"]),
    ]
    bad = [
        row["id"]
        for row in rows.values()
        if row["verdict"] == "diverged" or row["nan"] or row["inf"]
    ]
    here = [row["id"] for row in rows.values() if row["step"] == state["position"]]
    yield from (
        rows[number] for number in dict.fromkeys([*first, *bad, *here, *rows]) if number in rows
    )


class _Answers:
    """Asks as the page does, and keeps what came."""

    def __init__(self, view: ViewData, state: wire.State) -> None:
        self._view, self._state = view, state
        self._room, self._curves = _ELEMENTS, _CURVES
        self.kept: list[wire.Kept] = []

    def ask(self, op: str, **request: Any) -> Any:
        """Keep the answer; one that can't be had is not kept."""
        try:
            answer = getattr(self._view, op)({"op": op, **request})
        except LLMDebugError:
            return None
        answer, buffers = answer if isinstance(answer, tuple) else (answer, [])
        self._keep(_key(op, request), answer, buffers)
        return answer

    def tell_of(self, row: wire.Row) -> None:
        """Keep what the page shows of a tensor; its values where there is room for them, a slice of those that are looked at."""
        looked_at = row["id"] == self._state["selected"]
        elements = math.prod(row["shape"])
        if row["kept"] and elements > _ELEMENTS and not looked_at:
            return
        detail = self.ask("detail", row=row["id"])
        self._curves -= 1
        if self._curves >= 0:
            self.ask("series", row=row["id"], n=_POINTS)
        sides = [side for side in detail["sides"] if side["kept"]] if detail else []
        whole = elements * len(sides) <= self._room
        if not (whole or looked_at):
            return
        for side in sides:
            which = side["which"]
            self.ask("histogram", row=row["id"], which=which, bins=_BINS)
            if whole:
                values = np.ascontiguousarray(self._view.array(row["id"], which), "<f4")
                self._room -= values.size
                self._keep(
                    f"array {row['id']} {which}",
                    {"shape": list(values.shape)},
                    [memoryview(values.tobytes())],
                )
            else:
                self._slice(row["id"], side)
            if which == "difference":
                self.ask("worst", row=row["id"], n=_WORST)
                self.ask("errors", row=row["id"], bins=_BINS)
                self.ask("scatter", row=row["id"], points=_SCATTERED, size=_GRID)

    def _slice(self, row: int, side: wire.Side) -> None:
        last = len(side["axes"]) - 1
        axes = self._state["axes"] or [last - 1, last]
        fixed = self._state["fixed"] or [0] * (last + 1)
        window = dict.fromkeys(("y0", "x0", "y1", "x1"), 0)
        self.ask(
            "view", row=row, which=side["which"], axes=axes, fixed=fixed, size=_CELLS, **window
        )

    def _keep(self, key: str, answer: Any, buffers: list[memoryview]) -> None:
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        self.kept.append({"key": key, "answer": answer, "buffers": texts})


def _key(op: str, request: dict[str, Any]) -> str:
    """Return what a request is found by: what it asks for, and not in how many cells or points."""
    named = [request.get(name) for name in ("row", "finding", "which", "axes", "fixed")]
    parts = [
        ",".join(map(str, part)) if isinstance(part, list) else str(part)
        for part in named
        if part is not None
    ]
    return " ".join([op, *parts])
