"""Score the first finding of a comparison on ports that are right, and on ports with one bug.

    python benchmarks/ports/score.py [--set all] [--ports a,b] [--modes modules,functions]
        [--precisions fp32,bf16,fp16] [--weights ordinary,outliers] [--bugs a,b] [--seeds 1]
        [--jobs 1] [--json FILE]

``--set known`` are the ports that the comparison was made with, ``held-out`` and ``fresh`` those
that it was not, ``newest`` and ``latest`` those that were held out until they were scored once: of
these only the table is printed, as they are no longer held out once their cases are read.

Golden is a Hugging Face model, mine an independent implementation with the same weights. Both are
recorded, with weights and values, and compared by `ld.compare` with its defaults. The comparison
is right about a correct port if its verdict is match, within_noise or expected and it has no
finding, or nondeterministic because of a near tie alone. The first finding about a bug is

* exact: it names the innermost recorded module that is wrong. If functions were recorded and the
  bug is in code, it names the changed line instead, or at most six lines with the changed one among
  them, or golden's call that mine leaves out;
* module: it names that module, the one that directly encloses it, or a child of it;
* late: neither, but a later finding is exact;
* wrong: anything else, or no finding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from zoo.entry import PRECISIONS

import llmdebug_nb as ld
from llmdebug_nb.source.lines import Source
from ports.entry import WEIGHTS, Bug, Port, Program
from ports.sets import PORTS, SETS

MODES: dict[str, Any] = {"modules": "module", "functions": ("module", "api")}
RIGHT = ("match", "within_noise", "expected")
NONDETERMINISTIC, NEAR_TIE = "nondeterministic", "near tie"  # a verdict and causes
GRADES = ("exact", "module", "late", "wrong")
Line = tuple[str, int]
REGION = 6  # so many lines may be named if the right one is among them
CORRECT = "correct"


class Group(NamedTuple):
    """Cases with one golden run. ``bugs``: names; `CORRECT` is the port without a bug."""

    port: str
    mode: str
    precision: str
    weights: str
    seed: int
    bugs: tuple[str, ...]


@dataclass
class Mark:
    """How a case went. ``grade``: of a bug. ``right``, ``findings``: of a correct port.

    ``blamed``: the first findings in words. ``answer``: what would have been right.
    """

    port: str
    mode: str
    precision: str
    weights: str
    seed: int
    bug: str
    verdict: str
    grade: str = ""
    right: bool = False
    findings: int = 0
    blamed: list[str] = field(default_factory=list)
    answer: str = ""
    seconds: float = 0.0
    recording: float = 0.0
    failed: str | None = None

    def __str__(self) -> str:
        case = f"{self.port}/{self.bug} {self.mode} {self.precision} {self.weights}"
        return f"{case}{f' seed {self.seed}' if self.seed else ''}"


# -- what a finding names ------------------------------------------------------------------------


class Named(NamedTuple):
    """What a finding names. ``paths``: of its call, in either run.

    ``mine``: the lines of mine's call, as (file, line), from the innermost frame outwards; files by
    their names without folders. ``golden``: the path of golden's call, and the innermost function
    that makes it; "" if it makes none or it is unknown. ``region``: the innermost lines of all of
    mine's calls that the finding names.
    """

    paths: tuple[str, ...]
    mine: tuple[Line, ...]
    golden: tuple[str, str]
    region: frozenset[Line]
    text: str

    @property
    def modules(self) -> list[str]:
        return [path.partition("/")[0] for path in self.paths]


def named(finding: ld.Finding) -> Named:
    """Return what a finding names."""
    sides = [side for side in (finding.golden, finding.mine) if side is not None]
    paths = [finding.path, *map(full_path, sides)]
    lines = () if finding.mine is None else lines_of(finding.mine)
    guilty = [pair.mine for pair in finding.pairs if pair.state == "guilty" and pair.mine]
    where = f" at {lines[0][0]}:{lines[0][1]}" if lines else ""
    text = " ~ ".join(dict.fromkeys(path or "(root)" for path in paths))
    golden = finding.golden
    return Named(
        tuple(dict.fromkeys(paths)),
        lines,
        ("", "")
        if golden is None
        else (full_path(golden), golden.frames[0].function if golden.frames else ""),
        frozenset([*lines[:1], *(line for side in guilty for line in lines_of(side)[:1])]),
        f"{text}{where} [{finding.cause}] {finding.relation} {finding.evidence[:160]}",
    )


def full_path(side: Source) -> str:
    """Return the path of a finding's side with its operator."""
    return f"{side.path}/{side.op}" if "/" not in side.path and "." in side.op else side.path


