"""Score the comparison on a trained model: right programs, and bugs alone and in other programs.

    python benchmarks/real/score.py [--modules] [--functions] [--only eager,sdpa+gelu,*+gelu]
        [--dtype fp32,bf16,fp16] [--all] [--unseen] [--json FILE]

Golden is the model with PyTorch's attention; mine another right program, or such a program with one
bug. Both are recorded and compared by `ld.compare` with its defaults. A case is ``program`` or
``program+bug``; ``--only`` takes names and globs. It is asked by modules and with functions unless
an option says which. With functions a case takes a minute: a bug is put into one program, the next
bug into another one; ``--all`` puts each into all.

A right program is judged right if the verdict is match, within_noise or expected, and nothing is
found. Grades of bugs are those of ``ports/score.py``: exact, module, late, wrong.

Answers are written to a file as they come, ``out/real/marks.jsonl`` by default: what was stopped
goes on, until the package changes. ``--unseen`` asks about bugs that who changes the comparison
must not read, and prints their totals alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from ports.score import GRADES, MODES, NEAR_TIE, NONDETERMINISTIC, RIGHT, Answer, Named, named
from zoo.entry import PRECISIONS

import llmdebug_nb as ld
from real import checkpoint
from real.bugs import BUGS, Bug
from real.programs import CONTROLS, REWRITES, STEPS, Control, Work, run
from real.unseen import UNSEEN

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "real"
DEFAULT = ("fp32", "bf16", "fp16")
PROGRAMS = {control.name: control for control in CONTROLS}
PLANTED = {bug.name: bug for bug in (*BUGS, *UNSEEN)}


class Case(NamedTuple):
    """A right program, or one with a bug."""

    program: str
    bug: str
    precision: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.program}+{self.bug}" if self.bug else self.program

    def __str__(self) -> str:
        return f"{self.name} {self.precision} {self.mode}"


@dataclass
class Mark:
    """How a case went; see `ports.score.Mark`. ``seconds``: of a processor, to compare."""

    case: Case
    verdict: str = "failed"
    grade: str = ""
    findings: int = 0
    blamed: list[str] = field(default_factory=list)
    answer: str = ""
    seconds: float = 0.0
    failed: str | None = None


class Right(Answer):
    """The right answer: a line of a bug's code, or a call that takes its setting, or a module."""

    def is_exact(self, seen: Named, mode: str) -> bool:
        if self.bug.leaves_out(*seen.golden) or any(map(self.bug.leaves_out, seen.paths)):
            return True
        if mode == "functions" and self.bug.golden and not self.lines:
            return False
        return super().is_exact(seen, mode)


# -- one case --------------------------------------------------------------------------------------


def forget(name: str) -> None:
    shutil.rmtree(OUT / name, ignore_errors=True)


def record(control: Control, model: Any, name: str, mode: str, **options: Any) -> ld.Run:
    """Record a program. Of compiled code, graph says what is recorded."""
    forget(name)
    given = {"graph": "both"} if control.compiled else {"mode": MODES[mode]}
    with ld.dump(model, name=name, path=OUT, tokens=f"0-{STEPS - 1}", **given, **options) as made:
        run(control, model)
    return made


@cache
def golden(work: Work, dtype: torch.dtype, mode: str, weights: bool) -> ld.Run:
    """Return the run of the model as it is, recorded once."""
    kept = "-weights" if weights else ""
    name = f"golden-{work.__name__}-{str(dtype).removeprefix('torch.')}-{mode}{kept}"
    control = Control("golden", work=work)
    return record(control, original(dtype), name, mode, weights=weights)


@cache
def original(dtype: torch.dtype) -> Any:
    """Return the model as it is. It stays, as it does in a notebook: the comparison may ask it."""
    return checkpoint.fresh(dtype)


def recorded(case: Case) -> tuple[ld.Run, ld.Run]:
    """Return the runs of golden and of mine."""
    control, bug = PROGRAMS[case.program], PLANTED.get(case.bug)
    options = bug.options if bug else {}
    dtypes = PRECISIONS[case.precision]
    base = golden(control.golden, dtypes[0], case.mode, bool(options))
    program = control.made(checkpoint.fresh(dtypes[1]))
    if bug:
        bug.plant(program)
    name = f"mine-{case.precision}-{case.mode}"
    return base, record(control, program, name, case.mode, **options)


def ask(case: Case) -> Mark:
    """Record a case, compare it, and grade the first finding."""
    bug = PLANTED.get(case.bug)
    mark = compared(case, *recorded(case), bug)
    return replace(mark, blamed=[], answer="") if bug in UNSEEN else mark


def compared(case: Case, base: ld.Run, mine: ld.Run, bug: Bug | None) -> Mark:
    """Compare two runs, and grade the first finding."""
    mark = Mark(case)
    start = spent()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # an error of the search itself
            report = ld.compare(base, mine, progress=False)
    except Exception:
        grade = "wrong" if bug else "alarm"
        told = traceback.format_exc(limit=-2)
        return replace(mark, grade=grade, failed=told, seconds=spent() - start)
    return graded(replace(mark, seconds=spent() - start), bug, report)


