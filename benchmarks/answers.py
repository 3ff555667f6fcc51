"""Ask the comparison about every case there is, and print which answers changed since the freeze.

    python benchmarks/answers.py [--jobs 2] [--only PATTERN] [--sample N] [--cases FOLDER]
        [--freeze] [--rules]

``answers.json`` holds the frozen answers, a case a line: the verdict, the coverage, the counts of
the rows' verdicts, and the first three findings. The cases are

* engines: dumps of real engines and runs of their fakes, see ``engines/dumps.py``;
* programs: small programs in ``../shared/cases``, which not every checkout has beside it;
* zoo: every entry, the controls too, with one seed;
* ports: each port, right and with each bug, by modules and by functions, in fp32; in bf16 the right
  ports and every third bug, as these take half of the time;
* real: right programs of a trained model, and bugs in them, see ``real/score.py``.

What can't run here is said. All of it is some two hours of one processor, of which the ports by
functions take most; ``--sample 8`` takes a quarter of an hour. ``about`` in ``answers.json`` says
how many cases are frozen: all engines and programs and each eighth case of the others at least.

Answers are appended to ``out/answers/answers.jsonl`` as they come:
what was stopped goes on, and only after a change to the package's judgement, or to the cases, is
all asked again. Recordings are not kept, as they take a tenth of the time.

A change is printed as ``case: field: old -> new``. Its kind is the field; ``figures`` where only
digits of a relation differ, ``moved`` where a line has another number and the same text. The grades
of ports and zoo are those of ``ports/score.py``: exact, module, late, wrong; right and alarm for
what has no bug. ``--rules`` tells too which named rules were used more or less often.
``--freeze`` writes the answers; the others that were frozen stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package
import torch
import transformers
from answering import Answer, answer, collected, failed
from ports import score as ports
from ports.sets import PORTS
from real import checkpoint
from real import score as real
from zoo import score as zoo
from zoo.entry import Case
from zoo.sets import SETS as ZOO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FROZEN = HERE / "answers.json"
JOURNAL = ROOT / "out" / "answers" / "answers.jsonl"
PROGRAMS = ROOT.parent / "shared" / "cases"
ABOUT = "about"  # of the frozen answers
LIMIT = 600.0  # seconds a case
EVERY = 3  # so many bugs, of which one is asked in bf16
# parts of the package that no answer depends on
TOLD = ("cli", "notebook", "show")
ENGINES = "vLLM and llama.cpp run in environments of their own (make test-engines)"
Answers = dict[str, Answer]
Asked = tuple[str, Callable[[], Answer]]


# -- cases ---------------------------------------------------------------------------------------


class Task(NamedTuple):
    """Cases that one process answers, as ``name/case`` each."""

    name: str
    cases: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    def full(self) -> list[str]:
        return [f"{self.name}/{case}" for case in self.cases]


def ports_tasks(folder: Path) -> Iterator[Task]:
    """Yield first what is asked of each port in each way, then the other bugs."""
    here = {name: port for name, port in PORTS.items() if not port.missing()}
    for precision, mode in product(("fp32", "bf16"), ports.MODES):
        for name, port in here.items():
            few = [bug.name for bug in port.bugs][::EVERY]
            yield Task(f"ports/{name}/{mode}/{precision}", (ports.CORRECT, *few))
    for mode, (name, port) in product(ports.MODES, here.items()):
        more = [bug.name for at, bug in enumerate(port.bugs) if at % EVERY]
        yield Task(f"ports/{name}/{mode}/fp32", tuple(more))


def ports_asked(task: Task) -> Iterator[Asked]:
    """Record golden once, and each of its ports; see `ports.score`."""
    _, name, mode, precision = task.name.split("/")
    group = ports.Group(name, mode, precision, "ordinary", 0, task.cases)
    port = PORTS[name]
    program = port.golden(precision)
    with tempfile.TemporaryDirectory() as folder:
        golden, _ = ports.record(program, Path(folder, "golden"), mode)
        for case in task.cases:
            bug = None if case == ports.CORRECT else port.bug(case)
            recorded = cache(partial(ports.record, port.mine(program, bug), Path(folder, case)))

            def marked(bug: Any = bug, recorded: Any = recorded) -> Answer:
                with collected() as answers:
                    mark = ports.mark(group, port, bug, golden, recorded(mode)[0])
                return answers[0] | {"grade": mark.grade or ("right" if mark.right else "alarm")}

            yield case, marked


def zoo_tasks(folder: Path) -> Iterator[Task]:
    for entries in ZOO.values():
        for entry in entries:
            name = f"zoo/{entry.number} {entry.name.replace('/', ' or ')}"
            yield Task(name, tuple(map(zoo_name, entry.cases(1))))


def zoo_name(case: Case) -> str:
    return f"{case.architecture}/{case.precision}"


def zoo_asked(task: Task) -> Iterator[Asked]:
    """Record both programs of each case; see `zoo.score`."""
    number = task.name.partition("/")[2].partition(" ")[0]
    entry = next(each for entries in ZOO.values() for each in entries if each.number == number)
    for case in entry.cases(1):
        if zoo_name(case) not in task.cases:
            continue

        with tempfile.TemporaryDirectory() as folder:
            recorded = cache(partial(zoo_recorded, case, Path(folder)))

            def marked(case: Case = case, recorded: Any = recorded) -> Answer:
                right, golden, mine = recorded()
                with collected() as answers:
                    mark = zoo.compared(case, right, golden, mine, {})
                return answers[0] | {"grade": zoo_grade(mark)}

            yield zoo_name(case), marked


def zoo_recorded(case: Case, folder: Path) -> tuple[zoo.Answer, Any, Any]:
    """Return the right answer, and the runs of golden and of mine."""
    (program, right), base = case.mine(), case.golden()
    golden, mine = zoo.record(base, folder / "golden"), zoo.record(program, folder / "mine")
    return right, golden[0], mine[0]


def zoo_grade(mark: zoo.Mark) -> str:
    if mark.benign:
        return "alarm" if mark.alarm else "right"
    if mark.exact or mark.module:
        return "exact" if mark.exact else "module"
    return "late" if mark.top3 else "wrong"


def real_tasks(folder: Path) -> Iterator[Task]:
    """Yield what `real.score` asks by default, as a case of a precision and a mode each."""
    cases = () if checkpoint.missing() else real.cases(tuple(real.MODES), (), real.BUGS, False)
    named: dict[str, list[str]] = {}
    for case in cases:
        named.setdefault(f"real/{case.mode}/{case.precision}", []).append(case.name)
    for name, some in named.items():
        yield Task(name, tuple(some))


@cache
def real_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder of this process: others record under the same names."""
    return tempfile.TemporaryDirectory()


