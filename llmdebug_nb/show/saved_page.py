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
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from markupsafe import Markup

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.show import html, wire
from llmdebug_nb.show.bundle import PAGE, bundle
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.view_data import ViewData


@dataclass(frozen=True)
class Room:
    """How much is held.

    Rows, tensors with details, curves, elements of whole tensors, layers with their calls, and
    cells per side of a slice of a tensor that is not held whole.
    """

    rows: int
    details: int
    curves: int  # each takes a search through the whole run
    elements: int
    layers: int
    cells: int

    def smaller(self) -> Room:
        layers, cells = max(1, self.layers // 4), max(16, self.cells // 2)
        return Room(self.rows // 2, self.details // 2, 0, self.elements // 8, layers, cells)


_PAGE = Room(html.MAX_ROWS, 500, 100, 1 << 20, 100, 256)
_SNAPSHOT = Room(200, 12, 0, 1 << 16, 32, 64)  # fits into `_SNAPSHOT_BYTES` for most comparisons
_SNAPSHOT_BYTES = 300_000  # in a notebook's file, which holds every output
SNAPSHOT_TYPE = "application/vnd.llmdebug.explorer+json"
_BINS, _POINTS, _WORST = 64, 400, 20
_CALLS = 200  # of a layer
_SCATTERED, _GRID = 1024, 64  # points of a scatter plot; cells per side if there are more
_SAVED = re.compile(
    r'<script type="application/octet-stream" id="saved">([A-Za-z0-9+/=]*)</script>'
)


def page(view: ViewData, state: wire.State) -> str:
    """Return the page for a view. Raises FrontEndMissingError."""
    return _whole(view.overview()["title"], html.fragment(view), _packed(contents(view, state)))


def snapshot(view: ViewData, state: wire.State) -> dict[str, str] | None:
    """Return a small part of the page, for the output of a cell: ``{"data": base64 of gzip}``.

    It holds the answer, where the error goes, the code, the rows that matter and the tensors of the
    findings. None if even little of it is too large.
    """
    room = _SNAPSHOT
    while room.rows > 10:
        data = _packed(contents(view, state, room))
        if len(data) <= _SNAPSHOT_BYTES:
            return {"data": data}
        room = room.smaller()
    return None


def _packed(saved: wire.SavedPage) -> str:
    text = json.dumps(saved, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


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


def contents(view: ViewData, state: wire.State, room: Room | None = None) -> wire.SavedPage:
    """Return the data that the page answers from."""
    room = room or _PAGE
    overview: wire.Overview = view.overview()
    rows = _rows(view, overview, state, room.rows)
    answers = _Answers(view, state, room)
    if overview["kind"] == "report":
        answers.add_layers(overview)
    if overview["halt"]:
        answers.ask("halt")
    for at in range(len(overview["findings"])):
        answers.ask("finding", finding=at)
    for row in islice(_wanted(overview, state, rows), room.details):
        answers.add_row(row)
    if len(rows) < overview["rows"]:
        mismatches = " and the mismatches" if overview["kind"] == "report" else ""
        which = f"those of the step it was saved at{mismatches}"
        note = f"This page holds {len(rows):,} of {overview['rows']:,} rows: {which}."
        overview = {**overview, "notes": [note, *overview["notes"]]}
    homes = [view.tree.nearest(row["path"]) for row in rows.values()]
    nodes = _nodes(view, homes, whole=len(rows) == overview["rows"])
    return {
        "state": state,
        "snapshot": overview,
        "nodes": nodes,
        "parents": [view.tree.nodes[node["id"]].parent for node in nodes],
        "rows": list(rows.values()),
        "homes": homes,
        "answers": answers.kept,
    }


def _nodes(view: ViewData, homes: list[int], whole: bool) -> list[wire.TreeNode]:
    """Return the modules of the rows and those around them, by id; ``whole``: all modules."""
    around: set[int] = set()
    for node in set(homes):
        while node >= 0 and node not in around:
            around.add(node)
            node = view.tree.nodes[node].parent
    parents = view.tree.kids if whole else {view.tree.nodes[node].parent for node in around}
    nodes = {
        node["id"]: node
        for parent in (-1, *parents)
        for node in view.tree.children(parent, 0, 1 << 30)["nodes"]
        if whole or node["id"] in around
    }
    return sorted(nodes.values(), key=lambda node: node["id"])


def _rows(
    view: ViewData, overview: wire.Overview, state: wire.State, most: int
) -> dict[int, wire.Row]:
    """Return all rows by id; of too many, those that matter, of the step, and the mismatches."""
    if overview["rows"] <= most:
        rows = list(_listed(view, -1, False, most))
    else:
        here = _listed(view, state["position"], False, most)
        telling = view.telling_rows(most) if overview["kind"] == "report" else []
        rows = [*telling, *here, *_listed(view, -1, True, most)]
        rows = list({row["id"]: row for row in rows}.values())[: 2 * most]
    return {row["id"]: row for row in sorted(rows, key=lambda row: row["id"])}


def _listed(view: ViewData, step: int, mismatch: bool, most: int) -> Iterator[wire.Row]:
    start, total = 0, 1
    while start < min(total, most):
        n = min(1000, most - start)
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

    def __init__(self, view: ViewData, state: wire.State, room: Room) -> None:
        self._view, self._state = view, state
        self._room, self._curves, self._largest = room.elements, room.curves, room.elements
        self._layers, self._cells = room.layers, room.cells
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

    def add_layers(self, overview: wire.Overview) -> None:
        """Keep where the error goes, and the calls of the layers that show most of it."""
        errors = self._view.layer_errors
        if errors is None:
            return
        self.ask("layers")
        steps = sorted({self._state["position"], *(one["step"] for one in overview["findings"])})
        state = errors.state[:, steps]
        for at in np.argsort(-state.astype(int), axis=None, kind="stable")[: self._layers]:
            layer, step = divmod(int(at), len(steps))
            self.ask("calls", layer=layer, step=steps[step], n=_CALLS)

    def add_row(self, row: wire.Row) -> None:
        """Keep the details of a row, and its values if there is room for them.

        Of the selected row, keep at least a slice of the values.
        """
        selected = row["id"] == self._state["selected"]
        elements = math.prod(row["shape"])
        if row["kept"] and elements > self._largest and not selected:
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
                with np.errstate(over="ignore"):  # values beyond float32 become infinity
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
            "view", row=row, which=side["which"], axes=axes, fixed=fixed, size=self._cells, **window
        )

    def _keep(self, key: str, answer: dict[str, Any], buffers: list[memoryview]) -> None:
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        self.kept.append({"key": key, "answer": answer, "buffers": texts})


def _key(op: str, request: dict[str, object]) -> str:
    """Return the key of a request: all its fields but the numbers of cells and points."""
    fields = ("row", "finding", "layer", "step", "which", "axes", "fixed")
    named = [request.get(name) for name in fields]
    parts = [
        ",".join(map(str, part)) if isinstance(part, list) else str(part)
        for part in named
        if part is not None
    ]
    return " ".join([op, *parts])
