"""Dumps as large as the explorers are made for, written without a model, for `ui.py`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.app.report import Report
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Comparison, Difference, RowVerdict
from llmdebug_nb.comparison.judging import Judging
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, COLUMNS, Row
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.findings.blame import Explanation
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.writer import Writer, create_run

LAYERS, BLOCKS, PARTS = 100, 10, 50  # modules: two tensors each make 100,000 sites
KINDS = ("Linear", "RMSNorm", "SiLU", "Softmax", "Embedding")
SIDE = 4096
LIMIT = 1e-3


def nodes() -> list[Node]:
    """Return the model tree: layers of blocks of parts."""
    found = [Node("", "LargeModel", "LargeModel", -1), Node("layers", "layers", "ModuleList", 0)]
    for layer in range(LAYERS):
        above = len(found)
        found.append(Node(f"layers.{layer}", str(layer), "Layer", 1))
        for block in range(BLOCKS):
            parent = len(found)
            path = f"layers.{layer}.block{block}"
            found.append(Node(path, f"block{block}", "Block", above))
            found += [
                Node(f"{path}.part{p}", f"part{p}", KINDS[p % len(KINDS)], parent)
                for p in range(PARTS)
            ]
    return found


def sites(folder: Path, name: str, error: float = 0.0) -> Path:
    """Write a run of 100,000 sites. ``error``: relative, of every seventh tensor."""
    random = np.random.default_rng(0)
    path = create_run(folder, name, {"options": {"stats_only": True}})
    tree = nodes()
    writer = Writer(path)
    writer.nodes(tree, 0)
    parts = [node for node in tree if ".part" in node.path]
    figures = random.lognormal(-2, 2, (len(parts), 2))
    rows = []
    for number, (node, role) in enumerate(
        (node, role) for node in parts for role in ("input", "output")
    ):
        reach = float(figures[number // 2, number % 2]) * (1 + error * (number % 7 == 0))
        rows.append(row(number, node, role, reach))
    writer.commit(Batch(records=rows, calls=[RootCall(0, kind="prefill")]))
    writer.close({"complete": True})
    return path


def row(number: int, node: Node, role: str, reach: float) -> Row:
    values = {
        "id": number,
        "root_call": 0,
        "path": node.path,
        "call": 0,
        "phase": "forward",
        "role": role,
        "slot": "0",
        "op": node.type,
        "device": "cpu",
        "dtype": "float32",
        "shape": "[1, 128, 1024]",
        "fingerprint": f"{number}:{reach}",
        "min": -reach,
        "max": reach,
        "mean": reach / 100,
        "l2norm": reach * 300,
        "nan": 0,
        "inf": 0,
        "zero": 0,
    }
    return [values.get(name) for name in COLUMNS]


def tensor(folder: Path, name: str) -> Path:
    """Write a run of one tensor of 4096 x 4096."""
    values = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    path = create_run(folder, name, {})
    writer = Writer(path)
    writer.nodes([Node("", "Model", "Model", -1)], 0)
    seen = summarize(values)
    one = row(0, Node("", "Model", "Model", -1), "output", 0.0)
    for column in ("min", "max", "mean", "l2norm", "fingerprint"):
        one[AT[column]] = getattr(seen, column)
    one[AT["shape"]] = f"[{SIDE}, {SIDE}]"
    writer.payload(one, values.numpy().view(np.uint8).reshape(-1))
    writer.commit(Batch(records=[one], calls=[RootCall(0, kind="forward")]))
    writer.close({"complete": True})
    return path


def report(golden: Run, mine: Run) -> Report:
    """Return the report of a comparison; its figures are made up, as measuring takes long.

    The worst row is blamed. The model trees are read, as comparing reads them.
    """
    assert golden.nodes
    assert mine.nodes
    random = np.random.default_rng(1)
    errors = random.lognormal(-9, 2, len(golden))
    rows = [
        Difference(
            number,
            Pair(a, b, "same site"),
            verdict(error),
            float(error),
            LIMIT,
            {"rel_l2": float(error)},
        )
        for number, (a, b, error) in enumerate(
            zip(golden.records(), mine.records(), errors, strict=True)
        )
    ]
    worst = rows[int(errors.argmax())]
    finding = Finding(
        worst.site.path, worst.op, 0, causes.INTRODUCED, "made up for the benchmark", worst
    )
    found = Explanation([finding], [frozenset([worst.index])])
    return Report((golden, mine), cast(Judging, Judged(rows)), lambda _: found)


class Judged:
    """Rows that were judged before; see `Judging`."""

    def __init__(self, rows: list[Difference]) -> None:
        self.plain, self.comparison = rows, Comparison()

    def differences(self, expected: object = (), excused: object = ()) -> list[Difference]:
        return self.plain

    def is_large(self, index: int) -> bool:
        return False

    def says(self) -> str:
        return ""


def verdict(error: float) -> RowVerdict:
    return "diverged" if error > LIMIT else "within_noise" if error > LIMIT / 100 else "match"
