"""A comparison, as the explorer asks for it: its rows are the differences."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from glob import escape
from typing import Any

import numpy as np
import torch

from llmdebug_nb.core.errors import LLMDebugError, StoreError, TensorLookupError, nearest
from llmdebug_nb.core.findings import EXPECTED, Difference, Expectation, Finding
from llmdebug_nb.core.kernels import summary as kernel
from llmdebug_nb.core.row_filter import row_text
from llmdebug_nb.show import filters, tensors, wire
from llmdebug_nb.show.columns import Columns
from llmdebug_nb.show.flow import flow
from llmdebug_nb.show.layers import LayerErrors, layer_errors, ratios
from llmdebug_nb.show.series import line, site_key
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.text import report_text
from llmdebug_nb.show.tokens import Tokenizer, texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.view_data import Answer
from llmdebug_nb.show.views import View, axes_of, side_view
from llmdebug_nb.show.words import expected_text, labels, made_text


class ReportView(View):
    """A comparison: rows are its differences. ``mismatch`` asks for those that diverged or stayed unmatched."""

    kind = "report"

    def __init__(self, report: Any, tokenizer: Tokenizer | None = None) -> None:
        golden, mine = report.golden, report.mine
        seen = {(call.generation, call.step): call for call in (*mine.steps(), *golden.steps())}
        super().__init__(
            [seen[key] for key in sorted(seen)],
            {**texts(mine, tokenizer), **texts(golden, tokenizer)},
        )
        self._report = report
        self.golden, self.mine = golden, mine
        self._row_of = {
            "golden": {d.pair.golden.id: d.index for d in report.differences if d.pair.golden},
            "mine": {d.pair.mine.id: d.index for d in report.differences if d.pair.mine},
        }
        self.refresh()

    def refresh(self) -> None:
        """Take in the report as it is judged now, and tell those who watch."""
        self.differences: Sequence[Difference] = list(self._report.differences)
        self.findings: Sequence[Finding] = self._report.findings
        for name in ("tree", "layer_errors", "_by_site", "_columns"):
            self.__dict__.pop(name, None)
        self._list = functools.lru_cache(maxsize=16)(self._listing)
        self._ids = functools.lru_cache(maxsize=64)(lambda run, *place: run.ids(*place))
        for watch in self.watchers:
            watch()

    @functools.cached_property
    def tree(self) -> Tree:
        rows = Counter(d.site.path for d in self.differences)
        bad, near, alone, expected = (
            Counter(d.site.path for d in self.differences if d.verdict == verdict)
            for verdict in ("diverged", "within_noise", "unmatched", EXPECTED)
        )
        said: dict[str, dict[str, None]] = {}
        for d in self.differences:
            if d.expected is not None:
                said.setdefault(d.site.path, {})[expected_text(d)] = None
        return Tree(self.golden.nodes or self.mine.nodes, rows, bad, near, alone, expected, said)

    @functools.cached_property
    def _columns(self) -> Columns:
        return Columns(self.differences, [self.step_index_of(d.site) for d in self.differences])

    def overview(self, request: Any = None) -> wire.Overview:
        rows = Counter((d.site.generation, d.site.step) for d in self.differences)
        bad = Counter(
            (d.site.generation, d.site.step) for d in self.differences if d.verdict == "diverged"
        )
        first = next((d.index for d in self.differences if d.verdict == "diverged"), -1)
        covered = Counter(d.expected for d in self.differences if d.expected)
        verdict: Any = self._report.verdict
        golden, mine = labels(self.golden, self.mine)
        return {
            "kind": "report",
            "title": f"{golden} against {mine}",
            "golden": golden,
            "mine": mine,
            "verdict": verdict,
            "lines": self._report.lines(),
            "summary": self._report.summary(),
            "notes": [*self._report.notes(), *(made_text(run) for run in (self.golden, self.mine))],
            "steps": self.step_views(rows, bad),
            "findings": [
                {
                    "path": f.path,
                    "op": f.op,
                    "step": self.step_index_of(f.difference.site) if f.difference else 0,
                    "cause": f.cause,
                    "evidence": f.evidence,
                    "row": f.difference.index if f.difference else -1,
                    "expected": (f.expected.comment or str(f.expected)) if f.expected else "",
                    "mark": self._mark(f.expected),
                }
                for f in self.findings
            ],
            "marks": [
                {"text": str(mark), "comment": mark.comment, "rows": covered[mark]}
                for mark in self._report.expected
            ],
            "kept": self._report.kept_in,
            "first_bad": first,
            "rows": len(self.differences),
        }

    def _mark(self, mark: Expectation | None) -> int:
        """Return its place in the overview's list; -1 for none."""
        return self._report.expected.index(mark) if mark in self._report.expected else -1

    def _listing(
        self,
        step: int,
        node: int,
        mismatch: bool,
        text: str,
        sort: str = "",
        descending: bool = False,
    ) -> Array:
        """Return the indices of what is listed; ``step`` -1: of all steps."""
        columns, narrowed = self._columns, filters.read(text)
        path = (
            self.tree.path(node) if node != -1 else None
        )  # of a large model the tree takes a second
        wanted = np.ones(len(self.differences), bool)
        if step >= 0:
            wanted &= columns.step == min(step, len(self.steps) - 1)
        if path is not None:
            wanted &= columns.under(path)
        if mismatch:
            wanted &= columns.mismatch
        if text.strip():
            for i in np.flatnonzero(wanted).tolist():
                d = self.differences[i]
                wanted[i] = narrowed.passes(
                    _shown(d),
                    (r.summary for r in (d.pair.golden, d.pair.mine) if r),
                    functools.partial(self._id_of, d),
                )
        order = columns.order(sort, descending)
        found: Array = order[wanted[order]]
        return found

    def _id_of(self, d: Difference) -> str:
        """Return the execution id of a row's call: golden's, where there is one."""
        run = self.golden if d.pair.golden else self.mine
        s = d.site
        if s.phase != "forward" and "/" in s.path:
            return ""  # what a backward pass runs has none
        ids: dict[tuple[str, int], str] = self._ids(run, s.step, s.generation, s.rank)
        return ids.get((s.path, s.call), "")

    def _list_of(self, request: wire.Listed, step: int) -> Array:
        step = -1 if request["every"] else step
        return self._list(
            step,
            request["node"],
            request["mismatch"],
            request["text"],
            request["sort"],
            request["descending"],
        )

    def listed(self, request: wire.RowsRequest) -> wire.Page:
        found = self._list_of(request, request["step"])
        start = max(0, request["start"])
        page = found[start : start + max(0, min(request["n"], 1000))]
        return {
            "total": len(found),
            "start": start,
            "rows": [self._difference_row(int(i)) for i in page],
            "problem": "",
        }

    def locate(self, request: wire.LocateRequest) -> wire.Located:
        row, delta = request["row"], -1 if request["delta"] < 0 else 1
        if request["sort"]:
            found = self._list_of(
                request,
                self.step_index_of(self.differences[self._check(row)].site) if row >= 0 else -1,
            )
            at = np.flatnonzero(found == row)
            place = int(at[0]) + delta if len(at) else 0 if delta > 0 else len(found) - 1
        else:
            found = self._list(-1, request["node"], request["mismatch"], request["text"])
            side: Any = "right" if delta > 0 else "left"
            start = len(self.differences) if row < 0 and delta < 0 else row
            place = int(np.searchsorted(found, start, side)) - (delta < 0)
        if not 0 <= place < len(found):
            return {"row": None, "index": -1}
        return self.row({**request, "op": "row", "row": int(found[place])})  # type: ignore[typeddict-item]

    def row(self, request: wire.RowRequest) -> wire.Located:
        row = self._difference_row(self._check(request["row"]))
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        place = np.flatnonzero(self._list_of(request, row["step"]) == row["id"])
        return {"row": row, "index": int(place[0]) if len(place) else -1}

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
            expected=expected_text(d),
            mark=self._mark(d.expected),
        )

    def detail(self, request: wire.DetailRequest) -> wire.Detail:
        d = self.differences[self._check(request["row"])]
        golden, mine = d.pair.golden, d.pair.mine
        sides = [side_view("golden", self.golden, golden)] if golden else []
        sides += [side_view("mine", self.mine, mine)] if mine else []
        if golden and mine:
            sides.append(self._difference(d.index, sides))
        run, row_of = (
            (self.golden, self._row_of["golden"]) if golden else (self.mine, self._row_of["mine"])
        )
        made_by = d.pair.either.producer
        producer = row_of.get(made_by, -1) if made_by is not None else -1
        return {
            "row": self._difference_row(d.index),
            "sides": sides,
            "metrics": [
                {"name": name, "value": number(value)} for name, value in d.metrics.items()
            ],
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
            "nan": nan, "inf": inf, "zero": zero, "fingerprint": "", "code": f"{mine} - {golden}" if golden else "", "kernel": None,
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
        source, kernel = self.findings[at].source or "", self.findings[at].kernel
        name, code = (kernel.name, kernel.source) if kernel is not None else ("", "")
        return {
            "script": script,
            "why": why,
            "save": save,
            "source": source,
            "kernel": name,
            "code": code,
        }

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
            None if d.error is None else float(ratio)
            for d, ratio in zip(found, ratios(error, limit), strict=True)
        ]
        points = [
            (self.step_index_of(d.site), d.index, value)
            for d, value in zip(found, times, strict=True)
        ]
        return {"lines": [line("error over limit", points, request["n"])]}

    def layers(self, request: Any = None) -> Answer:
        found = self.layer_errors
        buffers = [
            memoryview(cells.tobytes())
            for cells in (found.error, found.limit, found.row, found.state)
        ]
        answer: wire.LayerMap = {"layers": found.layers, "steps": len(self.steps)}
        return answer, buffers

    def worst(self, request: wire.WorstRequest) -> wire.Worst:
        elements, differing = tensors.worst(
            *self._fitted(request["row"]), max(1, min(request["n"], 100))
        )
        return {"elements": elements, "differing": differing}

    def errors(self, request: wire.ErrorsRequest) -> wire.ErrorHistogram:
        golden, mine = self._fitted(request["row"])
        found = tensors.errors(golden, mine, max(1, min(request["bins"], 512)))
        return {**found, "limit": number(self._limit_of_each(self.differences[request["row"]]))}

    @staticmethod
    def _limit_of_each(d: Difference) -> float | None:
        """Return the root mean square error that a row's limit allows; None where its limit is not one of the relative L2 error."""
        golden, error = d.pair.golden, d.metrics.get("relative_euclidean_distance")
        if (
            golden is None
            or d.limit is None
            or golden.summary.l2norm is None
            or d.error is None
            or error is None
        ):
            return None
        judged = d.error == math.inf or error <= d.error <= max(
            error, d.metrics.get("worst_row_error") or 0.0
        )
        return (
            d.limit * golden.summary.l2norm / math.sqrt(golden.summary.numel or 1)
            if judged
            else None
        )

    def scatter(self, request: wire.ScatterRequest) -> Answer:
        golden, mine = self._fitted(request["row"])
        points, size = max(0, min(request["points"], 1 << 14)), max(1, min(request["size"], 512))
        answer, buffers = tensors.scatter(golden, mine, points, size)
        return answer, [memoryview(buffer.tobytes()) for buffer in buffers]

    def expect(self, request: wire.ExpectRequest) -> wire.Overview:
        comment, row = request["comment"], request["row"]
        if row < 0:
            if not 0 <= request["finding"] < len(self.findings):
                raise TensorLookupError(
                    f"the report has no finding {request['finding']}; it has {len(self.findings)}"
                )
            self._report.expect(self.findings[request["finding"]], comment)
            return self.overview()
        difference = self.differences[self._check(row)]
        site, path = difference.site, escape(difference.site.path)
        if request["scope"] == "module":
            self._report.expect(path, comment)
        elif request["scope"] == "step":
            self._report.expect(
                path, comment, role=site.role, slot=site.slot, phase=site.phase, step=site.step
            )
        else:
            self._report.expect(difference, comment)
        return self.overview()

    def unexpect(self, request: wire.UnexpectRequest) -> wire.Overview:
        marks = self._report.expected
        at, text = request["mark"], request["text"]
        if not 0 <= at < len(marks) or str(marks[at]) != text:
            raise TensorLookupError(
                f"{text:.200} is no longer marked as expected: it was taken back elsewhere"
            )
        self._report.unexpect(marks[at])
        return self.overview()

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
            raise TensorLookupError(
                f"no difference to show: shape {list(golden.shape)} against {list(mine.shape)}"
            )
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
        found = [
            d
            for d in sites
            if d.site.role == role and d.site.step == (d.site.step if step is None else step)
        ]
        if not found:
            there = ", ".join(sorted({f"{d.site.role} step {d.site.step}" for d in sites})[:12])
            raise TensorLookupError(
                f"the report has no {role} of {path!r} in step {step}; there is {there}"
            )
        return next((d for d in found if d.verdict == "diverged" and step is None), found[0]).index

    def first_rows(self, n: int) -> list[wire.Row]:
        return [self._difference_row(d.index) for d in self.differences[:n]]

    def text(self) -> str:
        return report_text(self)


def _shown(d: Difference) -> str:
    """Return what a filter's words are looked for in."""
    s = d.site
    return row_text(s.path, s.role, s.slot, d.op, d.pair.either.summary.dtype, d.verdict)
