"""A small run, or comparison, in memory, that answers every op of `wire`."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmdebug_nb.core.errors import DumpWriteError, TensorLookupError
from llmdebug_nb.core.records import Summary
from llmdebug_nb.show import filters, wire, wire_findings, wire_layers, wire_requests
from llmdebug_nb.show.series import line
from llmdebug_nb.show.tables import EVERYTHING
from llmdebug_nb.show.tensors import errors, heads, scatter, worst

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
STATES = {None: 0, "unmatched": 1, "match": 3, "within_noise": 4, "expected": 5, "diverged": 6}
MADE = 7
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


class FakeView:
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
        self.report = report
        self.asked: list[tuple[str, int]] = []
        self.paths = {"model.embed_tokens": "Embedding"}
        self.paths |= {
            f"model.layers.{n}.{leaf}": kind for n in range(layers) for leaf, kind in LEAVES.items()
        }
        self.paths |= {"model.norm": "RMSNorm", "lm_head": "Linear"} | dict.fromkeys(
            extra, "Hostile"
        )
        self.steps = [self._step(index) for index in range(steps)]
        self.data: list[wire.Row] = []
        for step in self.steps:
            for path, op in self.paths.items():
                self._record(step, path, op, "input")
                self._record(step, path, op, "output")
        for number in range(records - len(self.data)):
            self._record(self.steps[0], f"model.many.{number}", "Identity", "output")
        self.marks: list[wire.Mark] = []
        self.watchers: list[Any] = []
        self.tree = self._tree()

    def _step(self, index: int) -> wire.Step:
        kind = "warmup" if index == 0 else "prefill" if index == 1 else "decode"
        label = "warm-up" if index == 0 else f"{index - 1} {kind}"
        return {
            "index": index,
            "generation": -1 if index == 0 else 0,
            "step": max(0, index - 1),
            "kind": kind,
            "label": label,
            "text": "",
            "requests": [],
            "rows": 0,
            "bad": 0,
        }

    def _record(self, step: wire.Step, path: str, op: str, role: str) -> None:
        number = len(self.data)
        query = 1 if step["kind"] == "decode" else PROMPT
        shape = [1, HEADS, query, PROMPT] if op == "Softmax" else [1, query, HIDDEN]
        bad = (
            self.report
            and step["index"] >= 2
            and role == "output"
            and (path == BROKEN or path in ("model.norm", "lm_head"))
        )
        step["rows"] += 1
        step["bad"] += bad
        self.data.append(
            {
                "id": number,
                "step": step["index"],
                "rank": 0,
                "seq": number,
                "path": path,
                "call": 0,
                "role": role,
                "slot": "0",
                "op": op,
                "dtype": "bfloat16",
                "shape": shape,
                "min": -3.1 - number % 7 / 10,
                "max": 2.9 + number % 5 / 10,
                "mean": 0.0123 * (number % 3),
                "l2norm": 27.71,
                "nan": 3 if bad and path == "lm_head" else 0,
                "inf": 0,
                "kept": path != "model.embed_tokens",
                "verdict": None
                if not self.report
                else "diverged"
                if bad
                else "within_noise"
                if number % 3 == 0
                else "match",
                "error": (0.31 if bad else 0.0021) if self.report else None,
                "limit": 0.012 if self.report else None,
                "reason": "error is 26 times its limit" if bad else "",
                "expected": "",
                "mark": -1,
            }
        )

    def _tree(self) -> list[wire.TreeNode]:
        paths = dict.fromkeys([""])
        for row in self.data:
            names = row["path"].split(".")
            paths |= dict.fromkeys(".".join(names[: n + 1]) for n in range(len(names)))
        rows, bad, expected, worst = (dict.fromkeys(paths, start) for start in (0, 0, 0, None))
        self.kids: dict[str | None, list[str]] = {None: [""]}
        for path in paths:
            if path:
                self.kids.setdefault(path.rpartition(".")[0], []).append(path)
        for row in self.data:
            names = row["path"].split(".")
            for path in ["", *(".".join(names[: n + 1]) for n in range(len(names)))]:
                rows[path] += 1
                bad[path] += row["verdict"] == "diverged"
                expected[path] += row["verdict"] == "expected"
                worst[path] = max(worst[path], row["verdict"], key=STATES.__getitem__)
        self.ids = {path: number for number, path in enumerate(paths)}
        return [
            {
                "id": number,
                "label": path.rpartition(".")[2] or "LlamaForCausalLM",
                "path": path,
                "type": self.paths.get(path)
                or TYPES.get(path)
                or TYPES.get(path.rpartition(".")[2], "DecoderLayer"),
                "children": len(self.kids.get(path, ())),
                "rows": rows[path],
                "bad": bad[path],
                "unmatched": 0,
                "expected": expected[path],
                "verdict": worst[path],
                "note": ""
                if not expected[path]
                else f"{expected[path]} expected: {self.marks[0]['comment']}",
            }
            for path, number in self.ids.items()
        ]

    def text(self) -> str:
        return (
            f"{'report' if self.report else 'run'} of {len(self.data)} records in "
            f"{len(self.steps)} steps"
        )

    layer_errors = None  # that pages draw

    def timeline(self) -> None:
        return None

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
            "findings": [
                {
                    "path": BROKEN,
                    "op": "Linear",
                    "step": 2,
                    "cause": "op-differs",
                    "row": bad[0]["id"],
                    "evidence": "replayed on its own inputs, the op gives another result: 0.31, "
                    "noise floor 0.012",
                    "expected": self.data[bad[0]["id"]]["expected"],
                    "mark": -1,
                    "head": "Made in",
                    "place": "port.py:30",
                    "where": f"{BROKEN} (FastLinear, was Linear)",
                    "what": "Mine's value is golden's times 0.5.",
                    "why": "replayed on its own inputs, the op gives another result.",
                    "do": "Look at the scale.",
                    "file": "port.py",
                    "line": 30,
                    "proof": self.proof,
                },
                {
                    "path": "lm_head",
                    "op": "Linear",
                    "step": 3,
                    "cause": "weight differs",
                    "row": bad[-1]["id"],
                    "evidence": "weight: 12 of 4,096 elements",
                    "expected": "",
                    "mark": -1,
                    "head": "A weight differs in",
                    "place": "lm_head",
                    "where": "lm_head (Linear)",
                    "what": "Weight differs.",
                    "why": "weight: 12 of 4,096 elements.",
                    "do": "Look at how the weight is loaded.",
                    "file": "",
                    "line": 0,
                    "proof": "",
                },
            ]
            if bad
            else [],
        }

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

    def _state(self, row: wire.Row) -> int:
        made = row["verdict"] == "diverged" and row["path"] == BROKEN
        return MADE if made else STATES[row["verdict"]]

    def calls(self, request: wire_requests.CallsRequest) -> wire_layers.Calls:
        paths = list(dict.fromkeys(self._layer(row["path"]) for row in self.data))
        cells: list[wire_layers.CallCell] = [
            {
                "label": row["path"].rpartition(".")[2],
                "path": row["path"],
                "row": row["id"],
                "state": self._state(row),
                "error": row["error"],
                "limit": row["limit"],
            }
            for row in self.data
            if self._layer(row["path"]) == paths[request["layer"]]
            and row["step"] == request["step"]
            and row["role"] == "output"
        ]
        return {"cells": cells[: request["n"]], "total": len(cells)}

    def _layer(self, path: str) -> str:
        names = path.split(".")
        if path.startswith("model.layers."):
            return ".".join(names[:3])
        return path if path in ("model.embed_tokens", "model.norm", "lm_head") else ""

    def layers(
        self, request: wire_requests.LayersRequest
    ) -> tuple[wire_layers.LayerMap, list[memoryview]]:
        paths = list(dict.fromkeys(self._layer(row["path"]) for row in self.data))
        worst: dict[tuple[str, int], wire.Row] = {}
        for row in self.data:
            cell = self._layer(row["path"]), row["step"]
            if cell not in worst or self._state(row) > self._state(worst[cell]):
                worst[cell] = row
        cells = [worst.get((path, step["index"])) for path in paths for step in self.steps]
        arrays = [
            np.array([np.nan if row is None else row["error"] for row in cells], "<f4"),
            np.array([np.nan if row is None else row["limit"] for row in cells], "<f4"),
            np.array([-1 if row is None else row["id"] for row in cells], "<i4"),
            np.array([0 if row is None else self._state(row) for row in cells], "u1"),
        ]
        layers: list[wire_layers.Layer] = [
            {"path": path, "type": "Layer", "node": self.ids[path] if path else -1}
            for path in paths
        ]
        return {"layers": layers, "steps": len(self.steps)}, [
            memoryview(array.tobytes()) for array in arrays
        ]

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
        parent = None if request["parent"] < 0 else self.tree[request["parent"]]["path"]
        kids = self.kids.get(parent, [])
        self.asked.append(("children", request["parent"]))
        return {
            "total": len(kids),
            "nodes": [
                self.tree[self.ids[path]]
                for path in kids[request["start"] : request["start"] + request["n"]]
            ],
        }

    def _listed(self, request, step: int = -1) -> list[wire.Row]:
        path = self.tree[request["node"]]["path"] if request["node"] >= 0 else ""
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
        if problem := filters.problem(request["text"]):
            return {"total": 0, "start": 0, "rows": [], "problem": problem}
        rows = self._listed(request, request["step"])
        return {
            "total": len(rows),
            "start": request["start"],
            "rows": rows[request["start"] : request["start"] + request["n"]],
            "problem": "",
        }

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

    def path(self, request: wire_requests.PathRequest) -> wire_requests.PathAnswer:
        names = request["path"].split(".")
        above = ["", *(".".join(names[: n + 1]) for n in range(len(names)))]
        return {"ids": list(dict.fromkeys(self.ids[path] for path in above if path in self.ids))}

    def snapshot(self, state: wire.State) -> None:
        return None

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

    def view(self, request: wire_requests.ViewRequest) -> tuple[wire.View, list[memoryview]]:
        tensor = self.tensor(request["row"], request["which"])
        axes, size = request["axes"], request["size"]
        plane = tensor[
            tuple(slice(None) if axis in axes else at for axis, at in enumerate(request["fixed"]))
        ]
        if axes[0] > axes[1]:
            plane = plane.T
        rows, cols = plane.shape
        y0, x0, y1, x1 = request["y0"], request["x0"], request["y1"] or rows, request["x1"] or cols
        window = plane[y0:y1, x0:x1]
        fy, fx = -(-window.shape[0] // size), -(-window.shape[1] // size)
        cells = extremes(window, fy, fx)
        answer: wire.View = {
            "h": cells.shape[0],
            "w": cells.shape[1],
            "fy": fy,
            "fx": fx,
            "y0": y0,
            "x0": x0,
            "y1": y1,
            "x1": x1,
            "rows": rows,
            "cols": cols,
            "lo": float(np.nanmin(plane)),
            "hi": float(np.nanmax(plane)),
        }
        return answer, [memoryview(np.ascontiguousarray(cells)).cast("B")]

    def heads(self, request: wire_requests.HeadsRequest) -> tuple[wire.Heads, list[memoryview]]:
        self.asked.append(("heads", request["row"]))
        tensor = self.tensor(request["row"], request["which"])
        view, cells = heads(
            tensor,
            request["axis"],
            request["axes"],
            request["fixed"],
            request["size"],
            request["first"],
        )
        return view, [memoryview(cells.tobytes())]

    def histogram(self, request: wire_requests.HistogramRequest) -> wire.Histogram:
        tensor = self.tensor(request["row"], request["which"])
        finite = tensor[np.isfinite(tensor)]
        counts, edges = np.histogram(finite, request["bins"])
        return {
            "lo": float(edges[0]),
            "hi": float(edges[-1]),
            "counts": counts.tolist(),
            "nan": int(np.isnan(tensor).sum()),
            "inf": 0,
            "total": tensor.size,
        }


def summary(row: wire.Row) -> Summary:
    low, high, mean, norm = (float(row[name]) for name in ("min", "max", "mean", "l2norm"))
    return Summary(row["dtype"], tuple(row["shape"]), low, high, mean, norm, row["nan"], row["inf"])


def extremes(window: np.ndarray, fy: int, fx: int) -> np.ndarray:
    """Return the element of largest magnitude of each block; a NaN wins."""
    high, low = window, window
    for axis, factor in enumerate((fy, fx)):
        starts = np.arange(0, window.shape[axis], factor)
        high, low = np.maximum.reduceat(high, starts, axis), np.minimum.reduceat(low, starts, axis)
    return np.where(np.abs(high) >= np.abs(low), high, low).astype("<f4")
