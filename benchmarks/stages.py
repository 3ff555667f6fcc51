"""CPU seconds of `ld.compare` by stage, for many rows, for ports, and for inputs that are hard.

    python benchmarks/stages.py [--only same,ports,hard] [--rounds 3]

same: a Llama twice, and with one weight changed, at some 20,000 and 100,000 rows; modules and
functions, all values. ports: right ports of `ports/`, one of them with so many layers that it has
20,000 rows. hard: a layout and a relation of ten million elements, a graph of thousands of calls
that lost its producers, and hundreds of equal values.

Each figure is the median over the rounds, in CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import compare as llama
import torch
from ports import gptlike
from ports.score import CORRECT, record
from ports.sets import PORTS
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.app import compare as stages
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.relation.relation import relation
from llmdebug_nb.search.frontier import Frontier

STAGES = {
    "pairing": (stages, "pair"),
    "measuring": (stages.engine, "judging"),
    "blame": (stages.blame, "explained"),
}
SAME = {20_000: (14, 10), 100_000: (22, 32)}  # rows: layers and tokens
MANY_LAYERS = 28  # of gptlike: about 20,000 rows
SMALL_PORTS = ("gemma", "experts", "batched", "shards")
CALLS = 20_000  # of the cut graph
EQUAL = 600


def cpu(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def run(*given: Any, **more: Any) -> Any:
        start = time.process_time()
        try:
            return function(*given, **more)
        finally:
            spent[name] += time.process_time() - start  # type: ignore[assignment]

    return run


def measured(golden: Path, mine: Path) -> tuple[Any, Counter[str]]:
    """Return the report on two dumps, opened anew, and the CPU seconds of each stage and of all."""
    spent: Counter[str] = Counter()
    with ExitStack() as patches:
        for name, (module, function) in STAGES.items():
            wrapped = timed(getattr(module, function), name, spent)
            patches.enter_context(patch.object(module, function, wrapped))
        runs = [ld.open_run(path) for path in (golden, mine)]
        report = timed(ld.compare, "all", spent)(*runs, progress=False)
    return report, spent


def line(name: str, golden: Path, mine: Path, rounds: int) -> str:
    reports = [measured(golden, mine) for _ in range(rounds)]
    report = reports[-1][0]
    figures = [statistics.median(spent[what] for _, spent in reports) for what in (*STAGES, "all")]
    *by_stage, whole = figures
    seconds = (*by_stage, whole - sum(by_stage), whole)
    rows = f"{len(report.differences):,}"
    return table_row(name, rows, report.verdict, *(f"{figure:.2f}" for figure in seconds))


def table_row(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def same(folder: Path, rounds: int) -> Iterator[str]:
    """Yield a line for each size of the same program twice, and of one with another weight."""
    for rows, (llama.LAYERS, llama.TOKENS) in SAME.items():
        paths = []
        for run in ("golden", "same", "changed"):
            model = llama.build(64)
            if run == "changed":
                with torch.no_grad():
                    model.model.layers[llama.LAYERS // 2].mlp.down_proj.weight[0, 0] += 0.5
            paths.append(folder / f"{run}-{rows // 1000}k")
            mode = ("module", "api")
            with ld.dump(model, name=paths[-1].name, path=folder, tokens="all", mode=mode):
                llama.generate(model)
        golden, again, changed = paths
        yield line("the same program twice", golden, again, rounds)
        yield line("one weight changed", golden, changed, rounds)


def ports(folder: Path, rounds: int) -> Iterator[str]:
    """Yield a line for each port."""
    layers = gptlike.SETTINGS["n_layer"]
    for name in ("gptlike", *SMALL_PORTS):
        port = PORTS[name]
        count = MANY_LAYERS if name == "gptlike" else layers
        gptlike.SETTINGS["n_layer"] = count
        paths = [folder / f"{name}-{CORRECT}", folder / f"{name}-golden"]
        program = port.golden()
        record(program, paths[1], "functions")
        record(port.mine(program), paths[0], "functions")
        what = f"{name}, {count} layers" if name == "gptlike" else name
        yield line(what, paths[1], paths[0], rounds)


# -- inputs that are hard --------------------------------------------------------------------------


class Equal(nn.Module):
    """Makes hundreds of equal tensors; ``count``: how many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.count = nn.LayerNorm(16), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        equal = [torch.mul(x, 2.0) for _ in range(self.count)]
        return torch.add(equal[3], self.norm(x))


