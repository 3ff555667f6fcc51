"""Mutated dumps, documents and messages go through everything that reads them.

`make fuzz` runs this for hours, and `test_fuzz.py` for a minute. A case is a target and a number,
which give the same mutation each time. What is allowed to happen: it works, or one of our own
errors is raised. What is not: another exception, a crash, `BLOWN` times the seconds that a sound
dump takes and `SLOW` more, `LARGE` bytes more, and any file, process or socket outside the case's
folder.

    python tests/fuzz.py --seconds 3600           from where the last one stopped
    python tests/fuzz.py --case index:17          one case, with its traceback
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llmdebug_nb as ld
from fuzz_guard import release, watch
from fuzz_targets import BATCHES, HEAVY, Case, Corpus, MutatedDump
from fuzz_tour import tour
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.notebook.bridge import BadRequestError

SLOW = 2.0  # CPU seconds; other targets than dumps take thousandths of one
BLOWN = 3  # the same tour of the same dump took up to 1.7 times as long, beside other work
HANGS, STUCK = 30, 600  # CPU seconds, and seconds on a clock, after which a case is ended
LARGE = 500 << 20  # bytes


def outcome_of(target: str, case: Case, seed: int, scratch: Path) -> tuple[str, str]:
    """Run a case; return its outcome, and the traceback of what must not happen."""
    before = _memory()
    outcome, trace, took = _run(case, f"{target}:{seed}", scratch)
    if took > SLOW:  # the first case of a target imports what it needs: slow is what stays slow
        outcome, trace, took = _run(case, f"{target}:{seed}", scratch)
    if took > SLOW and took > SLOW + BLOWN * _sound(case, f"{target}:{seed}", scratch):
        outcome, trace = f"slow ({outcome})", f"{took:.1f} s\n{trace}"
    if _memory() - before > LARGE:
        outcome = f"large ({outcome})"
    return outcome, trace


def _run(case: Case, seed: str, scratch: Path) -> tuple[str, str, float]:
    """Run a case in a folder of its own; return its outcome, a traceback and its CPU seconds."""
    with _folder(scratch) as work:
        start = time.process_time()
        outcome, trace = "ok", ""
        signal.setitimer(signal.ITIMER_PROF, HANGS)
        signal.alarm(STUCK)
        try:
            case(random.Random(seed), work)
        except (ld.LLMDebugError, BadRequestError):
            outcome = "refused"
        except Exception as error:
            trace = traceback.format_exc()
            outcome = f"{type(error).__name__} at {_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            release()
    return outcome, trace, time.process_time() - start


def _sound(case: Case, seed: str, scratch: Path) -> float:
    """Return the CPU seconds that a case of a dump takes with the sound dump; 0 for the others."""
    if not isinstance(case, MutatedDump):
        return 0.0
    with _folder(scratch) as work:
        start = time.process_time()
        case.sound(random.Random(seed), work)
        return time.process_time() - start


@contextlib.contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    work = scratch / "case"
    work.mkdir(parents=True)
    os.chdir(work)  # where an export goes
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_fine(outcome: str) -> bool:
    return outcome in ("ok", "refused")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    return f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].lineno}"


def _hung(*_: object) -> None:
    raise TimeoutError("hangs")


@contextlib.contextmanager
def prepared(home: Path) -> Iterator[tuple[Corpus, Path]]:
    """Make the corpus below ``home``, install the guard, and yield both with a scratch folder."""
    warnings.simplefilter("ignore")
    for name in ("TMPDIR", "MPLCONFIGDIR", "LLMDEBUG_RUNS"):
        os.environ.pop(name, None)
    made = Corpus(home / "corpus")
    ld.compare(home / "corpus/golden", home / "corpus/modules", progress=False)  # imports, caches
    scratch = home / f"scratch{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "case").mkdir(parents=True)
    before = Path.cwd()
    place = shutil.copytree(made.home / "operators", scratch / "case/llmdebug_runs/x")
    for seed in (0, 1, 2):  # what is imported late is imported before the guard
        tour(place, made.home / "golden", scratch, random.Random(seed))
    shutil.rmtree(scratch / "case")
    watch()
    tempfile.tempdir = str(scratch / "case")
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _hung)
    os.chdir(scratch)
    try:
        yield made, scratch
    finally:
        os.chdir(before)
        tempfile.tempdir = None
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--targets", default="", help="some of them, by commas")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--case", help="TARGET:SEED")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.case:
        target, _, seed = options.case.partition(":")
        with prepared(out) as (made, scratch):
            print(*outcome_of(target, made.targets[target], int(seed), scratch), sep="\n")
        return 0
    if options.worker:
        return _work(out, options.seconds, options.targets)
    # a crash ends the worker, not the fuzzing
    end = time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        more = ["--worker", "--seconds", str(left), "--out", str(out), "--targets", options.targets]
        ended = subprocess.run([sys.executable, __file__, *more], check=False).returncode
        state = _read(out)
        at = state["at"]
        if ended >= 0 or not at:
            break
        _note(out, state, at.partition(":")[0], int(at.partition(":")[2]), f"crash {-ended}", at)
    state = _read(out)
    for target, counts in sorted(state["counts"].items()):
        print(f"{target:12}", "  ".join(f"{outcome}: {n:,}" for outcome, n in counts.items()))
    bad = sum(n for counts in state["counts"].values() for o, n in counts.items() if not is_fine(o))
    total = sum(n for counts in state["counts"].values() for n in counts.values())
    print(f"{total:,} cases, {bad:,} of them findings, in {out}")
    return int(bad > 0 or total == 0)


def _read(out: Path) -> dict[str, Any]:
    file = out / "state.json"
    return json.loads(file.read_text()) if file.exists() else {"next": {}, "counts": {}, "at": ""}


def _note(
    out: Path, state: dict[str, Any], target: str, seed: int, outcome: str, trace: str
) -> None:
    counts = state["counts"].setdefault(target, {})
    counts[outcome] = counts.get(outcome, 0) + 1
    state["next"][target] = seed + 1
    if not is_fine(outcome) and counts[outcome] <= 5:
        (out / f"{target}-{seed}.txt").write_text(f"{outcome}\n{trace}", "utf-8", "replace")
    if target in HEAVY or seed % 1000 == 0 or not is_fine(outcome):
        (out / "state.json").write_text(json.dumps(state))


def _work(out: Path, seconds: float, only: str) -> int:
    with prepared(out) as (made, scratch):
        end = time.monotonic() + seconds
        targets = {n: c for n, c in made.targets.items() if not only or n in only.split(",")}
        state = _read(out)
        while time.monotonic() < end:
            for target, case in targets.items():
                for _ in range(BATCHES.get(target, 1 if target in HEAVY else 300)):
                    seed = state["next"].get(target, 0)
                    if target in HEAVY:
                        state["at"] = f"{target}:{seed}"
                        (out / "state.json").write_text(json.dumps(state))
                    found = outcome_of(target, case, seed, scratch)
                    _note(out, state, target, seed, *found)
        (out / "state.json").write_text(json.dumps(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
