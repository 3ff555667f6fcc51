"""One run, as the explorer asks for it."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from llmdebug_nb.core.opened_run import OpenedRun
from llmdebug_nb.core.row_filter import RowFilter, largest
from llmdebug_nb.show import filters, tensors, wire
from llmdebug_nb.show.flow import flow
from llmdebug_nb.show.series import line, same_site
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.show.text import run_text
from llmdebug_nb.show.tokens import texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.views import View, side_view
from llmdebug_nb.show.words import count_text, made_text, size_text


class RunView(View):
    """One run. ``mismatch`` asks for the rows that hold NaN or infinity."""

    kind = "run"

    def __init__(self, run: OpenedRun, tokenizer: Any = None) -> None:
        super().__init__(run.steps(), texts(run, tokenizer))
        self.run = run
        self.by_round = bool((run.meta.get("options") or {}).get("rounds"))
        self._source: Any = None
        self._found = functools.lru_cache(maxsize=4)(lambda find, *asked: find(*asked))

    @functools.cached_property
    def tree(self) -> Tree:
        every, bad = (self.run.index.count_by_path(bad) for bad in (False, True))
        return Tree(self.run.nodes, every, bad)

    def overview(self, request: Any = None) -> wire.Overview:
        return self._cached(self._overview)  # type: ignore[no-any-return]

    def _overview(self) -> wire.Overview:
        info = self.run.info()
        counted = self.run.index.count_by_step()
        first = self.run.index.first_bad()
        lines = [
            f"{count_text(info['records'], 'tensor')} of {count_text(info['steps'], 'step')}, {size_text(info['bytes'])} {'in memory' if self.run.path is None else 'on disk'}"
        ]
        if not info["complete"]:
            lines.append(f"incomplete: {info['ended_by'] or 'the recording process ended early'}")
        if info["lost"]:
            reasons = self.run.index.lost_reasons(2)
            why = "; ".join(f"{count:,} {text}" for text, count in reasons)
            lines.append(f"{count_text(info['lost'], 'tensor')} without values: {why}")
        return {
            "kind": "run",
            "title": f"Run {self.run.label}",
            "golden": self.run.label,
            "mine": "",
            "verdict": None,
            "lines": lines,
            "summary": "",
            "notes": [made_text(self.run)],
            "steps": self.step_views(
                Counter({(g, s): n for g, s, n, _ in counted}),
                Counter({(g, s): b for g, s, _, b in counted}),
            ),
            "findings": [],
            "marks": [],
            "kept": "",
            "first_bad": -1 if first is None else first,
            "rows": info["records"],
        }

    def _wanted(self, step: int, node: int, mismatch: bool, text: str) -> RowFilter:
        place: tuple[int, int] | None = None
        if step >= 0 and self.steps:
            call = self.steps[min(step, len(self.steps) - 1)]
            place = call.generation, call.step
        module = self.tree.path(node) if node != -1 else None
        return filters.read(text)._replace(step=place, module=module, bad=mismatch)

    def _cached(self, find: Callable[..., Any], *asked: Any) -> Any:
        """Return what ``find`` finds, without looking again while the dump has not grown."""
        source = self.run.source
        if source is not self._source:
            self._source = source
            self._found.cache_clear()
        return self._found(find, *asked)

    def listed(self, request: wire.RowsRequest) -> wire.Page:
        step = -1 if request["every"] else request["step"]
        found = self._cached(
            self.run.index.matching,
            self._wanted(step, request["node"], request["mismatch"], request["text"]),
        )
        start = max(0, request["start"])
        page = found[start : start + max(0, min(request["n"], 1000))]
        records = self.run.records(id=tuple(page))
        return {
            "total": len(found),
            "start": start,
            "rows": [self.row_view(r.id, r) for r in records],
            "problem": "",
        }

    def locate(self, request: wire.LocateRequest) -> wire.Located:
        wanted = self._wanted(-1, request["node"], request["mismatch"], request["text"])
        backwards = request["delta"] < 0
        start = 1 << 60 if backwards and request["row"] < 0 else request["row"]
        found = self.run.index.nearest_match(wanted, start, backwards)
        if found is None:
            return {"row": None, "index": -1}
        return self.row({**request, "op": "row", "row": found})  # type: ignore[typeddict-item]

    def row(self, request: wire.RowRequest) -> wire.Located:
        row = self.row_view(request["row"], self.run.record(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        step = -1 if request["every"] else row["step"]
        found = self._cached(
            self.run.index.matching,
            self._wanted(step, request["node"], request["mismatch"], request["text"]),
        )
        place = bisect.bisect_left(found, row["id"])
        return {
            "row": row,
            "index": place if place < len(found) and found[place] == row["id"] else -1,
        }

    def detail(self, request: wire.DetailRequest) -> wire.Detail:
        record = self.run.record(request["row"])
        producer = -1 if record.producer is None else record.producer
        label = str(self.run.record(producer).site) if producer >= 0 else ""
        return {
            "row": self.row_view(record.id, record),
            "sides": [side_view("golden", self.run, record)],
            "metrics": [],
            "producer": producer,
            "producer_label": label,
            "flow": flow(self.run, record, lambda number: number),
        }

    def series(self, request: wire.SeriesRequest) -> wire.Series:
        found = list(same_site(self.run, self.run.record(request["row"]).site))
        figures = {"l2norm": lambda summary: summary.l2norm, "max abs": largest}
        return {
            "lines": [
                line(
                    name,
                    [(self.step_index_of(r.site), r.id, figure(r.summary)) for r in found],
                    request["n"],
                )
                for name, figure in figures.items()
            ]
        }

    def load(self, row: int, which: str) -> Array:
        return tensors.as_array(self.run.load(self.run.record(row)))

    def find(self, path: str, step: int | None, role: str) -> int:
        """Return the number of a tensor's record, at its first real step if none is named. Raises TensorLookupError."""
        if step is None:
            step = self.run.index.first_step(path, role) or 0
        return int(self.run.find(path, step, role).id)

    def text(self) -> str:
        return run_text(self)