def of_equal_values(folder: Path) -> Callable[[], Any]:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for name, count in (("many", EQUAL), ("fewer", EQUAL // 2)):
        model = Equal(count)
        with ld.dump(model, name=name, path=folder, mode=("module", "api")):
            model(x)
    return lambda: ld.compare(
        *(ld.open_run(folder / name) for name in ("many", "fewer")), progress=False
    )


def of_layout() -> Callable[[], Any]:
    x = torch.randn(1, 4096, 32 * 80, generator=torch.Generator().manual_seed(0))
    y = x.reshape(4096, 32, 80).transpose(0, 1).contiguous()
    sides = [
        [Record(0, Site("part"), 0, "Part", summarize(values), payload=0)] for values in (x, y)
    ]

    def find() -> None:
        finder = LayoutFinder((sides[0], sides[1]), (lambda _: x, lambda _: y))
        assert finder.fit(sides[0][0], sides[1][0]) is not None

    return find


def of_relation(kind: str) -> Callable[[], Any]:
    golden, other = (
        torch.randn(1, 32, 2442, 128, generator=torch.Generator().manual_seed(n)) for n in (0, 1)
    )
    mine = {"none": other, "moved": golden[:, torch.arange(32).roll(5)], "doubled": 2 * golden}
    return lambda: relation(golden, mine[kind], limit=1e-3, groups=(32,))


def of_cut_graph() -> Callable[[], Any]:
    """Return the search in a chain of calls of which none knows what made its input."""
    rows = []
    for number in range(2 * CALLS):
        role = ("input", "output")[number % 2]
        summary = Summary("float32", (4,), -1.0, 1.0, 0.1, 2.0, 0, 0, 0, f"x:{number // 2}")
        site = Site(f"part/Torch.op{number // 2}", role=role)
        both = Record(number, site, number, "Torch.op", summary)
        verdict = "match" if number < CALLS // 2 else "diverged"
        rows.append(Difference(number, Pair(both, both, "same site"), verdict, 1.0, 0.1))  # type: ignore[arg-type]
    return lambda: Frontier(rows, "forward", lambda golden, mine: True).guilty


def hard(folder: Path, rounds: int) -> Iterator[str]:
    """Yield a line for each hard input."""
    works = {
        f"compare {EQUAL} equal tensors with {EQUAL // 2}": of_equal_values(folder),
        "the layout of ten million elements": of_layout(),
        "the relation of ten million elements: none": of_relation("none"),
        "the same: heads in another order": of_relation("moved"),
        "the same: times 2": of_relation("doubled"),
        f"the frontier in a cut graph of {CALLS:,} calls": of_cut_graph(),
    }
    for name, work in works.items():
        yield table_row(name, f"{statistics.median(cpu(work) for _ in range(rounds)):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="same,ports,hard")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"1 thread, torch {torch.__version__}; CPU seconds, median of {given.rounds} rounds")
    columns = ("compared", "rows", "verdict", *STAGES, "rest", "all")
    for part in given.only.split(","):
        head = ("hard input", "CPU s") if part == "hard" else columns
        print(f"\n{table_row(*head)}\n{table_row(*['---'] * len(head))}")
        with tempfile.TemporaryDirectory() as folder:
            for text in getattr(sys.modules[__name__], part)(Path(folder), given.rounds):
                print(text, flush=True)


if __name__ == "__main__":
    main()
