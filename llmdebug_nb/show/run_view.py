"""One run, as the explorer asks for it."""

from __future__ import annotations

import functools
from collections import Counter
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

# what a filter's words are looked for in: the row as the page shows it (in[0], out[0]), and as Python calls it
_SHOWN = """path || ' ' || role || '[' || slot || '] ' || CASE role WHEN 'input' THEN 'in' ELSE 'out' END || '[' || slot
 || '] ' || op || ' ' || dtype"""


class RunView(View):
    """One run. ``mismatch`` asks for the rows that hold NaN or infinity."""

    kind = "run"
    _BAD = "(coalesce(nan, 0) + coalesce(inf, 0) > 0)"

    def __init__(self, run: Any, tokenizer: Any = None) -> None:
        super().__init__(run.steps(), texts(run, tokenizer))
        self.run = run

    @functools.cached_property
    def tree(self) -> Tree:
        counted = self.run.query(f"SELECT path, count(*), sum({self._BAD}) FROM rows GROUP BY path")
        return Tree(self.run.nodes, Counter({p: n for p, n, _ in counted}), Counter({p: b for p, _, b in counted}))

    def overview(self, request: Any = None) -> wire.Overview:
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
                Counter({(g, s): n for g, s, n, _ in counted}), Counter({(g, s): b for g, s, _, b in counted})
            ),
            "findings": [],
            "first_bad": -1 if first is None else first,
            "rows": info["records"],
        }

    def _where(self, step: int, node: int, mismatch: bool, text: str) -> tuple[str, list[Any]]:
        clauses, values = ["1"], list[Any]()
        if step >= 0 and self.steps:
            call = self.steps[min(step, len(self.steps) - 1)]
            clauses.append("generation = ? AND step = ?")
            values += [call.generation, call.step]
        path = self.tree.path(node)
        if path is not None:
            clauses.append("within(path, ?)")
            values.append(path)
        if mismatch:
            clauses.append(self._BAD)
        narrowed, wanted = filters.read(text).sql(_SHOWN)
        return " AND ".join(clauses + narrowed), values + wanted

    def listed(self, request: wire.RowsRequest) -> wire.Page:
        where, values = self._where(request["step"], request["node"], request["mismatch"], request["text"])
        total = self.run.query(f"SELECT count(*) FROM rows WHERE {where}", values)[0][0]
        page = self.run.records(where, values, max(0, request["start"]), max(0, min(request["n"], 1000)))
        return {
            "total": total,
            "start": request["start"],
            "rows": [self.row_view(r.id, r) for r in page],
            "problem": "",
        }

    def locate(self, request: wire.LocateRequest) -> wire.Located:
        where, values = self._where(-1, request["node"], request["mismatch"], request["text"])
        aim, end = ("max", "<") if request["delta"] < 0 else ("min", ">")
        start = request["row"] if request["row"] >= 0 or request["delta"] > 0 else 1 << 60
        found = self.run.query(f"SELECT {aim}(id) FROM rows WHERE {where} AND id {end} ?", [*values, start])[0][0]
        if found is None:
            return {"row": None, "index": -1}
        return self.row({**request, "op": "row", "row": found})  # type: ignore[typeddict-item]

    def row(self, request: wire.RowRequest) -> wire.Located:
        row = self.row_view(request["row"], self.run.record(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        where, values = self._where(row["step"], request["node"], request["mismatch"], request["text"])
        inside = self.run.query(f"SELECT count(*), max(id) FROM rows WHERE {where} AND id <= ?", [*values, row["id"]])[
            0
        ]
        return {"row": row, "index": inside[0] - 1 if inside[1] == row["id"] else -1}

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
                line(name, [(self.stop(r.site), r.id, figure(r.summary)) for r in found], request["n"])
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
