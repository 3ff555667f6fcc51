"""Time and memory of comparing at scale: many records without values, and values by the gigabyte.

    python benchmarks/scale.py --records 100000 1000000           # statistics alone
    python benchmarks/scale.py --records 100000 --ranks 10        # the same, of ten ranks
    python benchmarks/scale.py --pieces 1024 --records 10000      # 10^7: one rank after the other
    python benchmarks/scale.py --megabytes 1024 --threads 1 2     # values, of both runs together

Records: runs with the native format's index, statistics and fingerprints, and no values. In mine
one tensor of a hundred has another norm. A process of its own opens them, pairs them, judges all
pairs, gives the verdict and makes the first page of the explorer. Peak memory is that of the
process (`ru_maxrss`), interpreter and torch (0.25 GB) included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import large
import msgspec
import numpy as np
import torch

import llmdebug_nb as ld
from llmdebug_nb.app import compare as stages
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.show.wire_requests import RowsRequest
from llmdebug_nb.store.writer import Writer, create_run

STEP = 20_000  # records of a step: 100 layers of 100 modules, with an input and an output each
COLUMNS = ("records", "ranks", "opening", "pairing", "judging", "report", "first page", "all, s",
           "peak, GB", "verdict")  # fmt: skip
LAYERS, PARTS = 100, 100


def nodes() -> list[Node]:
    found = [Node("", "Model", "Model", -1), Node("layers", "layers", "ModuleList", 0)]
    for layer in range(LAYERS):
        above = len(found)
        found.append(Node(f"layers.{layer}", str(layer), "Layer", 1))
        found += [
            Node(f"layers.{layer}.part{p}", f"part{p}", large.KINDS[p % 5], above)
            for p in range(PARTS)
        ]
    return found


def write(folder: Path, name: str, records: int, ranks: int, other: bool) -> Path:
    """Write a run of ``records`` in all, each rank with its share, step by step."""
    path = create_run(folder, name, {"options": {"stats_only": True}})
    tree = nodes()
    parts = [node for node in tree if ".part" in node.path]
    for rank in range(ranks):
        writer = Writer(path, rank)
        writer.nodes(tree, 0)
        for step in range(-(-records // ranks // STEP)):
            rows = []
            for at in range(min(STEP, records // ranks - step * STEP)):
                number = step * STEP + at
                reach = 1.0 + (number * 7919 % 10007) / 10007 + rank
                reach *= 1 + 0.1 * (other and number % 100 == 99)
                role = "output" if at % 2 else "input"
                one = large.row(number, parts[at // 2], role, reach)
                one[large.AT["root_call"]] = step
                rows.append(one)
            writer.commit(Batch(records=rows, calls=[RootCall(step, 0, step, "decode")]))
        writer.close({"complete": True, "rank": rank})
    return path


def write_values(folder: Path, name: str, megabytes: int, error: float) -> Path:
    """Write a run with so many MiB of float32 tensors, 16 MiB each."""
    path = create_run(folder, name, {"options": {}})
    writer = Writer(path)
    tree = nodes()
    writer.nodes(tree, 0)
    random = torch.Generator().manual_seed(0)
    rows = []
    for number in range(megabytes // 16):
        x = torch.randn(4096, 1024, generator=random)
        x += error * torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
        one, seen = large.row(number, tree[3 + number], "output", 0.0), summarize(x)
        for column in ("min", "max", "mean", "l2norm", "fingerprint"):
            one[large.AT[column]] = getattr(seen, column)
        one[large.AT["shape"]] = "[4096, 1024]"
        writer.payload(one, x.numpy().view(np.uint8).reshape(-1))
        rows.append(one)
    writer.commit(Batch(records=rows, calls=[RootCall(0)]))
    writer.close({"complete": True})
    return path


def values(folder: Path, megabytes: int, counts: list[int]) -> None:
    """Print what comparing values costs, by threads, and on one worker for each."""
    paths = [
        write_values(folder, name, megabytes // 2, error)
        for name, error in (("values-golden", 0.0), ("values-mine", 1e-6))
    ]
    print("|threads|seconds|CPU seconds|MB/s|cores used|\n|---|---|---|---|---|")
    rows = []
    for count in [counts[0], *counts]:  # the first one warms up
        torch.set_num_threads(count)
        wall, cpu = time.perf_counter(), time.process_time()
        report = ld.compare(*paths, explain=False, progress=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append([(d.verdict, d.metrics) for d in report.differences])
        print(f"|{count}|{wall:.2f}|{cpu:.2f}|{megabytes * 1.048576 / wall:.0f}|{cpu / wall:.2f}|")
    assert all(each == rows[0] for each in rows), "other bits"


def pieces(folder: Path, records: int, count: int, sample: int) -> None:
    """Print what one rank after the other costs: ``sample`` of ``count`` alike, in one process."""
    paths = [
        write(folder, f"piece-{name}", records, 1, name == "mine") for name in ("golden", "mine")
    ]
    begun, held = time.perf_counter(), []
    for _ in range(sample):
        measured(*paths)
        held.append(gigabytes())
    each = (time.perf_counter() - begun) / sample
    print(f"{sample} of {count:,} ranks with {records:,} records: {each:.1f} s each,"
          f" {each * count / 3600:.1f} hours of one core for {count * records:,};"
          f" peak {held[0]:.2f} GB after the first, {held[-1]:.2f} GB after the last")  # fmt: skip


def gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measured(golden: Path, mine: Path) -> dict[str, Any]:
    """Return seconds and the peak behind each stage of one comparison."""
    spent: dict[str, Any] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given, **more)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
                spent[f"{name} peak"] = gigabytes()

        return run

    begun = time.perf_counter()
    runs = timed("opening", lambda: [ld.open_run(path) for path in (golden, mine)])()
    timed("opening", lambda: [(len(run), run.info()) for run in runs])()
    with (
        patch.object(stages, "_paired", timed("pairing", stages._paired)),
        patch.object(stages.engine, "judging", timed("judging", stages.engine.judging)),
    ):
        report = timed("comparing", ld.compare)(*runs, explain=False, progress=False)
    spent["report"] = spent["comparing"] - spent["pairing"] - spent["judging"]
    timed("first page", lambda: first_page(report.view()))()
    spent |= {"all, s": time.perf_counter() - begun, "verdict": report.verdict}
    spent["rows"] = len(report.differences)
    return spent | {"peak, GB": gigabytes()}


def first_page(view: Any) -> None:
    """Ask for what an explorer shows at first."""
    request = {
        "op": "rows", "node": -1, "mismatch": False, "text": "", "every": True,
        "sort": "", "descending": False, "step": -1, "start": 0, "n": 50,
    }  # fmt: skip
    view.overview()
    view.rows(msgspec.convert(request, RowsRequest))


def line(records: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", str(folder), "--records", str(records)]
    done = subprocess.run(
        [*command, "--ranks", str(ranks)], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folder: Path, records: int, ranks: int) -> None:
    paths = [folder / f"{name}-{records}-{ranks}" for name in ("golden", "mine")]
    for path, other in zip(paths, (False, True), strict=True):
        if not path.exists():
            write(folder, path.name, records, ranks, other)
            print(f"written: {path.name}, peak {gigabytes():.2f} GB", file=sys.stderr)
    print(json.dumps(measured(*paths)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pieces", type=int, help="ranks, compared one after the other")
    parser.add_argument("--sample", type=int, default=8, help="so many of them are compared")
    parser.add_argument("--megabytes", type=int, help="of values, both runs together")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where the runs are written, and kept")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.records[0], given.ranks)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        if given.megabytes:
            values(folder, given.megabytes, given.threads)
            return
        if given.pieces:
            pieces(folder, given.records[0], given.pieces, given.sample)
            return
        for cells in (COLUMNS, ["---"] * len(COLUMNS)):
            print(f"|{'|'.join(cells)}|")
        for records in given.records:
            found = line(records, given.ranks, folder)
            found |= {"records": f"{records:,}", "ranks": given.ranks}
            cells = [found[name] for name in COLUMNS]
            texts = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in cells]
            print(f"|{'|'.join(texts)}|", flush=True)


if __name__ == "__main__":
    main()