def lines_of(side: Source) -> tuple[Line, ...]:
    """Return the lines of a finding's side, innermost first."""
    frames = [(frame.file, frame.line) for frame in side.frames] or [(side.file, side.line)]
    return tuple((Path(file).name, line) for file, line in frames if file and line)


# -- grades --------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The bug, with the lines of the changed file that are right (none if it is in weights)."""

    bug: Bug
    file: str
    lines: frozenset[int]

    def __str__(self) -> str:
        bug = self.bug
        line = f"{self.file}:{min(self.lines)} in " if self.lines else ""
        lacks = f", without {' or '.join(bug.golden)}" if bug.golden else ""
        return f"{line}{' or '.join(path or '(root)' for path in bug.modules)}{lacks}"

    def is_line(self, line: Line) -> bool:
        return line[0] == self.file and line[1] in self.lines

    def is_exact(self, seen: Named, mode: str) -> bool:
        """Tell whether a finding names the bug itself."""
        if self.bug.leaves_out(*seen.golden):
            return True
        if mode == "modules" or not self.lines:
            return any(map(self.bug.names_module, seen.modules))
        # the changed line may call a helper: then it is the line of an outer frame
        if any(map(self.is_line, seen.mine)):
            return True
        return len(seen.region) <= REGION and any(map(self.is_line, seen.region))

    def is_module(self, seen: Named) -> bool:
        """Tell whether a finding names the module of the bug, or one right beside it."""
        return any(self.bug.names_module(path) or self.bug.is_near(path) for path in seen.modules)

    def grade(self, findings: Sequence[Named], mode: str) -> str:
        """Return the grade of the first finding."""
        if findings and self.is_exact(findings[0], mode):
            return "exact"
        if findings and self.is_module(findings[0]):
            return "module"
        return "late" if any(self.is_exact(seen, mode) for seen in findings[1:]) else "wrong"


# -- cases ---------------------------------------------------------------------------------------


def record(program: Program, folder: Path, mode: str) -> tuple[ld.Run, float]:
    """Return the run of a program, and the seconds that recording it took."""
    start = time.perf_counter()
    with ld.dump(
        program.model,
        name=folder.name,
        path=folder.parent,
        tokens="all",
        mode=MODES[mode],
        weights=True,
    ) as run:
        program()
    return run, time.perf_counter() - start


def score(group: Group) -> list[Mark]:
    """Record golden once; record and compare each port of a group."""
    port = PORTS[group.port]
    marks = []
    with tempfile.TemporaryDirectory() as folder:
        program = port.golden(group.precision, group.weights, group.seed)
        golden, before = record(program, Path(folder, "golden"), group.mode)
        for name in group.bugs:
            bug = None if name == CORRECT else port.bug(name)
            mine, after = record(port.mine(program, bug), Path(folder, name), group.mode)
            marks.append(mark(group, port, bug, golden, mine))
            marks[-1].recording = before + after
    return marks


def mark(group: Group, port: Port, bug: Bug | None, golden: ld.Run, mine: ld.Run) -> Mark:
    """Compare two runs and grade the first finding."""
    result = Mark(*group[:5], bug.name if bug else CORRECT, "failed")
    start = time.perf_counter()
    seen: list[Named] = []
    tied = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # an error of the search itself
            report = ld.compare(golden, mine, progress=False)
        findings = [
            each
            for each in report.findings
            if each.cause not in (NONDETERMINISTIC, NEAR_TIE) and each.expected is None
        ]
        result.verdict = report.verdict
        tied = any(each.cause == NEAR_TIE for each in report.findings)
        seen = [named(each) for each in findings]
    except Exception:
        result.failed = traceback.format_exc(limit=-2)
    result.seconds = time.perf_counter() - start
    result.findings, result.blamed = len(seen), [each.text for each in seen[:3]]
    if bug is None:
        right = result.verdict in RIGHT or (tied and result.verdict == NONDETERMINISTIC)
        result.right = right and not seen
        return result
    lines = frozenset() if bug.early else bug.lines(port.text)
    answer = Answer(bug, port.file(bug), lines)
    result.grade, result.answer = answer.grade(seen, group.mode), str(answer)
    return result