def real_asked(task: Task) -> Iterator[Asked]:
    """Record golden once, and each of its programs; see `real.score`."""
    real.OUT = Path(real_folder().name)
    _, mode, precision = task.name.split("/")
    for name in task.cases:
        program, _, bug = name.partition("+")
        case = real.Case(program, bug, precision, mode)
        recorded = cache(partial(real.recorded, case))

        def marked(case: real.Case = case, recorded: Any = recorded) -> Answer:
            with collected() as answers:
                mark = real.compared(case, *recorded(), real.PLANTED.get(case.bug))
            return answers[0] | {"grade": mark.grade}

        yield name, marked


def engines_tasks(folder: Path) -> Iterator[Task]:
    from engines.dumps import PAIRS

    yield Task("engines", tuple(PAIRS))


def engines_asked(task: Task) -> Iterator[Asked]:
    from engines.dumps import PAIRS

    import llmdebug_nb as ld

    for case in task.cases:
        with tempfile.TemporaryDirectory() as folder:
            recorded = cache(partial(PAIRS[case], Path(folder)))

            def compared(recorded: Any = recorded) -> Answer:
                return answer(ld.compare(*recorded(), progress=False))

            yield case, compared


def programs_tasks(folder: Path) -> Iterator[Task]:
    """Yield the programs that compare; the others are no cases."""
    for program in sorted(folder.rglob("*.py")):
        if ".compare(" in program.read_text(encoding="utf-8"):
            name = program.relative_to(folder).with_suffix("").as_posix()
            yield Task(f"programs/{name}", (str(program),))


