"""One run, as the explorer asks for it."""

from __future__ import annotations

import bisect
import functools
import json
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

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
    _BAD = "(coalesce(nan, 0) + coalesce(inf, 0) > 0)"

    def __init__(self, run: Any, tokenizer: Any = None) -> None:
        super().__init__(run.steps(), texts(run, tokenizer))
        self.run = run
        self.by_round = bool((run.meta.get("options") or {}).get("rounds"))
        self._source: Any = None
        self._found = functools.lru_cache(maxsize=4)(lambda find, *asked: find(*asked))

    @functools.cached_property
    def tree(self) -> Tree:
        # two queries: the index by path answers the first one alone
        every, bad = (
            self.run.query(f"SELECT path, count(*) FROM rows WHERE {where} GROUP BY path")
            for where in ("1", self._BAD)
        )
        return Tree(self.run.nodes, Counter(dict(every)), Counter(dict(bad)))

    def overview(self, request: Any = None) -> wire.Overview:
        return self._cached(self._overview)  # type: ignore[no-any-return]

    def _overview(self) -> wire.Overview:
        info = self.run.info()
        counted = self.run.query(
            f"SELECT generation, step, count(*), sum({self._BAD}) FROM rows GROUP BY generation, step"
        )
        first = self.run.query(f"SELECT min(id) FROM rows WHERE {self._BAD}")[0][0]
        lines = [
            f"{count_text(info['records'], 'tensor')} of {count_text(info['steps'], 'step')}, {size_text(info['bytes'])} {'in memory' if self.run.path is None else 'on disk'}"
        ]
        if not info["complete"]:
            lines.append(f"incomplete: {info['ended_by'] or 'the recording process ended early'}")
        if info["lost"]:
            sql = "SELECT lost, count(*) FROM rows WHERE lost IS NOT NULL GROUP BY lost ORDER BY 2 DESC LIMIT 2"
            why = "; ".join(f"{count:,} {text}" for text, count in self.run.query(sql))
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

    def _where(self, step: int, node: int, mismatch: bool, text: str) -> tuple[str, list[Any]]:
        clauses, values = ["1"], list[Any]()
        if step >= 0 and self.steps:
            call = self.steps[min(step, len(self.steps) - 1)]
            clauses.append("generation = ? AND step = ?")
            values += [call.generation, call.step]
        if node != -1:
            clauses.append("within(path, ?)")
            values.append(self.tree.path(node))
        if mismatch:
            clauses.append(self._BAD)
        wanted = filters.read(text)
        narrowed, sought = wanted.sql(self._cached(self._kinds) if wanted.words else ())
        return " AND ".join(clauses + narrowed), values + sought

    def _kinds(self) -> list[filters.Kind]:
        """Return all that rows show beside their paths."""
        return [
            (role, slot, op, dtype)
            for role, slot, op, dtype in self.run.query(f"SELECT DISTINCT {filters.KIND} FROM rows")
            if None not in (role, slot, op, dtype)
        ]

    def _ids(self, step: int, node: int, mismatch: bool, text: str) -> array[int]:
        """Return the ids of what is listed, in order: pages and places are cut from them."""
        where, values = self._where(step, node, mismatch, text)
        return array(
            "q",
            (
                number
                for (number,) in self.run.query(
                    f"SELECT id FROM rows WHERE {where} ORDER BY id", values
                )
            ),
        )

    def _cached(self, find: Callable[..., Any], *asked: Any) -> Any:
        """Return what ``find`` finds, without looking again while the dump has not grown."""
        source = self.run.source
        if source is not self._source:
            self._source = source
            self._found.cache_clear()
        return self._found(find, *asked)

    def listed(self, request: wire.RowsRequest) -> wire.Page:
        step = -1 if request["every"] else request["step"]
        found = self._cached(self._ids, step, request["node"], request["mismatch"], request["text"])
        start = max(0, request["start"])
        page = found[start : start + max(0, min(request["n"], 1000))]
        records = self.run.records(
            "id IN (SELECT value FROM json_each(?))", [json.dumps(page.tolist())]
        )
        return {
            "total": len(found),
            "start": start,
            "rows": [self.row_view(r.id, r) for r in records],
            "problem": "",
        }

    def locate(self, request: wire.LocateRequest) -> wire.Located:
        where, values = self._where(-1, request["node"], request["mismatch"], request["text"])
        aim, end = ("max", "<") if request["delta"] < 0 else ("min", ">")
        start = request["row"] if request["row"] >= 0 or request["delta"] > 0 else 1 << 60
        found = self.run.query(
            f"SELECT {aim}(id) FROM rows WHERE {where} AND id {end} ?", [*values, start]
        )[0][0]
        if found is None:
            return {"row": None, "index": -1}
        return self.row({**request, "op": "row", "row": found})  # type: ignore[typeddict-item]

    def row(self, request: wire.RowRequest) -> wire.Located:
        row = self.row_view(request["row"], self.run.record(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        step = -1 if request["every"] else row["step"]
        found = self._cached(self._ids, step, request["node"], request["mismatch"], request["text"])
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
        figures = {"l2norm": lambda summary: summary.l2norm, "max abs": filters.largest}
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
            sql = "SELECT min(step) FROM rows WHERE path = ? AND role = ? AND generation >= 0"
            step = self.run.query(sql, (path, role))[0][0] or 0
        return int(self.run.find(path, step, role).id)

    def text(self) -> str:
        return run_text(self)
