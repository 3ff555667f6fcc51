"""The explorer as a page of its own, which needs no kernel.

The page holds all rows and modules, and filters them itself; it holds small tensors whole, and cuts
and zooms them itself. For larger ones it holds the answers that the view gave when the page was
saved, and says so when an answer is missing. Only our own script runs in it, and it loads nothing
from outside.
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

_DETAILS = 500  # tensors with details
_CURVES = 100  # of these, tensors with curves: each takes a search through the whole run
_ELEMENTS = 1 << 20  # of all tensors that are held whole
_CELLS = 256
_BINS, _POINTS, _WORST = 64, 400, 20
_SCATTERED, _GRID = 1024, 64  # points of a scatter plot; cells per side if there are more
_SAVED = re.compile(
    r'<script type="application/octet-stream" id="saved">([A-Za-z0-9+/=]*)</script>'
)


def page(view: ViewData, state: wire.State) -> str:
    """Return the page for a view. Raises FrontEndMissingError."""
    saved = json.dumps(contents(view, state), allow_nan=False, separators=(",", ":"))
    data = base64.b64encode(gzip.compress(saved.encode(), mtime=0)).decode()
    return _whole(view.overview()["title"], html.fragment(view), data)


def rebuild(text: str) -> str | None:
    """Return a new page with the data of a saved one and none of its scripts; None without data."""
    data = _SAVED.search(text)
    return None if data is None else _whole("", Markup(""), data[1])


def _whole(title: str, fallback: Markup, data: str) -> str:
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
    """Return the data that the page answers from."""
    overview: wire.Overview = view.overview()
    rows = _rows(view, overview, state)
    answers = _Answers(view, state)
    if overview["kind"] == "report":
        answers.ask("layers")
    for at in range(len(overview["findings"])):
        answers.ask("finding", finding=at)
    for row in islice(_wanted(overview, state, rows), _DETAILS):
        answers.add_row(row)
    if len(rows) < overview["rows"]:
        mismatches = " and the mismatches" if overview["kind"] == "report" else ""
        which = f"those of the step it was saved at{mismatches}"
        note = f"This page holds {len(rows):,} of {overview['rows']:,} rows: {which}."
        overview["notes"].insert(0, note)
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
    """Return all rows by id; of too many, those of the current step and the mismatches."""
    if overview["rows"] <= html.MAX_ROWS:
        rows = list(_listed(view, -1, False))
    else:
        rows = [*_listed(view, state["position"], False), *_listed(view, -1, True)]
    return {row["id"]: row for row in sorted(rows, key=lambda row: row["id"])}


def _listed(view: ViewData, step: int, mismatch: bool) -> Iterator[wire.Row]:
    start, total = 0, 1
    while start < min(total, html.MAX_ROWS):
        n = min(1000, html.MAX_ROWS - start)
        page = view.rows(
            {
                **EVERYTHING, "op": "rows", "step": step, "every": step < 0,
                "mismatch": mismatch, "start": start, "n": n,
            }
        )  # fmt: skip
        yield from page["rows"]
        start, total = start + n, page["total"]


def _wanted(
    overview: wire.Overview, state: wire.State, rows: dict[int, wire.Row]
) -> Iterator[wire.Row]:
    """Yield each row once: the selected one first, then what leads to the error."""
    blamed = [finding["row"] for finding in overview["findings"]]
    first = [state["selected"], overview["first_bad"], *blamed]
    bad = [number for number, row in rows.items() if _is_bad(row)]
    here = [number for number, row in rows.items() if row["step"] == state["position"]]
    order = dict.fromkeys([*first, *bad, *here, *rows])
    yield from (rows[number] for number in order if number in rows)


def _is_bad(row: wire.Row) -> bool:
    return bool(row["verdict"] == "diverged" or row["nan"] or row["inf"])


class _Answers:
    """Asks a view as the page does, and keeps the answers."""

    def __init__(self, view: ViewData, state: wire.State) -> None:
        self._view, self._state = view, state
        self._room, self._curves = _ELEMENTS, _CURVES
        self.kept: list[wire.Kept] = []

    def ask(self, op: str, **request: object) -> Any:
        """Keep and return the answer; None if there is none."""
        try:
            answer = getattr(self._view, op)({"op": op, **request})
        except LLMDebugError:
            return None
        answer, buffers = answer if isinstance(answer, tuple) else (answer, [])
        self._keep(_key(op, request), answer, buffers)
        return answer

    def add_row(self, row: wire.Row) -> None:
        """Keep the details of a row, and its values if there is room for them.

        Of the selected row, keep at least a slice of the values.
        """
        selected = row["id"] == self._state["selected"]
        elements = math.prod(row["shape"])
        if row["kept"] and elements > _ELEMENTS and not selected:
            return
        detail = self.ask("detail", row=row["id"])
        self._curves -= 1
        if self._curves >= 0:
            self.ask("series", row=row["id"], n=_POINTS)
        sides = [side for side in detail["sides"] if side["kept"]] if detail else []
        whole = elements * len(sides) <= self._room
        if not (whole or selected):
            return
        for side in sides:
            which = side["which"]
            if self.ask("histogram", row=row["id"], which=which, bins=_BINS) is None:
                continue  # damaged, or of more dimensions than a picture can have
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

    def _keep(self, key: str, answer: dict[str, Any], buffers: list[memoryview]) -> None:
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        self.kept.append({"key": key, "answer": answer, "buffers": texts})


def _key(op: str, request: dict[str, object]) -> str:
    """Return the key of a request: all its fields but the numbers of cells and points."""
    named = [request.get(name) for name in ("row", "finding", "which", "axes", "fixed")]
    parts = [
        ",".join(map(str, part)) if isinstance(part, list) else str(part)
        for part in named
        if part is not None
    ]
    return " ".join([op, *parts])
