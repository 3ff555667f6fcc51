"""What a comparison in lockstep takes and says, beside two dumps.

    python benchmarks/lockstep.py [--layers 16]
    python benchmarks/lockstep.py --set zoo|more|ports|all [--seeds 1] [--only NUMBER]

The first measures time and memory. Golden is a Llama of random weights (width 512, 64 tokens) in
float32, mine the same in bfloat16, right or with one bug. Both ways record modules with all values,
and must say the same. Bytes of dumps: values on disk. Bytes of lockstep: values that were held at
most.

The second compares each case of the zoo (see `zoo/score.py`) by dumps and in lockstep, and counts
the reports that are the same: verdict, findings, and each row with its error. Each pair in which
nothing is wrong, that is each control and each right port, also runs with ``stop="first"``, by
modules alone and with functions: a stop is a false one.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ports.sets import PORTS
from zoo.score import RECORD
from zoo.sets import SETS

import llmdebug_nb as ld

SHARES = (1.0, 0.25, 1 / 16)  # of the bytes of both dumps that the window may hold
WIDTH, TOKENS, VOCABULARY = 512, 64, 1024


@dataclass
class Way:
    """How a comparison went. ``ran``: how often each program ran."""

    name: str
    seconds: float
    nbytes: int
    ran: tuple[int, int]
    said: object

    def row(self, case: str) -> str:
        ran = f"{self.ran[0]} and {self.ran[1]}"
        return f"| {case} | {self.name} | {self.seconds:.1f} | {self.nbytes / 1e6:.1f} | {ran} |"


def models(layers: int, bug: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    golden = LlamaForCausalLM(config).eval()
    mine = copy.deepcopy(golden).to(torch.bfloat16)
    if bug:
        head = mine.model.layers[layers // 2].self_attn.k_proj
        head.register_forward_hook(lambda module, args, output: output * 1.25)
    return golden, mine


def said(report: ld.Report) -> object:
    rows = [(str(d.site), d.verdict, d.error) for d in report.differences]
    return report.verdict, [(f.path, f.cause, f.step, f.evidence) for f in report.findings], rows


def dumps(golden: Any, mine: Any, inputs: dict[str, Any]) -> Way:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name, model in (("golden", golden), ("mine", mine)):
            with ld.dump(model, name=name, path=folder) as run:
                model(**inputs)
            runs.append(run)
        report = ld.compare(*runs, progress=False)
        nbytes = sum(run.info()["bytes"] for run in runs)
    return Way("two dumps", time.perf_counter() - start, nbytes, (1, 1), said(report))


def lockstep(golden: Any, mine: Any, inputs: dict[str, Any], window: int, **more: Any) -> Way:
    start = time.perf_counter()
    report = ld.lockstep(golden, mine, inputs, window=window, progress=False, **more)
    seconds, took = time.perf_counter() - start, report.lockstep
    assert took is not None
    name = f"lockstep, window {window / 1e6:.1f} MB"
    return Way(name, seconds, took.most, took.ran, said(report))


def measure(layers: int) -> Iterator[str]:
    inputs = {"input_ids": torch.arange(TOKENS)[None]}
    for bug in (False, True):
        golden, mine = models(layers, bug)
        case = "one bug" if bug else "right"
        dumps(golden, mine, inputs)  # loads what is loaded once
        whole = dumps(golden, mine, inputs)
        yield whole.row(case)
        for share in SHARES:
            way = lockstep(golden, mine, inputs, int(whole.nbytes * share * 4 / 3))
            assert way.said == whole.said, way.name
            yield way.row(case)
        if bug:
            for name, more in (("stop", {"stop": "first"}), ("graft", {"graft": True})):
                way = lockstep(golden, mine, inputs, int(whole.nbytes / 4), **more)
                way.name = f"{way.name}, {name}"
                yield way.row(case)


@dataclass
class Tally:
    """``same``: reports that are those of dumps. ``stops``: of ``right`` runs in which none is.

    ``again``: how often a program of those ran, at most.
    """

    cases: int = 0
    same: int = 0
    right: int = 0
    stops: int = 0
    again: int = 0
    remarks: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        figures = self.cases, self.same, self.right, self.stops, self.again
        return f"| {name} | {' | '.join(map(str, figures))} |"

    def compare(self, name: str, both: tuple[Any, Any]) -> None:
        """Compare two programs by dumps and in lockstep."""
        golden, mine = both
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for side, program in (("golden", golden), ("mine", mine)):
                with ld.dump(program.model, name=side, path=folder, **RECORD) as run:
                    program()
                runs.append(run)
            expected = said(ld.compare(*runs, progress=False))
        report = ld.lockstep(golden.model, mine.model, worked(*both), progress=False, **RECORD)
        self.cases += 1
        self.same += said(report) == expected
        if said(report) != expected:
            self.remarks.append(f"{name}: another report: {differing(said(report), expected)}")

    def stop(self, name: str, both: tuple[Any, Any]) -> None:
        """Run two programs, in which nothing is wrong, and stop them where that seems wrong."""
        for mode in ("module", RECORD["mode"]):
            options = {**RECORD, "mode": mode, "stop": "first", "progress": False}
            report = ld.lockstep(both[0].model, both[1].model, worked(*both), **options)
            assert report.lockstep is not None
            self.right += 1
            self.stops += bool(report.lockstep.stopped)
            self.again = max(self.again, *report.lockstep.ran)
            if report.lockstep.stopped:
                self.remarks.append(
                    f"{name}, {mode}: {report.verdict}, stopped after {report.lockstep.stopped}"
                )


def worked(golden: Any, mine: Any) -> Callable[[Any], object]:
    """Return what runs the program of a model."""
    return lambda model: (golden if model is golden.model else mine)()


def differing(now: Any, expected: Any) -> object:
    """Return what of two reports is not the same."""
    if now[:2] != expected[:2]:
        return now[:2], expected[:2]
    rows = zip(now[2], expected[2], strict=False)
    return len(now[2]), len(expected[2]), next((pair for pair in rows if pair[0] != pair[1]), None)


def of_zoo(name: str, seeds: int, only: list[str]) -> Tally:
    tally = Tally()
    for entry in SETS[name]:
        for case in entry.cases(seeds) if not only or entry.number in only else ():
            tally.compare(str(case), (case.golden(), case.mine()[0]))
            if entry.benign:
                tally.stop(str(case), (case.golden(), case.mine()[0]))
            print(f"{tally.cases}: {case} {tally.row('')}", file=sys.stderr, flush=True)
    return tally


def of_ports() -> Tally:
    """Run golden beside each port without a bug. Which port it is is not told: some are held out.

    A test of what is new must not give away how it does on single cases of these.
    """
    tally = Tally()
    for port in PORTS.values():
        try:
            golden = port.golden()
            mine = port.mine(golden)
        except (AssertionError, ImportError) as why:  # its package is not there
            tally.remarks.append(f"left out: {why}")
            continue
        tally.stop("a right port", (golden, mine))
        print(tally.row(""), file=sys.stderr, flush=True)
    return tally


def cases(given: argparse.Namespace) -> None:
    print("| set | cases | same report | right pairs run with `stop` | stopped | runs at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    wanted = [*SETS, "ports"] if given.set == "all" else [given.set]
    remarks = []
    for name in wanted:
        tally = of_ports() if name == "ports" else of_zoo(name, given.seeds, given.only)
        print(tally.row(name), flush=True)
        remarks += tally.remarks
    print("", *remarks, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--set", choices=[*SETS, "ports", "all"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="number of an entry")
    given = parser.parse_args()
    if given.set is not None:
        cases(given)
        return
    print("| mine | way | s | MB of values | golden and mine ran |")
    print("| --- | --- | --- | --- | --- |")
    with torch.no_grad():
        for row in measure(given.layers):
            print(row, flush=True)


if __name__ == "__main__":
    main()
