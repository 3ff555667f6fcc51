"""Faults while recording: files that fail, processes that are killed, fork, spawn and restart.

``LLMDEBUG_FAULTS=200`` is the full count of points (`make faults`).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from faulty_files import KINDS, FaultyFiles
from interruption import Interruption, descriptors, small, state
from llmdebug_nb.core.kernels.summary import summarize

POINTS = int(os.environ.get("LLMDEBUG_FAULTS", "24"))
STEPS = 3
OF_OTHERS = {"descriptors", "temporary files"}  # runs that are open for reading; other programs
HERE = Path(__file__).parent


def steps(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.full((2, 4), float(step))) for step in range(STEPS)]


def recorded(name: str, work: Any) -> Any:
    with ld.dump(name=name, tokens="all", mode="module+api+aten") as run:
        work()
    return run


def sites(run: Any) -> dict[object, str]:
    """Return the fingerprint of each record; it must be that of the values that were kept."""
    found = {}
    for record in run.records():
        if record.payload is not None:
            again = summarize(run.load(record)).fingerprint
            assert again == record.summary.fingerprint, record.site
        found[record.site] = record.summary.fingerprint
    return found


def is_part(found: dict[object, str], whole: dict[object, str]) -> bool:
    return found.items() <= whole.items()


# -- kill -9 ---------------------------------------------------------------------------------------


def _recorded_until_killed(model: Any, at: int, progress: mmap.mmap) -> None:
    """In a forked child: record, and die at a bytecode of our own code."""
    dump = ld.dump(model, name="killed", tokens="all", mode="module+api+aten")
    with Interruption(at, own=True, number=signal.SIGKILL), dump, torch.no_grad():
        progress[0] = 1
        for step in range(STEPS):
            model(torch.full((2, 4), float(step)))
            progress[0] = step + 2
    os._exit(0)


@pytest.mark.timeout(60 + POINTS)
def test_a_run_whose_process_is_killed_at_any_bytecode_opens_and_all_its_records_are_right():
    model = small()
    whole = sites(recorded("whole", lambda: steps(model)))
    with Interruption(None, own=True) as counted:
        recorded("counted", lambda: steps(model))
    by_step = [sum(site.step == step for site in whole) for step in range(STEPS)]
    chosen, found = random.Random(0), []
    for _ in range(POINTS):
        progress = mmap.mmap(-1, 1)
        at = chosen.randrange(1, counted.count)
        pid = os.fork()
        if pid == 0:
            _recorded_until_killed(model, at, progress)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) or progress[0] == STEPS + 1, at
        done = progress[0]
        if not done:  # it was killed before its recording had begun
            continue
        run = ld.open_run("killed")
        got = sites(run)
        assert is_part(got, whole), at
        assert len(got) >= sum(by_step[: done - 1]), at
        found.append(len(got))
        ld.delete_run("killed")
    assert len(found) > POINTS // 2
    assert len(set(found)) > min(POINTS, 20) // 4  # the points differ


# -- files that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*dump:UserWarning")
def test_files_that_fail_change_no_result_and_what_is_in_the_run_is_right(kind, tmp_path):
    model = small()
    expected = steps(model)
    whole = sites(recorded("whole", lambda: steps(model)))
    place = tmp_path / "faulty"
    chosen = random.Random(kind)
    writes = FaultyFiles("none", 0, place)
    with writes.under_the_writer():
        recorded("counted", lambda: steps(model))
    recorded("first", lambda: steps(model))
    before, opened = state(model), set(descriptors())
    for _ in range(max(3, POINTS // len(KINDS))):
        at = chosen.randrange(1, writes.writes + 1)
        files, got, problem = FaultyFiles(kind, at, place), [], None
        with files.under_the_writer():
            try:
                with ld.dump(
                    model, name="r", path=place, tokens="all", mode="module+api+aten"
                ) as run:
                    got = steps(model)
            except ld.LLMDebugError as error:
                problem = error
        assert all(map(torch.equal, got, expected)), at
        harmless = kind in ("slow", "short")
        assert (problem is None) or not harmless, (at, problem)
        if not harmless and kind != "gone":
            assert isinstance(problem, ld.errors.DumpWriteError), at
        left = [path for path in place.glob("r*") if (path / "llmdebug.json").exists()]
        for path in left:
            assert is_part(sites(ld.open_run(path)), whole), at
            complete = ld.open_run(path).info()["complete"]
            assert complete if harmless else not complete or sites(ld.open_run(path)) == whole, at
        if harmless:
            assert sites(run) == whole
            ld.delete_run(run)
        now = state(model)
        assert {what for what in now if now[what] != before[what]} <= OF_OTHERS, at
        assert not any("tensors.bin" in name for name in set(descriptors()) - opened), at
        for path in left:
            if path.exists():
                ld.delete_run(path)
    assert sites(recorded("next", lambda: steps(model))) == whole


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["sys.exit", "an error", "the end of the block"])
def test_a_forked_child_that_leaves_the_block_leaves_the_run_to_its_parent(leave):
    model = small()
    whole = sites(recorded("whole", lambda: steps(model)))
    dump = ld.dump(name="forked", tokens="all", mode="module+api+aten")
    with contextlib.suppress(SystemExit, RuntimeError), dump as run:
        steps(model)
        child = os.fork()
        if child == 0:
            model(torch.ones(2, 4))
            if leave == "sys.exit":
                sys.exit(0)
            if leave == "an error":
                raise RuntimeError
        else:
            os.waitpid(child, 0)
    if child == 0:
        os._exit(0)
    assert run.info()["complete"]
    assert sites(run) == whole


def _in_a_child(name: str, place: str) -> None:
    os.environ["LLMDEBUG_RUNS"] = place
    model = small()
    recorded(name, lambda: steps(model))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_of_a_recorded_process_record_runs_of_their_own(how):
    model = small()
    whole = sites(recorded("whole", lambda: steps(model)))
    context = multiprocessing.get_context(how)
    with ld.dump(name="parent", tokens="all", mode="module+api+aten") as run:
        child = context.Process(target=_in_a_child, args=("child", os.environ["LLMDEBUG_RUNS"]))
        child.start()
        steps(model)
        child.join()
    assert child.exitcode == 0
    assert sites(run) == sites(ld.open_run("child")) == whole


_KERNEL = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
import llmdebug_nb as ld
from interruption import small
model = small()
"""


