"""A small run, or comparison, in memory, that answers every op of `wire`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import EXPECTED, Difference, RowVerdict, Verdict
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.records import Node, Record, Site, Summary
from llmdebug_nb.findings.finding import Finding, Proof
from llmdebug_nb.findings.headline import Headline
from llmdebug_nb.show import wire, wire_findings, wire_requests
from llmdebug_nb.show.report_view import ReportView
from llmdebug_nb.show.series import line, site_key
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.show.view_data import Answer
from llmdebug_nb.source.lines import Source
from llmdebug_nb.store.expectation import Expectation

HIDDEN, HEADS, PROMPT = 64, 4, 12
LEAVES = {
    "input_layernorm": "RMSNorm",
    "self_attn.q_proj": "Linear",
    "self_attn.k_proj": "Linear",
    "self_attn.v_proj": "Linear",
    "self_attn.softmax": "Softmax",
    "self_attn.o_proj": "Linear",
    "post_attention_layernorm": "RMSNorm",
    "mlp.gate_proj": "Linear",
    "mlp.up_proj": "Linear",
    "mlp.act_fn": "SiLU",
    "mlp.down_proj": "Linear",
}
TYPES = {
    "": "LlamaForCausalLM",
    "model": "LlamaModel",
    "model.layers": "ModuleList",
    "self_attn": "Attention",
    "mlp": "MLP",
}
BROKEN = "model.layers.1.mlp.down_proj"
SCRIPT = 'print("called again")\n'
HOSTILE = '<img src=x onerror="window.hacked=1">'
EVIDENCE = "replayed on its own inputs, the op gives another result: 0.31, noise floor 0.012"
HEADLINES = [
    Headline(
        "Made in",
        "port.py:30",
        f"{BROKEN} (FastLinear, was Linear)",
        "Mine's value is golden's times 0.5.",
        "Tokens 12-39 of 40 differ.",
        "replayed on its own inputs, the op gives another result.",
        "Look at the scale.",
    ),
    Headline(
        "A weight differs in",
        "lm_head",
        "lm_head (Linear)",
        "Weight differs.",
        "",
        "weight: 12 of 4,096 elements.",
        "Look at how the weight is loaded.",
    ),
]
LISTING: wire_findings.CodeView = {
    "golden_file": "model.py",
    "golden_function": "Block.forward",
    "mine_file": "port.py",
    "mine_function": "Fast.forward",
    "lines": [
        {
            "golden_line": 11, "golden": "def forward(self, x):",
            "mine_line": 28, "mine": "def forward(self, x):", "state": "", "error": None,
        },
        {
            "golden_line": 0, "golden": "",
            "mine_line": 29, "mine": "    a = x", "state": "equal", "error": 0.0,
        },
        {
            "golden_line": 12, "golden": "    x = self.act(x)",
            "mine_line": 30, "mine": "    x = <b>self.act(x)</b> / 2", "state": "guilty",
            "error": 0.5,
        },
        {
            "golden_line": 13, "golden": "    return x",
            "mine_line": 31, "mine": "    return x", "state": "inherited", "error": 0.5,
        },
    ],
    "at": 2,
    "note": "",
}  # fmt: skip


class FakeReport:
    """What a report knows; for a run, no row diverged."""

    caution = ""
    kept_in = "runs/compiled.expected.json"
    changed: Callable[[], None]
    proof: Proof | None = None

    def __init__(self, differences: list[Difference], steps: int) -> None:
        self.differences, self.steps = differences, steps
        self.expected: list[Expectation] = []

    @property
    def _bad(self) -> list[Difference]:
        return [d for d in self.differences if d.verdict == "diverged"]

    @property
    def verdict(self) -> Verdict:
        return "diverged" if self._bad else EXPECTED if self.expected else "match"

    @property
    def findings(self) -> list[Finding]:
        if not (bad := self._bad):
            return []
        mine = Source(BROKEN, "FastLinear", "port.py", 30)
        first = Finding(BROKEN, "Linear", 2, "op-differs", EVIDENCE, bad[0], mine=mine)
        weight = "weight: 12 of 4,096 elements"
        second = Finding("lm_head", "Linear", 3, "weight differs", weight, bad[-1])
        return [replace(first, proof=self.proof), second]

    def headlines(self) -> list[Headline]:
        return HEADLINES[: len(self.findings)]

    def lines(self) -> list[str]:
        return [
            f"{len(self.differences):,} records in {self.steps} steps",
            f"{len(self._bad)} pairs diverged, 0 unmatched",
        ]

    def summary(self) -> str:
        return "It differs. The error is made there. Look at the code."

    def notes(self) -> list[str]:
        return []

    def prove(self, finding: Finding) -> None:
        says = "With golden's value in its place, all 12 rows agree."
        self.proof = Proof(True, 12, 0, says)

    def look_inside(self, finding: Finding) -> FakeReport:
        return self

    def expect(self, what: Any, comment: str) -> None:
        if comment == "boom":
            raise DumpWriteError("can't write expected.json: read-only")
        mark = Expectation(what.path if isinstance(what, Finding) else what.site.path, comment)
        self.expected.append(mark)
        for d in self._bad:
            if d.site.path == mark.path:
                self.differences[d.index] = replace(d, verdict=EXPECTED, expected=mark)
        self.changed()

    def unexpect(self, mark: Expectation) -> None:
        self.expected.remove(mark)
        for d in self.differences:
            if d.expected == mark:
                self.differences[d.index] = replace(d, verdict="diverged", expected=None)
        self.changed()


def asked(op: str, key: str) -> Any:
    """Return a method that notes what it is asked for, and answers as the view of a report."""

    def ask(view: FakeView, request: dict[str, Any]) -> Any:
        view.asked.append((op, request[key]))
        return getattr(ReportView, op)(view, request)

    return ask


class FakeView(ReportView):
    """``report``: a comparison that goes wrong in `BROKEN` from the first decode step on.

    A run is shown by the same code, as if all its rows agreed.
    """

    part = ""  # what was kept of each tensor
    kernel: wire.KernelView | None = None  # that computes each tensor of mine
    points = 4096  # of a scatter plot at most
    _made = frozenset({(BROKEN, 0)})
    children, heads = asked("children", "parent"), asked("heads", "row")
    prove, inside = asked("prove", "finding"), asked("inside", "finding")
    expect, unexpect = asked("expect", "row"), asked("unexpect", "mark")

    def __init__(
        self,
        report: bool = False,
        layers: int = 3,
        steps: int = 4,
        extra: tuple[str, ...] = (),
        records: int = 0,
    ) -> None:
        self.report = report
        self.asked: list[tuple[str, int]] = []
        self.paths = {"model.embed_tokens": "Embedding"}
        self.paths |= {
            f"model.layers.{n}.{leaf}": kind for n in range(layers) for leaf, kind in LEAVES.items()
        }
        self.paths |= {"model.norm": "RMSNorm", "lm_head": "Linear"}
        self.paths |= dict.fromkeys(extra, "Hostile")
        every = [self._step(index) for index in range(steps)]
        calls = [
            (step, path, op, role)
            for step in every
            for path, op in self.paths.items()
            for role in ("input", "output")
        ]
        # one has a name, as children that all are numbered were layers
        more = [f"model.many.{number or 'first'}" for number in range(records - len(calls))]
        calls += [(every[0], path, "Identity", "output") for path in more]
        rows = [self._difference_at(number, *call) for number, call in enumerate(calls)]
        nodes = self._nodes(dict.fromkeys(path for _, path, *_ in calls))
        self._every = every
        self.golden, self.mine = (  # type: ignore[assignment]
            SimpleNamespace(label=label, path=None, where="", meta={}, nodes=nodes)
            for label in ("runs/eager", "runs/compiled")
        )
        super().__init__(FakeReport(rows, steps))  # type: ignore[arg-type]

    def _take(self, report: FakeReport) -> None:  # type: ignore[override]
        self._report, report.changed = report, self.refresh  # type: ignore[assignment]
        self.steps = self._every  # type: ignore[assignment]
        self.step_index = {(one["generation"], one["step"]): one["index"] for one in self._every}
        self.refresh()

    def refresh(self) -> None:
        self.__dict__.pop("data", None)
        super().refresh()
        self.tree.judged = self.report

    @functools.cached_property
    def data(self) -> list[wire.Row]:
        """All rows."""
        if not self.report:
            return [self.row_view(d.index, d.pair.either) for d in self.differences]
        return [super(FakeView, self)._difference_row(d.index) for d in self.differences]

    def _difference_row(self, index: int) -> wire.Row:
        return self.data[index]

    def _step(self, index: int) -> wire.Step:
        kind = "warmup" if index == 0 else "prefill" if index == 1 else "decode"
        return {
            "index": index,
            "generation": -1 if index == 0 else 0,
            "step": max(0, index - 1),
            "kind": kind,
            "label": "warm-up" if index == 0 else f"{index - 1} {kind}",
            "text": "",
            "requests": [],
            "rows": 0,
            "bad": 0,
        }

    def step_views(self, rows: Counter[int], bad: Counter[int]) -> list[wire.Step]:
        for at, step in enumerate(self._every):
            step["rows"], step["bad"] = rows[at], bad[at]
        return self._every

    def _difference_at(
        self, number: int, step: wire.Step, path: str, op: str, role: str
    ) -> Difference:
        query = 1 if step["kind"] == "decode" else PROMPT
        shape = (1, HEADS, query, PROMPT) if op == "Softmax" else (1, query, HIDDEN)
        broken = role == "output" and path in (BROKEN, "model.norm", "lm_head")
        bad = self.report and step["index"] >= 2 and broken
        low, high, mean = -3.1 - number % 7 / 10, 2.9 + number % 5 / 10, 0.0123 * (number % 3)
        nan = 3 if bad and path == "lm_head" else 0
        record = Record(
            number,
            Site(path, step["step"], role=role, generation=step["generation"]),
            number,
            op,
            Summary("bfloat16", shape, low, high, mean, 27.71, nan, 0),
            payload=None if path == "model.embed_tokens" else "kept",
        )
        near: RowVerdict = "within_noise" if self.report and number % 3 == 0 else "match"
        error = 0.31 if bad else 0.0021
        return Difference(
            number,
            Pair(record, record, ""),
            "diverged" if bad else near,
            error,
            0.012,
            {"max_abs": 0.93, "cosine": 0.99941, "rel_l2": error},
            "error is 26 times its limit" if bad else None,
        )

    def _nodes(self, leaves: dict[str, None]) -> list[Node]:
        """Return the modules, each behind its parent."""
        at = {"": 0}
        for leaf in leaves:
            names = leaf.split(".")
            for n in range(len(names)):
                at.setdefault(".".join(names[: n + 1]), len(at))
        nodes = [Node("", "LlamaForCausalLM", TYPES[""], -1)]
        for path in list(at)[1:]:
            above, _, name = path.rpartition(".")
            kind = self.paths.get(path) or TYPES.get(path) or TYPES.get(name, "DecoderLayer")
            nodes.append(Node(path, name, kind, at[above]))
        return nodes

    def text(self) -> str:
        return (
            f"{'report' if self.report else 'run'} of {len(self.differences)} records in "
            f"{len(self.steps)} steps"
        )

    def overview(self, request: wire_requests.OverviewRequest | None = None) -> wire.Overview:
        shown = super().overview(request)
        if self.report:
            return {**shown, "title": "tiny-llama, eager vs compiled", "notes": []}
        return {
            **shown, "kind": "run", "title": "tiny-llama, eager", "golden": "", "mine": "",
            "verdict": None, "lines": shown["lines"][:1], "summary": "", "notes": [], "kept": "",
        }  # fmt: skip

    def finding(self, request: wire_requests.FindingRequest) -> wire_findings.FindingDetail:
        self.asked.append(("finding", request["finding"]))
        script = SCRIPT if request["finding"] == 0 else ""
        return {
            "script": script,
            "why": "" if script else "its tensors were not recorded in both runs",
            "save": f'report.findings[{request["finding"]}].save_repro("repro.py")',
            "relation": "mine's value is golden's times 0.5",
            "advice": "",
            "sources": [
                {
                    "which": "golden",
                    "place": "model.py:12 forward",
                    "call": f"{BROKEN} (Linear)",
                    "code": "x = self.act(x)",
                    "frames": [],
                },
                {
                    "which": "mine",
                    "place": "port.py:30 scale",
                    "call": f"{BROKEN} (Linear)",
                    "code": "x = <b>self.act(x)</b> / 2",
                    "frames": ["port.py:41 forward"],
                },
            ],
            "pairs": [
                {"state": "equal", "golden": "model.py:11  x = a", "mine": "", "error": 0.0},
                {
                    "state": "guilty",
                    "golden": "model.py:12  x = self.act(x)",
                    "mine": "port.py:30  x = self.act(x) / 2",
                    "error": 0.5,
                },
            ],
            "kernel": "graph0/cpp_fused_mul_0",
            "code": "" if script else "out[0] = <b>in</b>[0];",
            "listing": LISTING,
        }

    def errors(self, request: wire_requests.ErrorsRequest) -> wire.ErrorHistogram:
        return {**super().errors(request), "limit": 0.012}

    def scatter(self, request: wire_requests.ScatterRequest) -> Answer:
        return super().scatter({**request, "points": self.points})

    def rows(self, request: wire_requests.RowsRequest) -> wire.Page:
        self.asked.append(("rows", request["start"]))
        if request["text"] == "boom":
            raise ZeroDivisionError("division\nby zero")
        return super().rows(request)

    def snapshot(self, state: wire.State) -> None:
        return None

    def load(self, row: int, which: str) -> Array:
        return self.tensor(row, which)

    def tensor(self, number: int, which: str) -> np.ndarray:
        row = self.data[number]
        golden = np.random.default_rng(number).normal(size=row["shape"]).astype(np.float32)
        if row["op"] == "Softmax":
            golden = np.abs(golden)
        error = (
            np.random.default_rng(number + 1)
            .normal(scale=0.3 if row["verdict"] == "diverged" else 0.001, size=row["shape"])
            .astype(np.float32)
        )
        if row["nan"]:
            error[0, 0, :3] = np.nan
        return {"golden": golden, "mine": golden + error, "difference": error}[which]

    def _side(self, row: wire.Row, which: wire.Which) -> wire.Side:
        tensor = self.tensor(row["id"], which)
        finite = tensor[np.isfinite(tensor)].astype(float)
        names = (
            ["batch", "head", "query", "key"] if tensor.ndim == 4 else ["batch", "token", "hidden"]
        )
        return {
            "which": which,
            "kept": row["kept"],
            "why": "" if row["kept"] else "recorded with level='summary': run again with values",
            "part": self.part,
            "dtype": row["dtype"],
            "shape": row["shape"],
            "axes": [
                {"name": name, "size": size} for name, size in zip(names, row["shape"], strict=True)
            ],
            "device": "cpu",
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "l2norm": float(np.linalg.norm(finite)),
            "nan": int(np.isnan(tensor).sum()),
            "inf": 0,
            "zero": 0,
            "numel": tensor.size,
            "fingerprint": f"xxh64:{row['id'] * 7919 + len(which):016x}",
            "call_id": "",
            "code": "" if which == "difference" else f"run[{row['id']}].tensor()",
            "kernel": self.kernel if which == "mine" else None,
        }

    def detail(self, request: wire_requests.DetailRequest) -> wire.Detail:
        d = self._difference(request["row"])
        row = self.data[d.index]
        sides: tuple[wire.Which, ...] = ("golden", "mine", "difference")
        return {
            "row": row,
            "sides": [self._side(row, which) for which in (sides if self.report else sides[:1])],
            "metrics": [{"name": name, "value": value} for name, value in d.metrics.items()]
            if self.report
            else [],
            "producer": d.index - 1,
            "producer_label": f"{self.data[d.index - 1]['path']} output[0]" if d.index else "",
            "flow": self.flow(row),
        }

    def flow(self, row: wire.Row) -> list[wire.Flow]:
        """Link an input to the next output, and an output to the next input and 7 more."""
        relation: wire.Relation = "outputs" if row["role"] == "input" else "consumers"
        rows = self.data[row["id"] + 1 : row["id"] + 2]
        links: list[wire.Link] = [
            {"row": one["id"], "label": f"{one['path']} {one['role']}[0]"} for one in rows
        ]
        return (
            [
                {
                    "relation": relation,
                    "links": links,
                    "total": len(rows) + 7 * (relation == "consumers"),
                }
            ]
            if rows
            else []
        )

    def series(self, request: wire_requests.SeriesRequest) -> wire.Series:
        figure = "error" if self.report else "max"
        same = self._by_site[site_key(self._difference(request["row"]).site)]
        rows = [self.data[d.index] for d in same]
        points = [(row["step"], row["id"], float(row[figure] or 0)) for row in rows]
        return {"lines": [line(figure, points, request["n"])]}
