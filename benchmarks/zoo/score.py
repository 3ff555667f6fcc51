"""Score the findings of a comparison on planted bugs and benign changes, beside three baselines.

    python benchmarks/zoo/score.py [--seeds 3] [--only NAME] [--jobs 1] [--set zoo|more|all]
                                   [--statistics] [--json FILE] [--msprobe PYTHON]

For each case the right and the changed program are recorded (modules, functions, weights, tensors)
and compared by `ld.compare` with its defaults. A bug is an exact hit if the first finding names one
of the places that its entry accepts, a top-3 hit if one of the first three findings does, and a
module hit if the first finding names the module. The step is right if step and phase of the first
finding are. A control is a false alarm if its verdict is diverged or if there is any finding. A bug
whose verdict is match or within_noise is a silent miss.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import llmdebug_nb as ld
from llmdebug_nb.core.records import Site
from zoo import baselines
from zoo.entry import HARMLESS, Answer, Case, Entry, Program, Seen
from zoo.sets import SETS

if TYPE_CHECKING:
    from typing_extensions import Unpack

OURS, MSPROBE = "llmdebug_nb", "msprobe"
RECORD = {"tokens": "all", "mode": ("module", "api"), "weights": True}


@dataclass
class Mark:
    """How a tool did in a case.

    ``blamed``: the verdict, and the first calls it named. Only a control can have an ``alarm``, and
    only a bug the other marks.
    """

    case: str
    entry: str
    benign: bool
    tool: str
    exact: bool = False
    top3: bool = False
    module: bool = False
    step: bool = False
    silent: bool = False
    alarm: bool = False
    seconds: float = 0.0
    recording: float = 0.0
    nbytes: int = 0
    blamed: list[str] = field(default_factory=list)
    failed: str | None = None


class Figures(TypedDict, total=False):
    """What a case took."""

    seconds: float
    recording: float
    nbytes: int
    failed: str | None


def mark(
    case: Case,
    answer: Answer,
    tool: str,
    verdict: str,
    seen: Sequence[Seen],
    **figures: Unpack[Figures],
) -> Mark:
    """Compare a verdict and the calls that are blamed, the worst first, with the right answer."""
    blamed = [
        f"{s.path or '(root)'} step {s.step}{'' if s.phase == 'forward' else ' ' + s.phase}"
        for s in seen[:3]
    ]
    result = Mark(
        str(case),
        f"{case.entry.number} {case.entry.name}",
        case.entry.benign,
        tool,
        blamed=[verdict, *blamed],
        **figures,
    )
    if case.entry.benign:
        result.alarm = verdict not in HARMLESS or bool(seen)
        return result
    result.silent = verdict in HARMLESS
    result.top3 = any(answer.is_exact(s) for s in seen[:3])
    if seen:
        result.exact = answer.is_exact(seen[0])
        result.module, result.step = answer.is_module(seen[0]), answer.is_step(seen[0])
    return result


# -- ours ----------------------------------------------------------------------------------------


def record(program: Program, folder: Path, statistics: bool = False) -> tuple[ld.Run, float]:
    """Return the run of a program, and the seconds that recording it took."""
    options = {**RECORD, "stats_only": statistics}
    start = time.perf_counter()
    with ld.dump(program.model, name=folder.name, path=folder.parent, **options) as run:
        program()
    return run, time.perf_counter() - start


def seen_of(finding: ld.Finding, runs: Sequence[ld.Run]) -> Seen:
    """Return the call of a finding, with its numbers and calling functions on both sides."""
    difference = finding.difference
    if difference is None:
        return Seen(finding.path, finding.step)
    pair = difference.pair
    sides = [
        (run, record.site)
        for run, record in zip(runs, (pair.golden, pair.mine), strict=True)
        if record is not None
    ]
    sides = [(run, site) for run, site in sides if "/" in site.path and site.path == finding.path]
    functions = frozenset(function for run, site in sides for function in called_from(run, site))
    return Seen(
        finding.path,
        finding.step,
        difference.site.phase,
        frozenset(site.call for _, site in sides),
        functions,
    )


def called_from(run: ld.Run, site: Site) -> list[str]:
    """Return the innermost function that called an operator.

    At level api a gradient has no stack of its own; the forward call's counts.
    """
    for phase in (site.phase, "forward"):
        try:
            stack = run.stack(site.path, site.step, site.call, phase, site.generation)
            return [stack[0].rpartition(" ")[2]]
        except ld.errors.TensorLookupError:
            continue
    return []


def score(case: Case, statistics: bool = False) -> list[Mark]:
    """Record and compare both programs of a case; return our mark and those of the baselines.

    ``statistics``: no values are kept, and the baselines, which need them, are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        right, (changed, answer) = case.golden(), case.mine()
        golden, before = record(right, Path(folder, "golden"), statistics)
        mine, after = record(changed, Path(folder, "mine"), statistics)
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        figures = Figures(recording=before + after, nbytes=nbytes)
        marks = [compared(case, answer, golden, mine, figures)]
        for tool, seen in ({} if statistics else baselines.blame(golden, mine)).items():
            verdict, blamed = ("match", []) if seen is None else ("diverged", [seen])
            marks.append(mark(case, answer, tool, verdict, blamed))
    return marks