# -- the table -----------------------------------------------------------------------------------


def cells(name: str, mode: str, marks: Sequence[Mark]) -> list[str]:
    """Return a row: correct ports that are judged right, grades of the bugs, mean seconds."""
    right = [m for m in marks if m.bug == CORRECT]
    bugs = [m for m in marks if m.bug != CORRECT]
    return [
        name,
        mode,
        f"{sum(m.right for m in right)}/{len(right)}",
        str(sum(m.findings for m in right)),
        *(str(sum(m.grade == grade for m in bugs)) for grade in GRADES),
        str(len(bugs)),
        f"{sum(m.seconds for m in marks) / len(marks):.2f}",
        f"{sum(m.recording for m in marks) / len(marks):.2f}",
    ]


def table(marks: Sequence[Mark]) -> str:
    """Return a row for each port and mode, and the totals of each mode, as Markdown."""
    head = ["port", "recorded", "correct right", "their findings", *GRADES, "bugs"]
    head += ["s compare", "s record"]
    rows = [head, ["---"] * len(head)]
    for by in (lambda m: (m.port, m.mode), lambda m: ("**all**", m.mode)):
        for name, mode in dict.fromkeys(map(by, marks)):
            rows.append(cells(name, mode, [m for m in marks if by(m) == (name, mode)]))
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def misses(marks: Iterable[Mark]) -> str:
    """Return a line for each false alarm and each bug that is not exact, and what was right."""
    lines = []
    for m in marks:
        if m.right or m.grade == "exact":
            continue
        blamed = m.failed or (m.blamed[0] if m.blamed else "nothing blamed")
        more = f" ({m.findings} findings)" if m.findings > 1 else ""
        right = f"\n    right: {m.answer}" if m.answer else ""
        lines.append(f"{m.grade or 'alarm'}: {m}: {m.verdict}{more}\n    {blamed}{right}")
    return "\n".join(lines)


# -- the command ---------------------------------------------------------------------------------


def groups(given: argparse.Namespace) -> Iterator[Group]:
    """Yield the cases that the options ask for. Ports that can't run here are named on stderr."""
    for name in given.ports or (PORTS if given.set == "all" else SETS[given.set]):
        port = PORTS[name]
        why = port.missing()
        if why:
            print(f"{name} is left out: {why}", file=sys.stderr)
            continue
        bugs = [CORRECT, *(bug.name for bug in port.bugs)]
        chosen = tuple(bug for bug in bugs if not given.bugs or bug in given.bugs)
        for mode in given.modes:
            for precision in given.precisions:
                for weights in given.weights:
                    for seed in range(given.seeds):
                        if chosen:
                            yield Group(name, mode, precision, weights, seed, chosen)


def run(given: argparse.Namespace) -> list[Mark]:
    """Return the marks of all cases, from so many processes."""
    todo = list(groups(given))
    marks: list[Mark] = []
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        each = pool.map(score, todo) if given.jobs > 1 else map(score, todo)
        for number, some in enumerate(each, 1):
            marks += some
            end = "\n" * (number == len(todo))
            print(f"\r{number} of {len(todo)} groups", end=end, file=sys.stderr, flush=True)
    return marks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(of: Iterable[str]) -> Any:
        allowed = list(of)

        def read(text: str) -> list[str]:
            chosen = text.split(",")
            unknown = [name for name in chosen if allowed and name not in allowed]
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {allowed}")
            return chosen

        return read

    bugs = {bug.name for port in PORTS.values() for bug in port.bugs}
    parser.add_argument("--set", choices=("all", *SETS), default="all")
    parser.add_argument("--ports", type=several(PORTS), default=[])
    parser.add_argument("--modes", type=several(MODES), default=list(MODES))
    parser.add_argument("--precisions", type=several(PRECISIONS), default=["fp32"])
    parser.add_argument("--weights", type=several(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument(
        "--bugs", "--only", type=several([CORRECT, *bugs]), default=[], help=f"'{CORRECT}' is none"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every mark there")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    marks = run(given)
    if not marks:
        raise SystemExit("no port here has such a bug")
    print(f"{table(marks)}\n\n{misses(m for m in marks if m.port in SETS['known'])}")
    if given.json:
        told = json.dumps([asdict(m) for m in marks], indent=1)
        given.json.write_text(told, encoding="utf-8")


if __name__ == "__main__":
    main()
