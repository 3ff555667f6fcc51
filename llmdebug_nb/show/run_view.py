"""The view of one run."""

from __future__ import annotations

import bisect
import functools
from array import array
from collections import Counter

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.show import filters, tensors, wire, wire_requests
from llmdebug_nb.show.flow import flow
from llmdebug_nb.show.series import line, same_site
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.show.text import run_text
from llmdebug_nb.show.timeline import Timeline, timeline
from llmdebug_nb.show.tokens import Tokenizer, texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.views import View, several, side_view
from llmdebug_nb.show.words import count_text, made_text, size_text
from llmdebug_nb.store.row_filter import RowFilter, largest
from llmdebug_nb.store.run import Run

_CACHED_LISTS = 4
_PAGE = 1000  # rows at most


class RunView(View):
    """One run. ``mismatch`` asks for the rows that hold NaN or infinity."""

    kind = "run"

    def __init__(self, run: Run, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(run.steps(), texts(run, tokenizer))
        self.run = run
        for generation, step, name, *places in run.requests():
            row, last_row, position, last_position = places
            self.requests.setdefault((generation, step), []).append(
                {
                    "name": name, "row": row, "last_row": last_row,
                    "position": position, "last_position": last_position,
                }
            )  # fmt: skip
        self.by_round = bool((run.meta.get("options") or {}).get("rounds"))
        self._source: object = None
        self._lists = functools.lru_cache(maxsize=_CACHED_LISTS)(run.index.matching)
        self._overview_now: wire.Overview | None = None

    @functools.cached_property
    def tree(self) -> Tree:
        rows, bad = (self.run.index.count_by_path(bad) for bad in (False, True))
        return Tree(self.run.nodes, rows, bad)

    def _forget_if_grown(self) -> None:
        """Drop cached answers when more was recorded since."""
        if self.run.source is not self._source:
            self._source, self._overview_now = self.run.source, None
            self._lists.cache_clear()

    def overview(self, request: wire_requests.OverviewRequest | None = None) -> wire.Overview:
        self._forget_if_grown()
        if self._overview_now is None:
            self._overview_now = self._overview()
        return self._overview_now

    def _overview(self) -> wire.Overview:
        steps, place = self.run.index.count_by_step(), self.step_index
        first = self.run.index.first_bad()
        return {
            "kind": "run",
            "title": self._title(),
            "golden": self.run.label,
            "mine": "",
            "verdict": None,
            "caution": "",
            "lines": self._lines(),
            "summary": "",
            "notes": [*filter(None, [self.run.calls_text()]), made_text(self.run)],
            "steps": self.step_views(
                Counter({place.get((one.generation, one.step), -1): one.records for one in steps}),
                Counter({place.get((one.generation, one.step), -1): one.bad for one in steps}),
            ),
            "findings": [],
            "marks": [],
            "kept": "",
            "first_bad": -1 if first is None else first,
            "rows": self.run.info()["records"],
            "ranks": several(self.run.info()["ranks"]),
            "inside": False,
            "halt": self.halted.number if self.halted else 0,
        }

    def _title(self) -> str:
        halted = self.run.path is None  # only the tensors of a halt are in memory
        return "Tensors at this halt" if halted else f"Run {self.run.label}"

    def _lines(self) -> list[str]:
        info = self.run.info()
        counts = f"{count_text(info['records'], 'tensor')} of {count_text(info['steps'], 'step')}"
        place = "in memory" if self.run.path is None else "on disk"
        lines = [f"{counts}, {size_text(info['bytes'])} {place}"]
        if not info["complete"]:
            lines.append(f"incomplete: {info['ended_by'] or 'the recording process ended early'}")
        if info["lost"]:
            reasons = self.run.index.lost_reasons(2)
            why = "; ".join(f"{count:,} {reason}" for reason, count in reasons)
            lines.append(f"{count_text(info['lost'], 'tensor')} without values: {why}")
        return lines

    def _filter(self, request: wire_requests.Listed, step: int) -> RowFilter:
        """Return the filter of a request; ``step`` -1 means all steps."""
        place: tuple[int, int] | None = None
        if step >= 0 and self.steps:
            call = self.steps[min(step, len(self.steps) - 1)]
            place = call.generation, call.step
        module = self.tree.path(request["node"]) if request["node"] != -1 else None
        typed = filters.read(request["text"])
        return typed._replace(step=place, module=module, bad=request["mismatch"])

    def _ids(self, request: wire_requests.Listed, step: int) -> array[int]:
        """Return the ids of the listed rows, in order."""
        self._forget_if_grown()
        return self._lists(self._filter(request, -1 if request["every"] else step))

    def listed(self, request: wire_requests.RowsRequest) -> wire.Page:
        ids = self._ids(request, request["step"])
        start = max(0, request["start"])
        page = ids[start : start + max(0, min(request["n"], _PAGE))]
        rows = [self.row_view(record.id, record) for record in self.run.records(id=tuple(page))]
        return {"total": len(ids), "start": start, "rows": rows, "problem": ""}

    def locate(self, request: wire_requests.LocateRequest) -> wire.Located:
        backwards = request["delta"] < 0
        start = 1 << 60 if backwards and request["row"] < 0 else request["row"]
        row = self.run.index.nearest_match(self._filter(request, -1), start, backwards)
        if row is None:
            return {"row": None, "index": -1}
        return self.row({**request, "op": "row", "row": row})  # type: ignore[typeddict-item]

    def row(self, request: wire_requests.RowRequest) -> wire.Located:
        row = self.row_view(request["row"], self.run.record(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        ids = self._ids(request, row["step"])
        place = bisect.bisect_left(ids, row["id"])
        is_listed = place < len(ids) and ids[place] == row["id"]
        return {"row": row, "index": place if is_listed else -1}

    def detail(self, request: wire_requests.DetailRequest) -> wire.Detail:
        record = self.run.record(request["row"])
        producer = -1 if record.producer is None else record.producer
        return {
            "row": self.row_view(record.id, record),
            "sides": [side_view("golden", self.run, record)],
            "metrics": [],
            "producer": producer,
            "producer_label": str(self.run.record(producer).site) if producer >= 0 else "",
            "flow": flow(self.run, record, lambda number: number),
        }

    def series(self, request: wire_requests.SeriesRequest) -> wire.Series:
        records = list(same_site(self.run, self.run.record(request["row"]).site))
        places = [(self.step_index_of(record.site), record.id) for record in records]
        norms = [record.summary.l2norm for record in records]
        peaks = [largest(record.summary) for record in records]
        lines = []
        for name, values in (("l2norm", norms), ("max abs", peaks)):
            points = [(*place, value) for place, value in zip(places, values, strict=True)]
            lines.append(line(name, points, request["n"]))
        return {"lines": lines}

    def load(self, row: int, which: str) -> Array:
        return tensors.as_array(self.run.load(self.run.record(row)))

    def find(self, path: str, step: int | None, role: str) -> int:
        """Return the number of a record; without ``step`` at its first step after the warm-up.

        Raises:
            TensorLookupError: there is no such record.
        """
        if step is None:
            step = self.run.index.first_step(path, role) or 0
        calls = self.run.records(n=1, path=path, step=step, role=role, phase="forward")
        known = next(calls, None)  # of whichever call comes first
        return (known or self.run.find(path, step, role)).id

    def first_rows(self, n: int) -> list[wire.Row]:
        return [self.row_view(record.id, record) for record in self.run.records(n=n)]

    def timeline(self) -> Timeline | None:
        """Return the timeline of the first step with times, if there is one."""
        try:
            return timeline(self.run)
        except TensorLookupError:
            return None

    def text(self) -> str:
        return run_text(self)