def programs_asked(task: Task) -> Iterator[Asked]:
    """Run a program in an empty folder."""
    (program,) = task.cases
    command = [sys.executable, str(HERE / "answering.py"), program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        target = Path(other, "told.json")

        def ran() -> Answer:
            subprocess.run(
                [*command, str(target)], cwd=folder, env=environment, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            found: Answer = json.loads(target.read_text(encoding="utf-8"))
            return found

        yield "", ran


class _Late(BaseException):
    """Passes what catches every exception."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def stop(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late:
        raise TimeoutError(f"{seconds:g} s have passed") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(what: Callable[[], Answer]) -> Answer:
    try:
        with limited(LIMIT):
            return what()
    except Exception as error:
        return failed(error)


class Kind(NamedTuple):
    """Cases of a kind. ``sources``: what they are made of, below ``benchmarks`` and ``tests``.

    ``asked``: each case with a function that compares it, and may be called again.
    """

    tasks: Callable[[Path], Iterator[Task]]
    asked: Callable[[Task], Iterator[Asked]]
    sources: tuple[str, ...]


KINDS = {
    "engines": Kind(engines_tasks, engines_asked, ("engines/dumps.py", "../tests/fake_*.py")),
    "programs": Kind(programs_tasks, programs_asked, ()),
    "zoo": Kind(zoo_tasks, zoo_asked, ("zoo/*.py",)),
    "ports": Kind(ports_tasks, ports_asked, ("ports/*.py", "ports/code/**/*", "zoo/*.py")),
    "real": Kind(real_tasks, real_asked, ("real/*.py", "ports/score.py")),
}


def left_out(programs: Path) -> list[str]:
    """Say what can't be asked here, and why."""
    said = [f"ports/{name}: {why}" for name, port in PORTS.items() if (why := port.missing())]
    if not programs.is_dir():
        said.append("programs: there is no folder of them; --cases names one")
    if why := checkpoint.missing():
        said.append(f"real: {why}")
    return [f"engines: {ENGINES}; their recorded dumps stand in", *said]


# -- what was answered ---------------------------------------------------------------------------


@cache
def stamp(kind: str) -> str:
    """Return a hash of all that the answers to a kind of cases depend on."""
    package = ROOT / "llmdebug_nb"
    files = [each for end in ("py", "c", "h") for each in package.rglob(f"*.{end}")]
    files = [each for each in files if each.relative_to(package).parts[0] not in TOLD]
    files += [each for glob in KINDS[kind].sources for each in HERE.glob(glob) if each.is_file()]
    files += [HERE / "answering.py"]
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for file in sorted(each for each in files if "__pycache__" not in each.parts):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Journal(NamedTuple):
    """The file of all answers, a line each, with the stamp of what they depend on."""

    path: Path

    def add(self, case: str, stamp: str, found: Answer, seconds: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"case": case, "stamp": stamp, "seconds": round(seconds, 2), "answer": found}
        with self.path.open("ab", buffering=0) as file:  # at once: several processes write
            file.write((json.dumps(row) + "\n").encode())

    def read(self, stamps: Callable[[str], str]) -> Answers:
        """Return the answers that are still good. A line that was cut short is none."""
        found: Answers = {}
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["stamp"] == stamps(row["case"].partition("/")[0]):
                found[row["case"]] = row["answer"]
        return found


def spent() -> float:
    """Return the seconds of a processor that this process and those that it ran have taken."""
    return sum(os.times()[:4])


def work(task: Task, journal: Journal) -> Task:
    """Answer the cases of a task, each into the journal as soon as it is known."""
    torch.set_num_threads(1)
    left = list(task.cases)
    start = spent()

    def add(case: str, found: Answer) -> None:
        nonlocal start
        name = task.name if task.kind == "programs" else f"{task.name}/{case}"
        journal.add(name, stamp(task.kind), found, spent() - start)
        start = spent()

    try:
        for case, ask in KINDS[task.kind].asked(task):
            add(case, tried(ask))
            left = left[1:]
    except Exception as error:  # golden itself can't be recorded
        for case in left:
            add(case, failed(error))
    return task


def remaining(tasks: Iterable[Task], wanted: Iterable[str], known: Answers) -> list[Task]:
    """Return the tasks with the cases that are wanted and not answered."""
    todo = set(wanted) - set(known)
    left = []
    for task in tasks:
        if task.kind == "programs":
            left += [task] if task.name in todo else []
        elif cases := tuple(case for case in task.cases if f"{task.name}/{case}" in todo):
            left.append(task._replace(cases=cases))
    return left


def run(tasks: Sequence[Task], journal: Journal, jobs: int) -> None:
    """Answer all tasks, from so many processes."""
    total, done, start = sum(len(task.cases) for task in tasks), 0, time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for each in as_completed([pool.submit(work, task, journal) for task in tasks]):
            done += len(each.result().cases)
            took = time.perf_counter() - start
            told = f"{done} of {total} cases, {took / 60:.1f} min, {each.result().name}"
            print(told, file=sys.stderr, flush=True)


# -- what changed --------------------------------------------------------------------------------


class Change(NamedTuple):
    """A field of an answer that is another one now. ``kind``: the field, or how little it means."""

    case: str
    field: str
    old: object
    new: object
    kind: str

    def __str__(self) -> str:
        return f"{self.case}: {self.field}: {self.old} -> {self.new}"


NOTHING = "-"


def fields(found: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of an answer with its name, those of findings by their number."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from fields(value, f"{name} {key}".strip())
    elif isinstance(found, list):
        for number, value in enumerate(found, 1):
            yield from fields(value, f"{name.removesuffix('s')} {number}")
    else:
        yield name, found


def changes(case: str, old: Answer, new: Answer, rules: bool = False) -> list[Change]:
    """Return the fields of an answer that changed. ``rules``: those of rules, too."""
    before, after = dict(fields(old)), dict(fields(new))
    found = []
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name, NOTHING), after.get(name, NOTHING)
        words = name.split()
        if a == b or words[-1] == "code" or ("rules" in words and not rules):
            continue
        kind = next((word for word in words if word in ("coverage", "rows", "rules")), words[-1])
        if kind == "relation" and without_figures(a) == without_figures(b):
            kind = "figures"
        code = name.removesuffix("line") + "code"
        if kind == "line" and before.get(code) and before[code] == after.get(code):
            kind = "moved"
        found.append(Change(case, name, a, b, kind))
    return found


def without_figures(text: object) -> str:
    return re.sub(r"\d+", "0", str(text))


def tally(title: str, old: Iterable[object], new: Iterable[object]) -> str:
    """Return counts of what was and what is, where both differ as ``old -> new``."""
    before, after = Counter(old), Counter(new)
    counts = [
        f"{name} {before[name]}" + (f" -> {after[name]}" if before[name] != after[name] else "")
        for name in sorted({*before, *after}, key=str)
    ]
    return f"{title}: {', '.join(counts) or 'none'}"


def grade(found: Answer) -> object:
    return found.get("grade", "failed")


def first_cause(found: Answer) -> object:
    return found["findings"][0]["cause"] if found.get("findings") else "nothing"


def summary(frozen: Answers, now: Answers, rules: bool = False) -> str:
    """Return the changes, a line each, and what they come to."""
    both = [case for case in sorted(now) if case in frozen]
    found = [each for case in both for each in changes(case, frozen[case], now[case], rules)]
    touched = {each.case for each in found}
    lines = [*map(str, found), *(f"{case}: is new" for case in sorted(set(now) - set(frozen)))]
    lines += [
        f"{len(now)} cases: {len(both) - len(touched)} same, {len(touched)} changed,"
        f" {len(now) - len(both)} new; {len(frozen) - len(both)} frozen ones were not asked",
    ]
    for kind, count in Counter(each.kind for each in found).most_common():
        cases = len({each.case for each in found if each.kind == kind})
        lines.append(f"  {kind}: {count} in {cases} cases")
    for kind in ("zoo", "ports", "real"):
        of = [case for case in both if case.startswith(kind)]
        for what, tell in (("grades", grade), ("causes", first_cause)):
            was, now_is = ([tell(each[case]) for case in of] for each in (frozen, now))
            lines += [tally(f"{kind}, {what}", was, now_is)] if of else []
    return "\n".join(lines)


# -- the frozen answers --------------------------------------------------------------------------


def thaw(path: Path) -> tuple[Answers, Answer]:
    """Return the frozen answers, and what they say of themselves."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = found.pop(ABOUT, {})
    return found, about


def freeze(path: Path, answers: Answers, about: Answer) -> None:
    rows = {ABOUT: about, **dict(sorted(answers.items()))}
    lines = [
        f"{json.dumps(case, ensure_ascii=False)}: "
        f"{json.dumps(found, sort_keys=True, ensure_ascii=False)}"
        for case, found in rows.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def environment() -> Answer:
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


# -- the command ---------------------------------------------------------------------------------


def chosen(cases: Iterable[str], only: Sequence[str], sample: int) -> list[str]:
    """Return each so many-th of the cases that hold a text, or fit a glob."""
    fitting = [
        case
        for case in sorted(cases)
        if not only or any(text in case or fnmatchcase(case, text) for text in only)
    ]
    return fitting[::sample]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes; 0 asks nothing, and tells what is known"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="text in a case, or a glob; repeatable"
    )
    parser.add_argument("--sample", type=int, default=1, help="only each so many-th case")
    parser.add_argument("--cases", type=Path, default=PROGRAMS, help="the folder of programs")
    parser.add_argument("--freeze", action="store_true", help="write the answers")
    parser.add_argument("--rules", action="store_true", help="tell changes of named rules, too")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    tasks = [task for kind in KINDS.values() for task in kind.tasks(given.cases.resolve())]
    names = [
        case for task in tasks for case in ([task.name] if task.kind == "programs" else task.full())
    ]
    wanted = chosen(names, given.only, given.sample)
    journal = Journal(JOURNAL)
    if given.jobs:
        run(remaining(tasks, wanted, journal.read(stamp)), journal, given.jobs)
    known = journal.read(stamp)
    now = {case: known[case] for case in wanted if case in known}
    frozen, about = thaw(FROZEN)
    print("\n".join(f"left out: {each}" for each in left_out(given.cases)))
    here = environment()
    if about and any(about.get(name) != value for name, value in here.items()):
        print(f"frozen with {about}, asked with {here}")
    print(summary(frozen, now, given.rules))
    if given.freeze:
        kept = (frozen if len(now) < len(names) else {}) | now
        here["cases"] = f"{len(kept)} of {len(names)}"
        freeze(FROZEN, kept, here | {"left out": left_out(given.cases)})


if __name__ == "__main__":
    main()