class Kernel:
    """A Python that carries out lines of code, one at a time, as a kernel does cells."""

    def __init__(self) -> None:
        serve = "\nfor line in sys.stdin:\n    exec(eval(line), globals())\n    print(flush=True)\n"
        code = _KERNEL.format(tests=str(HERE)) + serve
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(repr(code) + "\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()) != "\n":
            assert line, "the kernel has ended"
            lines.append(line)
        return "".join(lines)

    def restart(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


_START = 'recording = ld.dump(model, name="shared", tokens="all"); run = recording.start()'
_CALL = "model(torch.ones(2, 4))"
_COUNT = 'print(ld.open_run("shared").info()["records"])'


def test_two_kernels_look_at_one_run_and_one_of_them_is_restarted_while_it_records():
    one, two = Kernel(), Kernel()
    try:
        one.run(f"{_START}; {_CALL}")
        first = int(two.run(_COUNT))
        one.run(_CALL)
        assert int(two.run(_COUNT)) == 2 * first
        two.run(f"{_START}; {_CALL}")  # the same name: a run of its own
        one.restart()
        one = Kernel()
        one.run(f"{_START}; {_CALL}; recording.stop()")
        two.run(f"{_CALL}; recording.stop()")
        found = two.run(
            'import json; print(json.dumps({r.name: [r.info()["records"], r.info()["complete"]]'
            ' for name in ("shared", "shared.2", "shared.3")'
            " for r in [ld.open_run(os.path.join(os.environ['LLMDEBUG_RUNS'], name))]}))"
        )
        by_run = list(json.loads(found).values())
    finally:
        one.restart()
        two.restart()
    runs = Path(os.environ["LLMDEBUG_RUNS"])
    killed, second, third = (
        ld.open_run(runs / name) for name in ("shared", "shared.2", "shared.3")
    )
    assert [run.info()["complete"] for run in (killed, second, third)] == [False, True, True]
    assert [run.info()["records"] for run in (killed, second, third)] == [
        2 * first, 2 * first, first,
    ]  # fmt: skip
    assert by_run


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["x", "-1", "1e9", "3.5", "٣", "9" * 30, " "])
def test_a_rank_that_is_no_number_is_left_with_a_warning(monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    with pytest.warns(UserWarning, match="RANK is .* which is no number from 0 to"):
        run = recorded("ranked", lambda: steps(small()))
    assert [each.name.partition("_")[0] for each in run.path.glob("rank*")] == ["rank0"]


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_of_runs_that_can_not_be_one_is_an_error_of_ours(monkeypatch, tmp_path, place):
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv("LLMDEBUG_RUNS", str(file if place == "a file" else file / "runs"))
    with pytest.raises(ld.errors.DumpWriteError, match="can't write the dump"):
        recorded("r", lambda: steps(small()))