def compared(case: Case, answer: Answer, golden: ld.Run, mine: ld.Run, figures: Figures) -> Mark:
    """Compare both runs of a case and return our mark."""
    start = time.perf_counter()
    try:
        report = ld.compare(golden, mine, progress=False)
        findings = [each for each in report.findings if each.cause != "nondeterministic"]
        verdict, failed = report.verdict, None
    except Exception:
        findings, verdict, failed = [], "failed", traceback.format_exc(limit=-2)
    figures = Figures(**figures, seconds=time.perf_counter() - start, failed=failed)
    blamed = [seen_of(finding, (golden, mine)) for finding in findings[:3]]
    return mark(case, answer, OURS, verdict, blamed, **figures)


def msprobe(python: Path, cases: Sequence[Case]) -> list[Mark]:
    """Return msprobe's marks from another Python; none, with a message, if it has no msprobe."""
    tried = (
        subprocess.run(
            [str(python), "-c", "import msprobe, transformers"],
            capture_output=True,
            text=True,
            check=False,
        )
        if python.exists()
        else None
    )
    if tried is None or tried.returncode:
        why = "no such file" if tried is None else tried.stderr.strip().rpartition("\n")[2]
        print(f"msprobe is left out: {python}: {why}", file=sys.stderr)
        return []
    asked = json.dumps(
        [[case.entry.number, case.architecture, case.precision, case.seed] for case in cases]
    )
    worker = Path(__file__).with_name("msprobe_worker.py")
    told = subprocess.run(
        [str(python), str(worker)], input=asked, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    marks = []
    for case, said in zip(cases, map(json.loads, told.splitlines()), strict=True):
        place, failed = said.get("blamed"), said.get("failed")
        seen = (
            [
                Seen(
                    **{
                        name: frozenset(x) if isinstance(x, list) else x
                        for name, x in place.items()
                    }
                )
            ]
            if place
            else []
        )
        verdict = "failed" if failed else "diverged" if seen else "match"
        figures = {
            "failed": failed,
            "recording": said["recording"],
            "seconds": said["seconds"],
            "nbytes": said["nbytes"],
        }
        marks.append(mark(case, case.mine()[1], MSPROBE, verdict, seen, **figures))
    return marks


# -- the table -----------------------------------------------------------------------------------

COLUMNS = (
    "",
    "cases",
    "exact",
    "top-3",
    "module",
    "step",
    "silent",
    "false alarms",
    "s compare",
    "s record",
    "MB",
)


def line(name: str, marks: Sequence[Mark]) -> tuple[str, ...]:
    """Return a line of the table: hits, alarms, and mean seconds and bytes of a case."""
    bugs, controls = [m for m in marks if not m.benign], [m for m in marks if m.benign]

    def hits(of: Sequence[Mark], what: str) -> str:
        return f"{sum(getattr(m, what) for m in of)}/{len(of)}" if of else ""

    def mean(what: str, unit: float = 1.0) -> str:
        value = sum(getattr(m, what) for m in marks) / len(marks) / unit
        return f"{value:.2f}" if value else ""

    counts = [hits(bugs, what) for what in ("exact", "top3", "module", "step", "silent")]
    return (
        name,
        str(len(marks)),
        *counts,
        hits(controls, "alarm"),
        mean("seconds"),
        mean("recording"),
        mean("nbytes", 1e6),
    )


def table(marks: Sequence[Mark]) -> str:
    """Return our lines by entry, and the totals of each tool, as Markdown."""
    ours = [m for m in marks if m.tool == OURS]
    lines = [
        line(entry, [m for m in ours if m.entry == entry])
        for entry in dict.fromkeys(m.entry for m in ours)
    ]
    for tool in dict.fromkeys(m.tool for m in marks):
        lines.append(line(f"**{tool}**", [m for m in marks if m.tool == tool]))
    return "\n".join(f"|{'|'.join(cells)}|" for cells in (COLUMNS, ["---"] * len(COLUMNS), *lines))


def misses(marks: Sequence[Mark]) -> str:
    """Return our false alarms and misses (no exact hit in the right step), with the calls."""
    ours = [m for m in marks if m.tool == OURS]
    lines = [
        f"{m.case}: {' | '.join(m.blamed)}{' ' + m.failed if m.failed else ''}"
        for m in ours
        if m.alarm or not (m.benign or (m.exact and m.step))
    ]
    return "\n".join(lines)


def chosen(entries: Iterable[Entry], given: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for: by number, name, architecture or precision."""
    cases = [
        case
        for entry in entries
        if not given.only
        or any(name == entry.number or name.lower() in entry.name.lower() for name in given.only)
        for case in entry.cases(given.seeds)
        if not given.on or {case.architecture, case.precision} & set(given.on)
    ]
    if given.quick:
        return list({(case.entry.number, case.seed): case for case in reversed(cases)}.values())[
            ::-1
        ]
    return cases


def run(cases: Sequence[Case], jobs: int, statistics: bool = False) -> list[Mark]:
    """Return the marks of all cases, from so many processes."""
    marks: list[Mark] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        work = partial(score, statistics=statistics)
        each = pool.map(work, cases) if jobs > 1 else map(work, cases)
        for number, some in enumerate(each, 1):
            marks += some
            print(
                f"\r{number} of {len(cases)} cases",
                end="\n" * (number == len(cases)),
                file=sys.stderr,
                flush=True,
            )
    return marks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", choices=[*SETS, "all"], default="zoo")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="number of an entry, or text in its name; repeatable",
    )
    parser.add_argument(
        "--on", action="append", default=[], help="architecture or precision; repeatable"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one architecture and one precision an entry"
    )
    parser.add_argument("--statistics", action="store_true", help="record statistics alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every mark there")
    parser.add_argument(
        "--msprobe", type=Path, help="a Python with mindstudio-probe, torch and transformers"
    )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    cases = {
        name: chosen(entries, given) for name, entries in SETS.items() if given.set in (name, "all")
    }
    if not any(cases.values()):
        raise SystemExit("no entry is called that: " + ", ".join(given.only + given.on))
    marks = {name: run(some, given.jobs, given.statistics) for name, some in cases.items() if some}
    for name, some in marks.items():
        if given.msprobe:
            some += msprobe(given.msprobe, cases[name])
        print(f"## {name}, {given.seeds} seed(s)\n\n{table(some)}\n\n{misses(some)}\n")
    if given.json:
        given.json.write_text(
            json.dumps([asdict(m) for some in marks.values() for m in some], indent=1),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
