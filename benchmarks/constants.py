"""Score fixed cases with each judgement constant at half and at twice its value.

    python benchmarks/constants.py [--sets ports,zoo,more] [--constants A,B] [--factors 0.5,2]
        [--every 1] [--recordings FOLDER] [--json FILE]

The cases are a fixed part of the ports and of both zoo sets: right programs and bugs, by modules
and with functions, fp32 and half precision. Each is recorded once, into a folder that is kept, and
compared again with other values of the constants that it reads (`llmdebug_nb/core/constants.py`).
Eight constants are changed at once. Where that changes the answer (verdict, places, lines and
causes), four are, down to one; else none of them is taken to matter there.

Each answer is a line of the JSON file. A command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ports import score as ports_score
from ports.entry import WEIGHTS, Bug
from ports.sets import SETS as PORT_SETS
from zoo import entry as zoo_entry
from zoo import score as zoo_score
from zoo.sets import SETS

import llmdebug_nb as ld
from llmdebug_nb.align import axes
from llmdebug_nb.core import constants

FACTORS = (0.5, 2.0)
WORDS = {0.5: "at half", 2.0: "at twice"}
GRADES = ("exact", "module", "alarm")
MODES = tuple(ports_score.MODES)
PORTS = PORT_SETS["known"]  # the others are held out from work on the comparison
OUT = Path("out", "constants")
AT_ONCE = 8


@dataclass(frozen=True)
class Told:
    """The answer of one comparison. ``grade``: of a bug; "right" or "alarm" of a right program.

    ``factor``: times the default. ``constants``: the ones that were changed at once; with a factor
    of 1.0 the ones that were read. ``says``: verdict, places and causes.
    """

    case: str
    factor: float
    constants: tuple[str, ...]
    grade: str
    says: str


class Case(Protocol):
    """Two programs that are recorded once and compared often."""

    @property
    def name(self) -> str: ...
    def record(self, folder: Path) -> None: ...
    def told(self, golden: ld.Run, mine: ld.Run) -> tuple[str, list[str]]:
        """Return the grade, and the verdict and what is blamed."""
        ...


# -- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PortCase:
    """A port that is right or has a bug."""

    port: str
    mode: str
    precision: str
    weights: str
    bug: Bug | None

    @property
    def name(self) -> str:
        bug = self.bug.name if self.bug else "right"
        return f"ports: {self.port} {bug}, {self.mode} {self.precision} {self.weights}"

    def record(self, folder: Path) -> None:
        port = PORTS[self.port]
        golden = port.golden(self.precision, self.weights)
        ports_score.record(golden, folder / "golden", self.mode)
        ports_score.record(port.mine(golden, self.bug), folder / "mine", self.mode)

    def told(self, golden: ld.Run, mine: ld.Run) -> tuple[str, list[str]]:
        bug = self.bug.name if self.bug else ports_score.CORRECT
        group = ports_score.Group(self.port, self.mode, self.precision, self.weights, 0, (bug,))
        mark = ports_score.mark(group, PORTS[self.port], self.bug, golden, mine)
        grade = mark.grade or ("right" if mark.right else "alarm")
        places = [text.partition("] ")[0] for text in mark.blamed]  # without the evidence
        return grade, [mark.verdict, str(mark.findings), *places]


@dataclass(frozen=True)
class ZooCase:
    """A planted bug or a harmless change. ``of``: the set."""

    of: str
    case: zoo_entry.Case

    @property
    def name(self) -> str:
        return f"{self.of}: {self.case}"

    def record(self, folder: Path) -> None:
        zoo_score.record(self.case.golden(), folder / "golden")
        zoo_score.record(self.case.mine()[0], folder / "mine")

    def told(self, golden: ld.Run, mine: ld.Run) -> tuple[str, list[str]]:
        mark = zoo_score.compared(self.case, self.case.mine()[1], golden, mine, {})
        if mark.benign:
            return ("alarm" if mark.alarm else "right"), mark.blamed
        return ("exact" if mark.exact else "module" if mark.module else "wrong"), mark.blamed


def cases(sets: Sequence[str], every: int = 1) -> list[Case]:
    """Return the cases of some sets, the same each time; of these each n-th.

    Of each port: the right one in bf16, and one bug in fp32; modes and weights take turns. Of each
    zoo set: every second bug and all harmless changes, by turns in the first architecture and
    precision and in the last. Their order is mixed, so that a part of them is a sample.
    """
    found: list[Case] = []
    names = [name for name, port in PORTS.items() if not port.missing()] if "ports" in sets else []
    for i, name in enumerate(names):
        bugs = PORTS[name].bugs
        mode = MODES[i % 4 == 1]  # functions take longer
        found.append(PortCase(name, mode, "bf16", WEIGHTS[i // 2 % 2], None))
        found.append(PortCase(name, MODES[1 - i % 2], "fp32", WEIGHTS[0], bugs[5 * i % len(bugs)]))
    for of in SETS.keys() & set(sets):
        bugs_of = [entry for entry in SETS[of] if not entry.benign][::2]
        harmless = [entry for entry in SETS[of] if entry.benign]
        for i, entry in enumerate([*bugs_of, *harmless]):
            found.append(ZooCase(of, list(entry.cases(1))[-(i % 2)]))
    return sorted(found, key=lambda case: zlib.crc32(case.name.encode()))[::every]


def recorded(case: Case, folder: Path) -> tuple[ld.Run, ld.Run]:
    """Return both runs of a case, recorded if they are not in the folder."""
    place = folder / f"{zlib.crc32(case.name.encode()):08x}"
    done = place / "recorded"
    if not done.exists():
        for name in ("golden", "mine"):
            if (place / name).exists():
                ld.delete_run(place / name)
        case.record(place)
        done.touch()
    return ld.open_run(place / "golden"), ld.open_run(place / "mine")


# -- constants -----------------------------------------------------------------------------------


class _Watched(ModuleType):
    """A module that keeps the names that are read from it."""

    def __getattribute__(self, name: str) -> Any:
        if name.isupper():
            object.__getattribute__(self, "__dict__")["reads"].add(name)
        return super().__getattribute__(name)


@contextmanager
def watched() -> Iterator[set[str]]:
    """Yield the names of constants that are read meanwhile."""
    reads: set[str] = set()
    vars(constants)["reads"] = reads
    constants.__class__ = _Watched
    axes._whole.cache_clear()
    try:
        yield reads
    finally:
        constants.__class__ = ModuleType
        del vars(constants)["reads"]


@contextmanager
def changed(names: Sequence[str], factor: float) -> Iterator[None]:
    """Multiply constants meanwhile; whole numbers stay whole if they can."""
    before = {name: vars(constants)[name] for name in names}
    try:
        for name, usual in before.items():
            value = usual * factor
            whole = isinstance(usual, int) and value == int(value)
            setattr(constants, name, int(value) if whole else value)
        axes._whole.cache_clear()
        yield
    finally:
        vars(constants).update(before)
        axes._whole.cache_clear()


def judgements() -> list[str]:
    """Return the names of the constants that decide judgements, in the order of their file."""
    assert constants.__file__ is not None
    names, judges = [], False
    for line in Path(constants.__file__).read_text(encoding="utf-8").splitlines():
        if line.startswith("# ==="):
            judges = line.startswith("# === judgement")
        elif judges and line[:1].isupper():
            names += line.partition(" = ")[0].split(", ")
    return names


# -- comparisons ---------------------------------------------------------------------------------


Runs = tuple[ld.Run, ld.Run]


def usual(case: Case, runs: Runs) -> Told:
    """Compare a case with the defaults, and see which constants are read."""
    with watched() as reads:
        grade, says = case.told(*runs)
    return Told(case.name, 1.0, tuple(sorted(reads)), grade, " | ".join(says))


def compared(
    case: Case, runs: Runs, default: Told, names: Sequence[str], factor: float
) -> Iterator[Told]:
    """Yield the answers with constants changed: at once if that changes nothing, else each."""
    with changed(names, factor):
        grade, says = case.told(*runs)
    told = Told(case.name, factor, tuple(names), grade, " | ".join(says))
    if len(names) == 1 or (told.grade, told.says) == (default.grade, default.says):
        yield told
        return
    middle = len(names) // 2
    for some in (names[:middle], names[middle:]):
        yield from compared(case, runs, default, some, factor)


def answers(
    case: Case, names: Sequence[str], factors: Sequence[float], folder: Path, done: list[Told]
) -> Iterator[Told]:
    """Yield what is not done of a case: first the answer with the defaults."""
    known = [told for told in done if told.case == case.name]
    missing = {factor: [*names] for factor in factors}
    for told in known:
        if told.factor in missing:
            missing[told.factor] = [n for n in missing[told.factor] if n not in told.constants]
    if known and not any(missing.values()):
        return
    runs = recorded(case, folder)
    default = next((told for told in known if told.factor == 1.0), None)
    if default is None:
        default = usual(case, runs)
        yield default
    for factor, some in missing.items():
        some = [name for name in some if name in default.constants]
        for start in range(0, len(some), AT_ONCE):
            yield from compared(case, runs, default, some[start : start + AT_ONCE], factor)


def run(
    chosen: Sequence[Case],
    names: Sequence[str],
    folder: Path,
    lines: Path,
    factors: Sequence[float] = FACTORS,
) -> list[Told]:
    """Compare all cases with all values; return what is told, from earlier commands too."""
    told: list[Told] = []
    if lines.exists():
        for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines()):
            told.append(Told(**line | {"constants": tuple(line["constants"])}))
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a", encoding="utf-8") as file:
        for number, case in enumerate(chosen, 1):
            for each in answers(case, names, factors, folder, [*told]):
                told.append(each)
                print(json.dumps(asdict(each)), file=file, flush=True)
            print(f"\r{number} of {len(chosen)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    of = {case.name for case in chosen}
    return [each for each in told if each.case in of and each.factor in (1.0, *factors)]


# -- the table -----------------------------------------------------------------------------------


def counted(told: Iterable[Told]) -> str:
    """Return the counts of exact and module answers, and of false alarms."""
    grades = [each.grade for each in told]
    return " / ".join(str(grades.count(grade)) for grade in GRADES)


@dataclass(frozen=True)
class Row:
    """The answers of all cases with one constant at some factors. ``default``: by case."""

    name: str
    default: dict[str, Told]
    found: dict[float, dict[str, Told]]

    def pairs(self) -> Iterator[tuple[float, Told, Told]]:
        """Yield factor, default's answer and this one."""
        for factor, cases in self.found.items():
            for case, told in cases.items():
                yield factor, self.default[case], told

    def readers(self) -> int:
        return sum(self.name in told.constants for told in self.default.values())

    def others(self) -> int:
        return sum(told.says != before.says for _, before, told in self.pairs())


