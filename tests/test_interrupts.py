"""Interrupts: wherever one comes, nothing of ours is left, and none is lost."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from interruption import ACTIVITIES, outcomes, small, state, train
from llmdebug_nb.core import interrupts
from models import generate, llama, prompt

POINTS = int(os.environ.get("LLMDEBUG_INTERRUPTS", "12"))


@pytest.fixture(autouse=True)
def _interrupts_arrive():
    """Set Python's handler: a shell's background jobs ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _a_temporary_folder_of_its_own(monkeypatch, tmp_path):
    """What other programs write while these tests run is not left behind by ours."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))  # of processes that start here
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.slow
@pytest.mark.timeout(30 + 10 * POINTS * len(ACTIVITIES))
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind_and_the_next_recording_is_whole():
    """``LLMDEBUG_INTERRUPTS=2000`` is the full count for each activity (`make faults`)."""
    tool = Path(__file__).parent / "interruption.py"
    done = subprocess.run(
        [sys.executable, str(tool), "all", str(POINTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("0 left something") == len(ACTIVITIES)


def test_what_one_interrupt_leaves_is_counted_once(monkeypatch):
    class Leaking:
        def __init__(self):
            self.model, self.left = small(), 0

        def work(self):
            try:
                for _ in range(200):
                    interrupts.taken()
            except KeyboardInterrupt:
                self.left += 1
                if self.left in (2, 5):
                    self.model.register_forward_hook(lambda *_: None)
                raise

    monkeypatch.setitem(ACTIVITIES, "leaking", Leaking)
    found = [bool(problems) for _, _, problems in outcomes("leaking", 8)]
    gc.unfreeze()
    assert found == [False, True, False, False, True, False, False, False]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_our_own_work_comes_at_its_end():
    done = []

    @interrupts.unbroken
    def work():
        interrupt()
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]


def test_an_interrupt_inside_the_programs_code_comes_at_once_also_within_ours():
    done = []

    @interrupts.let_through
    def program():
        interrupt()
        done.append("not reached")

    @interrupts.unbroken
    def work():
        program()
        done.append("not reached either")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_work_within_work_is_interrupted_at_the_end_of_the_whole():
    done = []

    @interrupts.unbroken
    def inner():
        interrupt()
        done.append("inner")

    @interrupts.unbroken
    def outer():
        inner()
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]


def test_contexts_are_entered_and_left_as_a_whole():
    log = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            interrupt()
            log.append(f"in {self.name}")

        def __exit__(self, *_):
            interrupt()
            log.append(f"out {self.name}")

    with pytest.raises(KeyboardInterrupt), interrupts.Unbroken(Context("a"), Context("b")):
        log.append("body")
    assert log == ["in a", "in b", "body", "out b", "out a"]


def test_a_second_interrupt_ends_work_that_hangs(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.05)

    @interrupts.unbroken
    def work():
        interrupt()
        time.sleep(0.06)
        interrupt()
        pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_handler_of_the_program_is_called_and_put_back():
    seen, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    own = signal.getsignal(signal.SIGINT)
    try:
        model = small()
        with ld.dump(model, name="handled"):
            interrupt()
            train(model)
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_program_sets_in_the_block_stays_its_own():
    before, seen = signal.getsignal(signal.SIGINT), []
    model = small()
    try:
        with ld.dump(model, name="set"):
            previous = signal.signal(signal.SIGINT, lambda *_: (seen.append(1), previous(*_)))
            train(model)  # our handler now stands before the program's, which calls our first
            with pytest.raises(KeyboardInterrupt):
                interrupt()
        assert seen == [1]
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert seen == [1, 1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_recordings_may_start_and_stop_in_other_threads_and_end_in_any_order():
    before = state(small())
    one, two = ld.dump(small(), name="one"), ld.dump(small(), name="two")
    one.start()
    thread = threading.Thread(target=two.start)
    thread.start()
    thread.join()
    one.abandon()
    two.abandon()
    now = state(small())
    assert {what: now[what] for what in ("handler of interrupts", "owners of the handler")} == {
        what: before[what] for what in ("handler of interrupts", "owners of the handler")
    }


def test_an_interrupt_in_the_middle_of_a_hook_leaves_the_row_whole(monkeypatch):
    """The interrupt comes while a payload is written; the block ends after that row."""
    from llmdebug_nb.store.writer import Writer

    payload, calls = Writer.payload, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 3:
            interrupt()
        payload(self, *args)

    monkeypatch.setattr(Writer, "payload", interrupted)
    model = small()
    with pytest.raises(KeyboardInterrupt), ld.dump(model, name="hook") as run, torch.no_grad():
        model(torch.ones(2, 4))
    for record in run.records():
        assert run.load(record).shape == record.summary.shape
    assert run.info()["complete"] is False
    assert len(calls) == 3


def test_an_interrupt_as_a_backward_pass_begins_leaves_no_mode(monkeypatch):
    """It waits for our own work to end, and comes before that has returned."""
    from llmdebug_nb.capture.root_calls import RootCalls

    begin = RootCalls._begin_backward

    def interrupted(self, *args):
        interrupt()
        return begin(self, *args)

    monkeypatch.setattr(RootCalls, "_begin_backward", interrupted)
    model = small()
    before = state(model)
    options = {"mode": "module+api+aten", "phase": "both"}
    with pytest.raises(KeyboardInterrupt), ld.dump(model, name="backward", **options):
        train(model)
    assert state(model) == before


def test_an_interrupt_while_generate_hooks_a_model_leaves_no_hook(monkeypatch):
    from llmdebug_nb.capture.hooks import modules

    hook = modules.hook

    def interrupted(*args):
        found = hook(*args)
        interrupt()
        return found

    monkeypatch.setattr(modules, "hook", interrupted)
    model = llama()
    before = state(model)
    with pytest.raises(KeyboardInterrupt), ld.dump(name="found") as _:
        generate(model, prompt(3), new=2)
    assert state(model) == before


def test_an_interrupt_while_generate_looks_at_its_tokens_leaves_no_mode_off(monkeypatch):
    """Our own work with tensors is out of sight of modes, and that has to end."""
    from llmdebug_nb.capture.compat import torch_modes

    out_of_sight = torch_modes.out_of_sight

    def interrupted(work, *args, **kwargs):
        def begun():
            interrupt()
            return work(*args, **kwargs)

        return out_of_sight(begun)

    monkeypatch.setattr(torch_modes, "out_of_sight", interrupted)
    model = llama()
    before = state(model)
    with pytest.raises(KeyboardInterrupt), ld.dump(model, name="looks"):
        generate(model, prompt(3), new=2)
    assert state(model) == before


@pytest.mark.parametrize("at", ["_begin", "_end_run"])
def test_after_an_interrupt_as_a_run_of_a_session_begins_or_ends_the_next_is_recorded(
    monkeypatch, at
):
    from llmdebug_nb.capture.graphs.followed_graphs import FollowedGraphs

    whole, calls = getattr(FollowedGraphs, at), []

    def interrupted(self, *args):
        found = whole(self, *args)
        calls.append(1)
        if len(calls) == 1:
            interrupt()
        return found

    monkeypatch.setattr(FollowedGraphs, at, interrupted)
    activity = ACTIVITIES["session"]()
    with ld.dump(activity.session, name="runs") as run:
        with pytest.raises(KeyboardInterrupt):
            activity.next()
        activity.next()
    assert len(calls) == 2
    assert not run.info().get("problems")
    assert {record.site.step for record in run.records(role="output")} == {0, 1}


def test_an_interrupt_inside_a_session_of_the_program_comes_at_once(monkeypatch):
    import onnxruntime

    done, run = [], onnxruntime.InferenceSession.run

    def interrupted(self, *args, **kwargs):
        if self is activity.session:
            interrupt()
            done.append("not reached")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", interrupted)
    activity = ACTIVITIES["session"]()
    with pytest.raises(KeyboardInterrupt):
        activity.work()
    assert done == []
