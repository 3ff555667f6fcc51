"""A small run, or comparison, in memory, that answers every op of `wire`.

Its rows, findings and tensors are invented; tree, steps, map of layers and pictures are the real
ones. A test may change ``data`` (the rows) and ``steps`` as it wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.errors import DumpWriteError, TensorLookupError
from llmdebug_nb.core.records import Node, Record, RootCall, Site, Summary
from llmdebug_nb.show import filters, layers, wire, wire_findings, wire_layers, wire_requests
from llmdebug_nb.show.columns import Columns
from llmdebug_nb.show.series import line
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.tensors import errors, scatter, worst
from llmdebug_nb.show.tree import Tree
from llmdebug_nb.show.views import View

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


class FakeView(View):
    """``report``: a comparison that goes wrong in `BROKEN` from the first decode step on."""

    part = ""  # what was kept of each tensor
    kernel: wire.KernelView | None = None  # that computes each tensor of mine
    points = 4096  # of a scatter plot at most
    proof = ""
    is_inside = False

    def __init__(
        self,
        report: bool = False,
        layers: int = 3,
        steps: int = 4,
        extra: tuple[str, ...] = (),
        records: int = 0,
    ) -> None:
        calls = [RootCall(0, -1, 0, "warmup"), RootCall(1, 0, 0, "prefill")]
        calls += [RootCall(index, 0, index - 1, "decode") for index in range(2, steps)]
        super().__init__(calls[:steps])
        self.kind = "report" if report else "run"
        self.report = report
        self.asked: list[tuple[str, int]] = []
        self.paths = {"model.embed_tokens": "Embedding"}
        self.paths |= {
            f"model.layers.{n}.{leaf}": kind for n in range(layers) for leaf, kind in LEAVES.items()
        }
        self.paths |= {"model.norm": "RMSNorm", "lm_head": "Linear"} | dict.fromkeys(
            extra, "Hostile"
        )
        self.records: list[Record] = []
        self.data: list[wire.Row] = []
        for call in calls[:steps]:
            for path, op in self.paths.items():
                self._record(call, path, op, "input")
                self._record(call, path, op, "output")
        for number in range(records - len(self.data)):
            self._record(calls[0], f"model.many.{number}", "Identity", "output")
        self.marks: list[wire.Mark] = []
        self.nodes = self._nodes()
        self.steps: Any = self.step_views(
            *(self._counted("step", bad) for bad in (None, "diverged"))
        )
        self.tree = self._tree()

    def _record(self, call: RootCall, path: str, op: str, role: str) -> None:
        number = len(self.data)
        query = 1 if call.kind == "decode" else PROMPT
        shape = (1, HEADS, query, PROMPT) if op == "Softmax" else (1, query, HIDDEN)
        wrong = path in (BROKEN, "model.norm", "lm_head")
        bad = self.report and call.kind == "decode" and role == "output" and wrong
        low, high = -3.1 - number % 7 / 10, 2.9 + number % 5 / 10
        nan = 3 if bad and path == "lm_head" else 0
        summary = Summary("bfloat16", shape, low, high, 0.0123 * (number % 3), 27.71, nan, 0)
        site = Site(path, step=call.step, generation=call.generation, role=role)
        payload = None if path == "model.embed_tokens" else "kept"
        self.records.append(Record(number, site, number, op, summary, payload=payload))
        row = self.row_view(number, self.records[-1])
        if self.report:
            agreed: wire.Verdict = "match" if number % 3 else "within_noise"
            row |= {"verdict": agreed, "error": 0.0021, "limit": 0.012}
        if bad:
            row |= {"verdict": "diverged", "error": 0.31, "reason": "error is 26 times its limit"}
        self.data.append(row)

    def _nodes(self) -> list[Node]:
        paths = [
            above for path in dict.fromkeys(r["path"] for r in self.data) for above in way(path)
        ]
        at = {path: number for number, path in enumerate(dict.fromkeys(["", *paths]))}
        nodes = []
        for path in at:
            above, _, name = path.rpartition(".")
            kind = self.paths.get(path) or TYPES.get(path) or TYPES.get(name, "DecoderLayer")
            nodes.append(Node(path, name or TYPES[""], kind, at[above] if path else -1))
        return nodes

    def _counted(self, of: str, verdict: str | None) -> Counter[Any]:
        return Counter(row[of] for row in self.data if verdict in (None, row["verdict"]))

    def _tree(self) -> Tree:
        verdicts = (None, "diverged", "within_noise", "unmatched", "expected")
        rows, bad, *judged = (self._counted("path", verdict) for verdict in verdicts)
        comments = {r["path"]: [r["expected"]] for r in self.data if r["verdict"] == "expected"}
        return Tree(self.nodes, rows, bad, tuple(judged) if self.report else None, comments)

    tree: Any = None  # as `expect` makes another

    def text(self) -> str:
        return (
            f"{'report' if self.report else 'run'} of {len(self.data)} records in "
            f"{len(self.steps)} steps"
        )

    def overview(self, request: wire_requests.OverviewRequest | None = None) -> wire.Overview:
        bad = [row for row in self.data if row["verdict"] == "diverged"]
        return {
            "kind": "report" if self.report else "run",
            "title": "tiny-llama, eager vs compiled" if self.report else "tiny-llama, eager",
            "golden": "runs/eager" if self.report else "",
            "mine": "runs/compiled" if self.report else "",
            "verdict": ("diverged" if bad else "expected" if self.marks else "match")
            if self.report
            else None,
            "notes": [],
            "caution": "",
            "lines": [f"{len(self.data):,} records in {len(self.steps)} steps"]
            + [f"{len(bad)} pairs diverged, 0 unmatched"] * self.report,
            "summary": "It differs. The error is made there. Look at the code." * self.report,
            "steps": self.steps,
            "marks": self.marks,
            "kept": "runs/compiled.expected.json" * self.report,
            "first_bad": bad[0]["id"] if bad else -1,
            "rows": len(self.data),
            "ranks": [],
            "inside": self.is_inside,
            "halt": 0,
            "findings": self._findings(bad) if bad else [],
        }

    def _findings(self, bad: list[wire.Row]) -> list[wire.FindingView]:
        first: Any = {
            "path": BROKEN, "op": "Linear", "step": 2, "cause": "op-differs", "row": bad[0]["id"],
            "evidence": "replayed on its own inputs, the op gives another result: 0.31, "
            "noise floor 0.012",
            "expected": bad[0]["expected"], "mark": -1, "head": "Made in", "place": "port.py:30",
            "where": f"{BROKEN} (FastLinear, was Linear)",
            "what": "Mine's value is golden's times 0.5.",
            "why": "replayed on its own inputs, the op gives another result.",
            "do": "Look at the scale.", "file": "port.py", "line": 30, "proof": self.proof,
        }  # fmt: skip
        second: Any = {
            "path": "lm_head", "op": "Linear", "step": 3, "cause": "weight differs",
            "row": bad[-1]["id"], "evidence": "weight: 12 of 4,096 elements", "expected": "",
            "mark": -1, "head": "A weight differs in", "place": "lm_head",
            "where": "lm_head (Linear)", "what": "Weight differs.",
            "why": "weight: 12 of 4,096 elements.", "do": "Look at how the weight is loaded.",
            "file": "", "line": 0, "proof": "",
        }  # fmt: skip
        return [first, second]

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

    def prove(self, request: wire_requests.ProveRequest) -> wire.Overview:
        self.asked.append(("prove", request["finding"]))
        self.proof = "With golden's value in its place, all 12 rows agree."
        return self.overview()

    def inside(self, request: wire_requests.InsideRequest) -> wire.Overview:
        self.asked.append(("inside", request["finding"]))
        self.is_inside = request["finding"] >= 0
        return self.overview()

    @property
    def layer_errors(self) -> layers.LayerErrors:
        columns = Columns(self.differences, [row["step"] for row in self.data])
        return layers.layer_errors(self.tree, columns, len(self.steps), {(BROKEN, 0)})

    @property
    def differences(self) -> list[Difference]:
        return [
            Difference(
                row["id"], Pair(record, None, ""), row["verdict"], row["error"], row["limit"]
            )
            for row, record in zip(self.data, self.records, strict=True)
        ]

    def calls(self, request: wire_requests.CallsRequest) -> wire_layers.Calls:
        asked = request["layer"], request["step"], request["n"]
        return layers.calls(self.layer_errors, self.differences, *asked)

    def layers(
        self, request: wire_requests.LayersRequest
    ) -> tuple[wire_layers.LayerMap, list[memoryview]]:
        found = self.layer_errors
        grids = found.error, found.limit, found.row, found.state
        answer: wire_layers.LayerMap = {"layers": found.layers, "steps": len(self.steps)}
        return answer, [memoryview(grid.tobytes()) for grid in grids]

    def worst(self, request: wire_requests.WorstRequest) -> wire.Worst:
        golden, mine = (self.tensor(request["row"], which) for which in ("golden", "mine"))
        elements, differing = worst(golden, mine, request["n"])
        return {"elements": elements, "differing": differing}

    def errors(self, request: wire_requests.ErrorsRequest) -> wire.ErrorHistogram:
        golden, mine = (self.tensor(request["row"], which) for which in ("golden", "mine"))
        return {**errors(golden, mine, request["bins"]), "limit": 0.012}

    def scatter(
        self, request: wire_requests.ScatterRequest
    ) -> tuple[wire.Scatter, list[memoryview]]:
        golden, mine = (self.tensor(request["row"], which) for which in ("golden", "mine"))
        answer, buffers = scatter(golden, mine, self.points, request["size"])
        return answer, [memoryview(buffer.tobytes()) for buffer in buffers]

    def expect(self, request: wire_requests.ExpectRequest) -> wire.Overview:
        self.asked.append(("expect", request["row"]))
        if request["comment"] == "boom":
            raise DumpWriteError("can't write expected.json: read-only")
        number = (
            request["row"]
            if request["row"] >= 0
            else next(r["id"] for r in self.data if r["path"] == BROKEN)
        )
        path = self.data[number]["path"]
        self.marks.append({"text": path, "comment": request["comment"], "rows": 0})
        for row in self.data:
            if row["path"] == path and row["verdict"] == "diverged":
                row |= {
                    "verdict": "expected",
                    "expected": request["comment"] or path,
                    "mark": len(self.marks) - 1,
                }
                self.steps[row["step"]]["bad"] -= 1
                self.marks[-1]["rows"] += 1
        self.tree = self._tree()
        return self.overview({"op": "overview"})

    def unexpect(self, request: wire_requests.UnexpectRequest) -> wire.Overview:
        self.asked.append(("unexpect", request["mark"]))
        for row in self.data:
            if row["mark"] == request["mark"]:
                row |= {"verdict": "diverged", "expected": "", "mark": -1}
                self.steps[row["step"]]["bad"] += 1
        self.marks.pop(request["mark"])
        self.tree = self._tree()
        return self.overview({"op": "overview"})

    def children(self, request: wire_requests.ChildrenRequest) -> wire.Children:
        self.asked.append(("children", request["parent"]))
        return super().children(request)

    def _listed(self, request, step: int = -1) -> list[wire.Row]:
        path = self.tree.path(request["node"])
        wanted = filters.read(request["text"])
        found = [
            row
            for row in self.data
            if (step < 0 or request["every"] or row["step"] == step)
            and (not path or row["path"] == path or row["path"].startswith(path + "."))
            and (not request["mismatch"] or row["verdict"] in ("diverged", "unmatched"))
            and wanted.passes(f"{row['path']} {row['op']} {row['dtype']}".lower(), [summary(row)])
        ]
        sort = request["sort"]
        return (
            sorted(found, key=lambda row: row[sort], reverse=request["descending"])
            if sort
            else found
        )

    def rows(self, request: wire_requests.RowsRequest) -> wire.Page:
        self.asked.append(("rows", request["start"]))
        if request["text"] == "boom":
            raise ZeroDivisionError("division\nby zero")
        return super().rows(request)

    def listed(self, request: wire_requests.RowsRequest) -> wire.Page:
        rows, start = self._listed(request, request["step"]), request["start"]
        page = rows[start : start + request["n"]]
        return {"total": len(rows), "start": start, "rows": page, "problem": ""}

    def first_rows(self, n: int) -> list[wire.Row]:
        return self.data[:n]

    def telling_rows(self, n: int) -> list[wire.Row]:
        return [row for row in self.data if row["verdict"] == "diverged"][:n]

    def _located(self, request, row: wire.Row | None) -> wire.Located:
        listed = (
            self._listed(request, row["step"])
            if row and not filters.problem(request["text"])
            else []
        )
        return {"row": row, "index": listed.index(row) if row in listed else -1}

    def locate(self, request: wire_requests.LocateRequest) -> wire.Located:
        if request["sort"]:
            rows = self._listed(request, self.data[request["row"]]["step"])
            at = [row["id"] for row in rows].index(request["row"]) + request["delta"]
            return self._located(request, rows[at] if 0 <= at < len(rows) else None)
        rows = self._listed(request)
        if request["delta"] > 0:
            return self._located(
                request, next((row for row in rows if row["id"] > request["row"]), None)
            )
        before = [row for row in rows if row["id"] < request["row"] or request["row"] < 0]
        return self._located(request, before[-1] if before else None)

    def row(self, request: wire_requests.RowRequest) -> wire.Located:
        if not 0 <= request["row"] < len(self.data):
            raise TensorLookupError(f"no row {request['row']}; there are {len(self.data)}")
        return self._located(request, self.data[request["row"]])

    def find(self, path: str, step: int | None, role: str) -> int:
        raise NotImplementedError

    def snapshot(self, state: wire.State) -> None:
        return None

    def load(self, row: int, which: Any) -> np.ndarray:
        return self.tensor(row, which)

    def tensor(self, number: int, which: wire.Which) -> np.ndarray:
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
        row = self.row({"op": "row", "row": request["row"], **EVERYTHING})["row"]
        assert row is not None
        made_by = row["id"] - 1 if row["id"] else -1
        return {
            "row": row,
            "sides": [
                self._side(row, which)
                for which in (("golden", "mine", "difference") if self.report else ("golden",))
            ],
            "metrics": [
                {"name": "max_abs", "value": 0.93},
                {"name": "cosine", "value": 0.99941},
                {"name": "rel_l2", "value": row["error"]},
            ]
            if self.report
            else [],
            "producer": made_by,
            "producer_label": f"{self.data[made_by]['path']} output[0]" if made_by >= 0 else "",
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
        row = self.data[request["row"]]
        same = [
            one for one in self.data if (one["path"], one["role"]) == (row["path"], row["role"])
        ]
        figure = "error" if self.report else "max"
        return {
            "lines": [
                line(
                    figure,
                    [(one["step"], one["id"], float(one[figure])) for one in same],
                    request["n"],
                )
            ]
        }

    def heads(self, request: wire_requests.HeadsRequest) -> tuple[wire.Heads, list[memoryview]]:
        self.asked.append(("heads", request["row"]))
        return super().heads(request)


def summary(row: wire.Row) -> Summary:
    low, high, mean, norm = (float(row[name]) for name in ("min", "max", "mean", "l2norm"))
    return Summary(row["dtype"], tuple(row["shape"]), low, high, mean, norm, row["nan"], row["inf"])


def way(path: str) -> Iterator[str]:
    """Yield the modules down to a path."""
    names = path.split(".")
    return (".".join(names[: n + 1]) for n in range(len(names)))