def graded(mark: Mark, bug: Bug | None, report: ld.Report) -> Mark:
    """Return a mark with what a report says, and how right that is."""
    tied = any(each.cause == NEAR_TIE for each in report.findings)
    seen = [
        named(each)
        for each in report.findings
        if each.cause not in (NONDETERMINISTIC, NEAR_TIE) and each.expected is None
    ]
    mark = replace(
        mark, verdict=report.verdict, findings=len(seen), blamed=[each.text for each in seen[:3]]
    )
    if bug is None:
        right = report.verdict in RIGHT or (tied and report.verdict == NONDETERMINISTIC)
        return replace(mark, grade="alarm" if seen or not right else "right")
    answer = Right(bug.place, bug.file, bug.lines())
    return replace(mark, grade=answer.grade(seen, mark.case.mode), answer=str(answer))


def spent() -> float:
    """Return the seconds of a processor that this process and those that it ran have taken."""
    return sum(os.times()[:4])


# -- all cases -------------------------------------------------------------------------------------


def cases(
    modes: Sequence[str], precisions: Sequence[str], planted: Sequence[Bug], full: bool
) -> Iterator[Case]:
    """Yield right programs, then bugs. ``precisions``: by default bugs are in fp32 alone."""
    for mode, precision in product(modes, precisions or DEFAULT):
        for control in CONTROLS:
            if precision == "fp32":
                asked = control.name != "sdpa" and (full or mode == "modules" or not control.slow)
            else:
                quick = mode == "modules" or control.name == "sdpa"
                asked = not control.slow and (full or quick or bool(precisions))
            if asked:
                yield Case(control.name, "", precision, mode)
    for mode, precision in product(modes, precisions or ("fp32",)):
        for (at, control), (number, bug) in product(enumerate(REWRITES), enumerate(planted)):
            chosen = full or mode == "modules" or number % len(REWRITES) == at
            if chosen and (precision == "fp32" or not bug.wide):
                yield Case(control.name, bug.name, precision, mode)


@cache
def stamp() -> str:
    """Return a hash of all code that answers depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(ld.__file__).parent
    files = [*package.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def known(path: Path) -> dict[Case, Mark]:
    """Return the answers of a file that are still good. A line that was cut short is none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.pop("stamp") == stamp():
            case = Case(*row.pop("case"))
            found[case] = Mark(case, **row)
    return found


def answered(todo: Sequence[Case], path: Path) -> list[Mark]:
    """Return the marks of cases: those of a file, and the others, which are added to it."""
    marks = known(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    left = [case for case in todo if case not in marks]
    for number, case in enumerate(left, 1):
        mark = marks[case] = ask(case)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(mark) | {"stamp": stamp()}) + "\n")
        print(f"{number} of {len(left)}", file=sys.stderr, flush=True)
    return [marks[case] for case in todo]


# -- the tables ------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in lines)


def listed(marks: Iterable[Mark]) -> str:
    """Return a row for each case. The first finding is told where it is not the right one."""
    head = ["case", "precision", "recorded", "verdict", "grade", "findings", "CPU s", "told first"]
    rows = []
    for m in marks:
        told = "" if m.grade == "exact" else short(m)
        row = [m.case.name, m.case.precision, m.case.mode, m.verdict, m.grade, m.findings]
        rows.append([*row, f"{m.seconds:.1f}", told])
    return table(head, rows)


def short(mark: Mark) -> str:
    told = mark.failed or (mark.blamed[0] if mark.blamed else "")
    return told.strip().splitlines()[-1].replace("|", "/")[:160] if told else ""


def totals(marks: Sequence[Mark]) -> str:
    """Return a row for each program and mode: how many bugs have which grade."""
    head = ["program", "recorded", "bugs", *GRADES, "alone", "CPU s"]
    rows = []
    for by in (lambda m: (m.case.program, m.case.mode), lambda m: ("**all**", m.case.mode)):
        for key in dict.fromkeys(map(by, marks)):
            some = [m for m in marks if by(m) == key]
            grades = [sum(m.grade == grade for m in some) for grade in GRADES]
            alone = sum(m.findings == 1 for m in some)
            seconds = sum(m.seconds for m in some) / len(some)
            rows.append([*key, len(some), *grades, alone, f"{seconds:.1f}"])
    return table(head, rows)


def tell(marks: Sequence[Mark]) -> None:
    """Print the tables."""
    right = [mark for mark in marks if not mark.case.bug]
    wrong = [mark for mark in marks if mark.case.bug]
    if right:
        print(listed(right), end="\n\n")
    if wrong:
        print(listed(wrong), end="\n\n")
        print(totals(wrong))


# -- the command -----------------------------------------------------------------------------------


def precisions(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PRECISIONS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {[*PRECISIONS]}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", action="store_true", help="recorded by modules alone")
    parser.add_argument("--functions", action="store_true", help="recorded with functions")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["*"])
    parser.add_argument("--dtype", type=precisions, default=[], help="several with commas")
    parser.add_argument("--all", action="store_true", help="with functions, bugs in each program")
    parser.add_argument("--unseen", action="store_true", help="the bugs that nobody looks at")
    parser.add_argument("--json", type=Path, default=OUT / "marks.jsonl", help="the answers")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    if why := checkpoint.missing():
        raise SystemExit(why)
    modes = [mode for mode in MODES if getattr(given, mode)] or list(MODES)
    todo = [
        case
        for case in cases(modes, given.dtype, UNSEEN if given.unseen else BUGS, given.all)
        if any(fnmatchcase(case.name, glob) for glob in given.only)
    ]
    if not todo:
        raise SystemExit("no case has such a name")
    if given.unseen:
        print(totals(answered([case for case in todo if case.bug], given.json)))
        return
    tell(answered(todo, given.json))


if __name__ == "__main__":
    main()