def by_constant(told: Sequence[Told], names: Sequence[str]) -> list[Row]:
    """Return a row a constant; a case has default's answer where nothing was changed."""
    default = {each.case: each for each in told if each.factor == 1.0}
    factors = sorted({each.factor for each in told} - {1.0})
    rows = [Row(name, default, {factor: {**default} for factor in factors}) for name in names]
    for row in rows:
        for each in told:
            if each.factor != 1.0 and row.name in each.constants:
                row.found[each.factor][each.case] = each
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a row for each constant, as Markdown."""
    factors = list(rows[0].found)
    head = ["constant", "value", "read in", "default", *(WORDS.get(f, f"× {f:g}") for f in factors)]
    cells = [[*head, "other answers"], ["---"] * (len(head) + 1)]
    for row in rows:
        each = [counted(told.values()) for told in (row.default, *row.found.values())]
        value = f"{vars(constants)[row.name]:.3g}"
        cells.append([row.name, value, str(row.readers()), *each, str(row.others())])
    return "\n".join(f"|{'|'.join(row)}|" for row in cells)


def changes(rows: Sequence[Row]) -> str:
    """Return a line for each grade that a value changes, then the constants that change nothing."""
    lines = [
        f"* {row.name} × {factor:g}: {told.case}: {before.grade} → {told.grade}"
        for row in rows
        for factor, before, told in row.pairs()
        if told.grade != before.grade
    ]
    same = [row.name for row in rows if row.readers() and not row.others()]
    unread = [row.name for row in rows if not row.readers()]
    lines.append(f"\nChange no answer: {', '.join(same) or 'none'}.")
    lines.append(f"Not read in any case: {', '.join(unread) or 'none'}.")
    return "\n".join(lines)


# -- the command ---------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default=",".join(("ports", *SETS)), help="some of these")
    parser.add_argument("--constants", default="", help="names; all judgement constants if empty")
    parser.add_argument("--factors", default="0.5,2", help="times the value of a constant")
    parser.add_argument("--every", type=int, default=1, help="take each n-th case")
    parser.add_argument("--recordings", type=Path, default=OUT / "recordings")
    parser.add_argument("--json", type=Path, default=OUT / "told.jsonl")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    names = given.constants.split(",") if given.constants else judgements()
    if unknown := [name for name in names if name not in vars(constants)]:
        raise SystemExit(f"no such constant: {', '.join(unknown)}")
    chosen = cases(given.sets.split(","), given.every)
    factors = [float(factor) for factor in given.factors.split(",")]
    rows = by_constant(run(chosen, names, given.recordings, given.json, factors), names)
    print(f"{len(rows[0].default)} cases\n\n{table(rows)}\n\n{changes(rows)}")


if __name__ == "__main__":
    main()
