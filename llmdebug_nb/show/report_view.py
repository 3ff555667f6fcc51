"""A comparison, as the explorer asks for it: its rows are the differences."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmdebug_nb.errors import LLMDebugError, StoreError, TensorLookupError, nearest
from llmdebug_nb.kernels import summary as kernel
from llmdebug_nb.records import Difference, within
from llmdebug_nb.show import filters, tensors, wire
from llmdebug_nb.show.flow import flow
from llmdebug_nb.show.layers import LayerErrors, layer_errors, ratios
from llmdebug_nb.show.series import line, site_key
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.text import report_text
from llmdebug_nb.show.tokens import texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.views import Answer, View, axes_of, side_view
from llmdebug_nb.show.words import labels, made_text


class ReportView(View):
    """A comparison: rows are its differences. ``mismatch`` asks for those that diverged or stayed unmatched."""

    kind = "report"

    def __init__(
        self,
        golden: Any,
        mine: Any,
        differences: Sequence[Difference],
        findings: Sequence[Any],
        verdict: str,
        lines: list[str],
        notes: list[str],
        summary: str = "",
        tokenizer: Any = None,
    ) -> None:
        seen = {(call.generation, call.step): call for call in (*mine.steps(), *golden.steps())}
        super().__init__([seen[key] for key in sorted(seen)], {**texts(mine, tokenizer), **texts(golden, tokenizer)})
        self.golden, self.mine = golden, mine
        self.differences, self.findings, self.verdict, self.lines = differences, findings, verdict, lines
        self.notes, self.summary = notes, summary
        self._row_of = {
            "golden": {d.pair.golden.id: d.index for d in differences if d.pair.golden},
            "mine": {d.pair.mine.id: d.index for d in differences if d.pair.mine},
        }

    @functools.cached_property
    def tree(self) -> Tree:
        rows = Counter(d.site.path for d in self.differences)
        bad, near, alone = (
            Counter(d.site.path for d in self.differences if d.verdict == verdict)
            for verdict in ("diverged", "within_noise", "unmatched")
        )
        return Tree(self.golden.nodes or self.mine.nodes, rows, bad, near, alone)

    def overview(self, request: Any = None) -> wire.Overview:
        rows = Counter((d.site.generation, d.site.step) for d in self.differences)
        bad = Counter((d.site.generation, d.site.step) for d in self.differences if d.verdict == "diverged")
        first = next((d.index for d in self.differences if d.verdict == "diverged"), -1)
        verdict: Any = self.verdict
        golden, mine = labels(self.golden, self.mine)
        return {
            "kind": "report",
            "title": f"{golden} against {mine}",
            "golden": golden,
            "mine": mine,
            "verdict": verdict,
            "lines": self.lines,
            "summary": self.summary,
            "notes": [*self.notes, *(made_text(run) for run in (self.golden, self.mine))],
            "steps": self.step_views(rows, bad),
            "findings": [
                {
                    "path": f.path,
                    "op": f.op,
                    "step": self.stop(f.difference.site) if f.difference else 0,
                    "cause": f.cause,
                    "evidence": f.evidence,
                    "row": f.difference.index if f.difference else -1,
                }
                for f in self.findings
            ],
            "first_bad": first,
            "rows": len(self.differences),
        }

    def _selected(self, step: int, node: int, mismatch: bool, text: str) -> Callable[[Difference], bool]:
        path = self.tree.path(node)
        call = self.steps[min(step, len(self.steps) - 1)] if step >= 0 and self.steps else None
        narrowed = filters.read(text)

        def wanted(d: Difference) -> bool:
            s = d.site
            return (
                (call is None or (s.generation, s.step) == (call.generation, call.step))
                and (path is None or within(s.path, path))
                and (not mismatch or d.verdict in ("diverged", "unmatched"))
                and narrowed.passes(_shown(d), (r.summary for r in (d.pair.golden, d.pair.mine) if r))
            )

        return wanted

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a view lives as long as its explorer
    def _list(self, step: int, node: int, mismatch: bool, text: str) -> list[int]:
        wanted = self._selected(step, node, mismatch, text)
        return [d.index for d in self.differences if wanted(d)]

    def listed(self, request: wire.RowsRequest) -> wire.Page:
        found = self._list(request["step"], request["node"], request["mismatch"], request["text"])
        start = max(0, request["start"])
        page = found[start : start + max(0, min(request["n"], 1000))]
        return {"total": len(found), "start": start, "rows": [self._difference_row(i) for i in page], "problem": ""}

    def locate(self, request: wire.LocateRequest) -> wire.Located:
        wanted = self._selected(-1, request["node"], request["mismatch"], request["text"])
        start, step = request["row"], -1 if request["delta"] < 0 else 1
        if start < 0 and step < 0:
            start = len(self.differences)
        i = start + step
        while 0 <= i < len(self.differences):
            if wanted(self.differences[i]):
                return self.row({**request, "op": "row", "row": i})  # type: ignore[typeddict-item]
            i += step
        return {"row": None, "index": -1}

    def row(self, request: wire.RowRequest) -> wire.Located:
        row = self._difference_row(self._check(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        found = self._list(row["step"], request["node"], request["mismatch"], request["text"])
        place = int(np.searchsorted(found, row["id"])) if found else 0
        return {"row": row, "index": place if place < len(found) and found[place] == row["id"] else -1}

    def _check(self, row: int) -> int:
        if not 0 <= row < len(self.differences):
            raise TensorLookupError(f"the report has no row {row}; it has {len(self.differences)}")
        return row

    def _difference_row(self, index: int) -> wire.Row:
        d = self.differences[index]
        return self.row_view(
            index,
            d.pair.either,
            verdict=d.verdict,
            error=number(d.error),
            limit=number(d.limit),
            reason=d.reason or (d.pair.fit.says if d.pair.fit else ""),
        )

    def detail(self, request: wire.DetailRequest) -> wire.Detail:
        d = self.differences[self._check(request["row"])]
        golden, mine = d.pair.golden, d.pair.mine
        sides = [side_view("golden", self.golden, golden)] if golden else []
        sides += [side_view("mine", self.mine, mine)] if mine else []
        if golden and mine:
            sides.append(self._difference(d.index, sides))
        run, row_of = (self.golden, self._row_of["golden"]) if golden else (self.mine, self._row_of["mine"])
        made_by = d.pair.either.producer
        producer = row_of.get(made_by, -1) if made_by is not None else -1
        return {
            "row": self._difference_row(d.index),
            "sides": sides,
            "metrics": [{"name": name, "value": number(value)} for name, value in d.metrics.items()],
            "producer": producer,
            "producer_label": str(self.differences[producer].site) if producer >= 0 else "",
            "flow": flow(run, d.pair.either, row_of.get),
        }

    def _difference(self, row: int, sides: list[wire.Side]) -> wire.Side:
        """Return the side that shows mine minus golden."""
        why = next((f"{side['which']}: {side['why']}" for side in sides if not side["kept"]), "")
        figures: tuple[Any, ...] = (None,) * 7
        shape = tuple(sides[0]["shape"])
        try:
            if not why:
                difference = self.array(row, "difference")
                shape, figures = difference.shape, kernel.figures(torch.from_numpy(difference))
        except (LLMDebugError, ValueError) as error:
            why = str(error)
        low, high, mean, norm, nan, inf, zero = figures
        golden, mine = (side["code"] for side in sides)
        return {
            **sides[0], "which": "difference", "kept": not why, "why": why, "shape": list(shape), "axes": axes_of(shape),
            "numel": math.prod(shape), "min": number(low), "max": number(high), "mean": number(mean), "l2norm": number(norm),
            "nan": nan, "inf": inf, "zero": zero, "fingerprint": "", "code": f"{mine} - {golden}" if golden else "",
        }  # fmt: skip

    def finding(self, request: wire.FindingRequest) -> wire.FindingDetail:
        at = request["finding"]
        if not 0 <= at < len(self.findings):
            raise TensorLookupError(f"the report has no finding {at}; it has {len(self.findings)}")
        script = why = ""
        try:
            script = self.findings[at].script()
        except StoreError as error:
            why = str(error)
        save = f'report.findings[{at}].save_repro("repro.py")'
        return {"script": script, "why": why, "save": save, "source": self.findings[at].source or ""}

    @functools.cached_property
    def layer_errors(self) -> LayerErrors:
        """How far each layer is off at each step."""
        return layer_errors(self.tree, self.differences, self.step_index)

    @functools.cached_property
    def _by_site(self) -> dict[tuple[Any, ...], list[Difference]]:
        found: dict[tuple[Any, ...], list[Difference]] = {}
        for d in self.differences:
            found.setdefault(site_key(d.site), []).append(d)
        return found

    def series(self, request: wire.SeriesRequest) -> wire.Series:
        found = self._by_site[site_key(self.differences[self._check(request["row"])].site)]
        error, limit = (
            np.array([np.nan if value is None else value for value in values])
            for values in ([d.error for d in found], [d.limit for d in found])
        )
        times = [
            None if d.error is None else float(ratio) for d, ratio in zip(found, ratios(error, limit), strict=True)
        ]
        points = [(self.stop(d.site), d.index, value) for d, value in zip(found, times, strict=True)]
        return {"lines": [line("error over limit", points, request["n"])]}

    def layers(self, request: Any = None) -> Answer:
        found = self.layer_errors
        buffers = [memoryview(cells.tobytes()) for cells in (found.error, found.limit, found.row, found.state)]
        answer: wire.LayerMap = {"layers": found.layers, "steps": len(self.steps)}
        return answer, buffers

    def worst(self, request: wire.WorstRequest) -> wire.Worst:
        elements, differing = tensors.worst(*self._fitted(request["row"]), max(1, min(request["n"], 100)))
        return {"elements": elements, "differing": differing}

    def _fitted(self, row: int) -> tuple[Array, Array]:
        """Return both sides in one shape."""
        pair = self.differences[self._check(row)].pair
        kept = [record.kept for record in (pair.golden, pair.mine) if record is not None]
        if len(set(kept)) > 1:
            parts = " against ".join(part or "the whole tensor" for part in kept)
            raise TensorLookupError(f"no difference to show: {parts}")
        if pair.fit is not None and pair.golden is not None and pair.mine is not None:
            fitted = pair.fit(self.golden.load(pair.golden), self.mine.load(pair.mine))
            golden, mine = (tensors.as_array(tensor) for tensor in fitted)
        else:
            golden, mine = self.array(row, "golden"), self.array(row, "mine")
        if golden.shape != mine.shape:
            raise TensorLookupError(f"no difference to show: shape {list(golden.shape)} against {list(mine.shape)}")
        return golden, mine

    def load(self, row: int, which: str) -> Array:
        if which == "difference":
            golden, mine = self._fitted(row)
            return np.asarray(mine.astype(np.float64) - golden.astype(np.float64))
        pair = self.differences[self._check(row)].pair
        run, record = (self.golden, pair.golden) if which == "golden" else (self.mine, pair.mine)
        if record is None:
            raise TensorLookupError(f"{which} has no such tensor: {pair.why}")
        return tensors.as_array(run.load(record))

    def find(self, path: str, step: int | None, role: str) -> int:
        """Return the row of a tensor, at the first step where it diverged if none is named. Raises TensorLookupError."""
        sites = [d for d in self.differences if d.site.path == path]
        if not sites:
            raise TensorLookupError(
                f"the report has no {path!r}{nearest(path, (d.site.path for d in self.differences))}"
            )
        found = [d for d in sites if d.site.role == role and d.site.step == (d.site.step if step is None else step)]
        if not found:
            there = ", ".join(sorted({f"{d.site.role} step {d.site.step}" for d in sites})[:12])
            raise TensorLookupError(f"the report has no {role} of {path!r} in step {step}; there is {there}")
        return next((d for d in found if d.verdict == "diverged" and step is None), found[0]).index

    def text(self) -> str:
        return report_text(self)


def _shown(d: Difference) -> str:
    """Return what a filter's words are looked for in: the row as the page shows it, and as Python calls it."""
    s = d.site
    short = "in" if s.role == "input" else "out"
    return f"{s.path} {s.role}[{s.slot}] {short}[{s.slot}] {d.op} {d.pair.either.summary.dtype} {d.verdict}".lower()
