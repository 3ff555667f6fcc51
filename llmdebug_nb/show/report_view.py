"""The view of a comparison: its rows are the differences."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from glob import escape
from typing import Literal

import numpy as np
import torch

from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.core.errors import LLMDebugError, TensorLookupError, nearest
from llmdebug_nb.core.kernels import summary as kernel
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.headline import Headline
from llmdebug_nb.show import (
    filters,
    findings,
    telling,
    tensors,
    wire,
    wire_findings,
    wire_layers,
    wire_requests,
)
from llmdebug_nb.show.columns import Columns, element_limit, figures
from llmdebug_nb.show.flow import flow
from llmdebug_nb.show.layers import Blamed, LayerErrors, calls, layer_errors, ratios
from llmdebug_nb.show.series import line, site_key
from llmdebug_nb.show.tensors import Array, number
from llmdebug_nb.show.text import report_text
from llmdebug_nb.show.tokens import Tokenizer, texts
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.view_data import Answer, ReportData
from llmdebug_nb.show.views import View, axes_of, several, side_view
from llmdebug_nb.show.words import expected_text, labels, made_text
from llmdebug_nb.store.expectation import Expectation

_PAGE = 1000  # rows at most


class ReportView(View):
    """A comparison. ``mismatch`` asks for the rows that diverged or have no partner."""

    kind = "report"

    def __init__(self, report: ReportData, tokenizer: Tokenizer | None = None) -> None:
        super().__init__([])
        self._tokenizer = tokenizer
        self._whole: ReportData | None = None  # while a blamed module is looked at
        self._take(report)

    def _take(self, report: ReportData) -> None:
        """Show a report from now on."""
        golden, mine = report.golden, report.mine
        steps = {(call.generation, call.step): call for call in (*mine.steps(), *golden.steps())}
        tokens = {**texts(mine, self._tokenizer), **texts(golden, self._tokenizer)}
        self._take_steps([steps[key] for key in sorted(steps)], tokens)
        self._report = report
        self.golden, self.mine = golden, mine
        self._row_of = {
            "golden": {d.pair.golden.id: d.index for d in report.differences if d.pair.golden},
            "mine": {d.pair.mine.id: d.index for d in report.differences if d.pair.mine},
        }
        self.refresh()

    def refresh(self) -> None:
        """Take over the current judgement of the report, and call the watchers."""
        self.differences: Sequence[Difference] = list(self._report.differences)
        self.findings: Sequence[Finding] = self._report.findings
        for name in ("tree", "layer_errors", "_by_site", "_columns", "_made", "_overview"):
            self.__dict__.pop(name, None)
        self._list = functools.lru_cache(maxsize=16)(self._listing)
        self._ids = functools.lru_cache(maxsize=64)(self._execution_ids)
        for watch in self.watchers:
            watch()

    @functools.cached_property
    def tree(self) -> Tree:
        columns = self._columns
        bad = columns.count_paths(columns.of("diverged"))
        near = columns.count_paths(columns.of("within_noise"))
        alone = columns.count_paths(columns.of("unmatched"))
        expected = columns.count_paths(columns.of(EXPECTED))
        comments: dict[str, dict[str, None]] = {}
        for i in columns.of(EXPECTED).tolist():
            if self.differences[i].expected is not None:
                text = expected_text(self.differences[i])
                comments.setdefault(columns.sites[i].path, {})[text] = None
        nodes = self.golden.nodes or self.mine.nodes
        return Tree(nodes, columns.count_paths(), bad, (near, alone, expected), comments)

    @functools.cached_property
    def _columns(self) -> Columns:
        return Columns(self.differences, [self.step_index_of(d.site) for d in self.differences])

    def overview(self, request: wire_requests.OverviewRequest | None = None) -> wire.Overview:
        return {**self._overview, "halt": self.halted.number if self.halted else 0}

    @functools.cached_property
    def _overview(self) -> wire.Overview:
        """The overview of no halt, until the next refresh."""
        columns = self._columns
        bad, expected = columns.of("diverged"), columns.of(EXPECTED).tolist()
        covered = Counter(self.differences[i].expected for i in expected)
        golden, mine = labels(self.golden, self.mine)
        return {
            "kind": "report",
            "title": f"{golden} against {mine}",
            "golden": golden,
            "mine": mine,
            "verdict": self._report.verdict,
            "caution": self._report.caution,
            "lines": self._report.lines(),
            "summary": self._report.summary(),
            "notes": [*self._report.notes(), *(made_text(run) for run in (self.golden, self.mine))],
            "steps": self.step_views(columns.count_steps(), columns.count_steps(bad)),
            "findings": list(map(self._finding_view, self.findings, self._report.headlines())),
            "marks": [
                {"text": str(mark), "comment": mark.comment, "rows": covered[mark]}
                for mark in self._report.expected
            ],
            "kept": self._report.kept_in,
            "first_bad": int(bad[0]) if len(bad) else -1,
            "rows": len(self.differences),
            "ranks": several(d.site.rank for d in self.differences),
            "inside": self._whole is not None,
            "halt": 0,
        }

    def _finding_view(self, finding: Finding, headline: Headline) -> wire.FindingView:
        row, mark = finding.difference, finding.expected
        step = self.step_index_of(row.site) if row else 0
        return findings.view(finding, headline, step, self._mark(mark))

    def _mark(self, mark: Expectation | None) -> int:
        """Return the place of an expectation in the overview's list; -1 for none."""
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
        """Return the indices of the listed rows; ``step`` -1 means all steps."""
        columns, typed = self._columns, filters.read(text)
        # a tree is made only if it is needed: that of a large model takes a second
        path = self.tree.path(node) if node != -1 else None
        wanted = np.ones(len(self.differences), bool)
        if step >= 0:
            wanted &= columns.step == min(step, len(self.steps) - 1)
        if path is not None:
            wanted &= columns.under(path)
        if mismatch:
            wanted &= columns.mismatch
        if typed.ranks:
            wanted &= np.isin([d.site.rank for d in self.differences], typed.ranks)
        for word in typed.words:
            wanted &= columns.holding(word)
        if typed.counts or typed.bounds or typed.ids:
            for i in np.flatnonzero(wanted).tolist():
                d = self.differences[i]
                summaries = (r.summary for r in (d.pair.golden, d.pair.mine) if r)
                known_id = functools.partial(self._id_of, d)
                wanted[i] = typed.passes(columns.texts[i], summaries, known_id)
        order = columns.order(sort, descending)
        listed: Array = order[wanted[order]]
        return listed

    def _id_of(self, d: Difference) -> str:
        """Return the execution id of a row's call: golden's if it has one."""
        s = d.site
        if s.phase != "forward" and "/" in s.path:
            return ""  # operators of a backward pass have none
        ids = self._ids(d.pair.golden is not None, s.step, s.generation, s.rank)
        return ids.get((s.path, s.call), "")

    def _execution_ids(
        self, of_golden: bool, step: int, generation: int, rank: int
    ) -> dict[tuple[str, int], str]:
        return (self.golden if of_golden else self.mine).ids(step, generation, rank)

    def _list_of(self, request: wire_requests.Listed, step: int) -> Array:
        filtered = request["node"], request["mismatch"], request["text"]
        step = -1 if request["every"] else step
        return self._list(step, *filtered, request["sort"], request["descending"])

    def listed(self, request: wire_requests.RowsRequest) -> wire.Page:
        ids = self._list_of(request, request["step"])
        start = max(0, request["start"])
        page = ids[start : start + max(0, min(request["n"], _PAGE))]
        rows = [self._difference_row(int(i)) for i in page]
        return {"total": len(ids), "start": start, "rows": rows, "problem": ""}

    def locate(self, request: wire_requests.LocateRequest) -> wire.Located:
        row, delta = request["row"], -1 if request["delta"] < 0 else 1
        if request["sort"]:
            step = self.step_index_of(self._difference(row).site) if row >= 0 else -1
            ids = self._list_of(request, step)
            at = np.flatnonzero(ids == row)
            place = int(at[0]) + delta if len(at) else 0 if delta > 0 else len(ids) - 1
        else:
            ids = self._list(-1, request["node"], request["mismatch"], request["text"])
            side: Literal["left", "right"] = "right" if delta > 0 else "left"
            start = len(self.differences) if row < 0 and delta < 0 else row
            place = int(np.searchsorted(ids, start, side)) - (delta < 0)
        if not 0 <= place < len(ids):
            return {"row": None, "index": -1}
        found = int(ids[place])
        return self.row({**request, "op": "row", "row": found})  # type: ignore[typeddict-item]

    def row(self, request: wire_requests.RowRequest) -> wire.Located:
        row = self._difference_row(self._difference(request["row"]).index)
        if filters.problem(request["text"]):
            return {"row": row, "index": -1}
        place = np.flatnonzero(self._list_of(request, row["step"]) == row["id"])
        return {"row": row, "index": int(place[0]) if len(place) else -1}

    def _difference(self, row: int) -> Difference:
        if not 0 <= row < len(self.differences):
            raise TensorLookupError(f"the report has no row {row}; it has {len(self.differences)}")
        return self.differences[row]

    def _finding(self, at: int) -> Finding:
        if not 0 <= at < len(self.findings):
            raise TensorLookupError(f"the report has no finding {at}; it has {len(self.findings)}")
        return self.findings[at]

    def _difference_row(self, index: int) -> wire.Row:
        d = self.differences[index]
        return self.row_view(index, d.pair.either, d, self._mark(d.expected))

    def detail(self, request: wire_requests.DetailRequest) -> wire.Detail:
        d = self._difference(request["row"])
        golden, mine = d.pair.golden, d.pair.mine
        sides = [side_view("golden", self.golden, golden)] if golden else []
        sides += [side_view("mine", self.mine, mine)] if mine else []
        if golden and mine:
            sides.append(self._difference_side(d.index, sides))
        run, side = (self.golden, "golden") if golden else (self.mine, "mine")
        row_of, record = self._row_of[side], d.pair.either
        producer = row_of.get(record.producer, -1) if record.producer is not None else -1
        return {
            "row": self._difference_row(d.index),
            "sides": sides,
            "metrics": [
                {"name": name, "value": number(value)} for name, value in d.metrics.items()
            ],
            "producer": producer,
            "producer_label": str(self.differences[producer].site) if producer >= 0 else "",
            "flow": flow(run, record, row_of.get),
        }

    def _difference_side(self, row: int, sides: list[wire.Side]) -> wire.Side:
        """Return the side that shows mine minus golden."""
        why = next((f"{side['which']}: {side['why']}" for side in sides if not side["kept"]), "")
        golden, mine = (side["code"] for side in sides)
        result: wire.Side = {
            **sides[0], "which": "difference", "kept": False, "why": why, "fingerprint": "",
            "code": f"{mine} - {golden}" if golden else "", "kernel": None,
            "min": None, "max": None, "mean": None, "l2norm": None,
            "nan": None, "inf": None, "zero": None,
        }  # fmt: skip
        try:
            values = None if why else self.array(row, "difference")
        except (LLMDebugError, ValueError) as error:
            values, result["why"] = None, str(error)
        shape = tuple(result["shape"]) if values is None else values.shape
        result.update({"shape": list(shape), "axes": axes_of(shape), "numel": math.prod(shape)})
        if values is not None:
            low, high, mean, norm, nan, inf, zero = kernel.figures(torch.from_numpy(values))
            result.update(
                {
                    "kept": True, "nan": nan, "inf": inf, "zero": zero, "min": number(low),
                    "max": number(high), "mean": number(mean), "l2norm": number(norm),
                }
            )  # fmt: skip
        return result

    def finding(self, request: wire_requests.FindingRequest) -> wire_findings.FindingDetail:
        finding = self._finding(request["finding"])
        save = f'report.findings[{request["finding"]}].save_repro("repro.py")'
        return findings.detail(finding, save, self._report.listing(finding))

    @functools.cached_property
    def layer_errors(self) -> LayerErrors:
        """The worst row of each layer at each step."""
        return layer_errors(self.tree, self._columns, len(self.step_index), self._made)

    @functools.cached_property
    def _made(self) -> frozenset[Blamed]:
        """The calls that make an error."""
        rows = (f.difference for f in self.findings if f.expected is None)
        return frozenset((d.site.path, d.site.call) for d in rows if d is not None)

    @functools.cached_property
    def _by_site(self) -> dict[tuple[object, ...], list[Difference]]:
        rows: dict[tuple[object, ...], list[Difference]] = {}
        for d in self.differences:
            rows.setdefault(site_key(d.site), []).append(d)
        return rows

    def series(self, request: wire_requests.SeriesRequest) -> wire.Series:
        rows = self._by_site[site_key(self._difference(request["row"]).site)]
        ratio = ratios(figures(d.error for d in rows), figures(d.limit for d in rows))
        points = [
            (self.step_index_of(d.site), d.index, None if d.error is None else float(value))
            for d, value in zip(rows, ratio, strict=True)
        ]
        return {"lines": [line("error over limit", points, request["n"])]}

    def layers(self, request: wire_requests.LayersRequest | None = None) -> Answer:
        errors = self.layer_errors
        grids = (
            errors.error, errors.limit, errors.row, errors.state, errors.share, errors.differing,
        )  # fmt: skip
        answer: wire_layers.LayerMap = {
            "layers": errors.layers, "steps": len(self.steps), "differing": errors.texts,
        }  # fmt: skip
        return answer, [memoryview(grid.tobytes()) for grid in grids]

    def calls(self, request: wire_requests.CallsRequest) -> wire_layers.Calls:
        most = max(0, min(request["n"], _PAGE))
        return calls(self.layer_errors, self.differences, request["layer"], request["step"], most)

    def prove(self, request: wire_requests.ProveRequest) -> wire.Overview:
        self._report.prove(self._finding(request["finding"]))
        self.refresh()
        return self.overview()

    def inside(self, request: wire_requests.InsideRequest) -> wire.Overview:
        """Show the blamed module, recorded with its operators; or the first comparison again."""
        at, whole = request["finding"], self._whole or self._report
        report = whole if at < 0 else self._report.look_inside(self._finding(at))
        self._whole = None if at < 0 else whole
        self._take(report)
        return self.overview()

    def worst(self, request: wire_requests.WorstRequest) -> wire.Worst:
        n = max(1, min(request["n"], 100))
        elements, differing = tensors.worst(*self._fitted(request["row"]), n)
        return {"elements": elements, "differing": differing}

    def errors(self, request: wire_requests.ErrorsRequest) -> wire.ErrorHistogram:
        golden, mine = self._fitted(request["row"])
        histogram = tensors.errors(golden, mine, max(1, min(request["bins"], 512)))
        return {**histogram, "limit": number(element_limit(self._difference(request["row"])))}

    def scatter(self, request: wire_requests.ScatterRequest) -> Answer:
        golden, mine = self._fitted(request["row"])
        points, size = max(0, min(request["points"], 1 << 14)), max(1, min(request["size"], 512))
        answer, buffers = tensors.scatter(golden, mine, points, size)
        return answer, [memoryview(buffer.tobytes()) for buffer in buffers]

    def expect(self, request: wire_requests.ExpectRequest) -> wire.Overview:
        comment, row = request["comment"], request["row"]
        if row < 0:
            self._report.expect(self._finding(request["finding"]), comment)
            return self.overview()
        difference = self._difference(row)
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

    def unexpect(self, request: wire_requests.UnexpectRequest) -> wire.Overview:
        marks = self._report.expected
        at, text = request["mark"], request["text"]
        if not 0 <= at < len(marks) or str(marks[at]) != text:
            raise TensorLookupError(
                f"{text:.200} is no longer marked as expected: the mark was removed elsewhere"
            )
        self._report.unexpect(marks[at])
        return self.overview()

    def _fitted(self, row: int) -> tuple[Array, Array]:
        """Return the values of both sides in one shape. Raises TensorLookupError."""
        pair = self._difference(row).pair
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
        pair = self._difference(row).pair
        run, record = (self.golden, pair.golden) if which == "golden" else (self.mine, pair.mine)
        if record is None:
            raise TensorLookupError(f"{which} has no such tensor: {pair.why}")
        return tensors.as_array(run.load(record))

    def find(self, path: str, step: int | None, role: str) -> int:
        """Return the row of a tensor; without ``step`` at the first step where it diverged.

        Raises:
            TensorLookupError: there is no such tensor.
        """
        at_path = [d for d in self.differences if d.site.path == path]
        if not at_path:
            near = nearest(path, (d.site.path for d in self.differences))
            raise TensorLookupError(f"the report has no {path!r}{near}")
        rows = [d for d in at_path if d.site.role == role and step in (None, d.site.step)]
        if not rows:
            known = sorted({f"{d.site.role} step {d.site.step}" for d in at_path})[:12]
            at_step = "" if step is None else f" in step {step}"
            raise TensorLookupError(
                f"the report has no {role} of {path!r}{at_step}; there is {', '.join(known)}"
            )
        return next((d for d in rows if d.verdict == "diverged" and step is None), rows[0]).index

    def first_rows(self, n: int) -> list[wire.Row]:
        return [self._difference_row(d.index) for d in self.differences[:n]]

    def telling_rows(self, n: int) -> list[wire.Row]:
        chosen = telling.rows(self.differences, self.findings, n)
        return [self._difference_row(d.index) for d in chosen]

    def text(self) -> str:
        return report_text(self)
