"""The tape of hooks: what is recorded with it is what is recorded without it, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sqlite3
import sys
import threading
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

import llmdebug_nb as ld
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.capture import recorder
from llmdebug_nb.capture.name_filter import NameFilter
from llmdebug_nb.capture.rows import CUT_SHORT
from llmdebug_nb.capture.steps import StepTracker
from llmdebug_nb.capture.tape import native, player
from llmdebug_nb.capture.waiting_rows import WaitingRows
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.store.catalog import process_folders
from llmdebug_nb.store.writer import Writer

pytestmark = pytest.mark.skipif(native.tape(False) is None, reason="the tape was not built")


class Inner(torch.nn.Module):
    """Takes and gives containers, None, numbers and objects; writes to what it is given."""

    def forward(self, x, pair, cache=None, *, scale=1.0, mask=None):
        x.add_(pair[0] * scale)
        if mask is not None:
            x = x * mask["mask"]
        return x, (pair[1], None), {"of.x": x.t(), "object": cache}


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Inner() for _ in range(3))
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            pair = (x.clone(), torch.ones(number, 2))  # the first one is empty
            x, *_ = layer(self.linear(x), pair, object(), mask={"mask": x > 0}, scale=number)
        return x


class Model(torch.nn.Module):
    """Its body is called twice, and one call in it raises."""

    def __init__(self, fails=False):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Sequential(Outer(), torch.nn.GELU()))
        self.fails = fails

    def forward(self, x):
        for _ in range(2):
            x = self.body(x)
        with contextlib.suppress(IndexError):
            self.body[0][0].layers[0](x, ())
        if self.fails:
            raise RuntimeError("the program fails")
        return x


def tables(run):
    (folder,) = process_folders(run.path)
    db = sqlite3.connect(folder / "index.sqlite")
    names = ("records", "scalars", "operators", "calls", "root_calls", "views", "waiting")
    found = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in names}
    db.close()
    return found


def recorded(tmp_path, name, model, grad=False, **options):
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    options = {"stats_only": True, "tokens": "all", "path": tmp_path, **options}
    with torch.set_grad_enabled(grad), ld.dump(model, name=name, **options) as run:
        results = [model(x.clone()) for _ in range(3)]
    return run, results


def off(monkeypatch):
    monkeypatch.setattr(player, "tape", lambda *_: None)


OPTIONS = [
    {}, {"mode": "module+aten"}, {"mode": "module+api"}, {"part": "in"}, {"contains": "layers.1"},
    {"ids": "0_0_0"}, {"every": 2}, {"last": 2}, {"types": "Linear"}, {"children": False},
    {"grad": True}, {"logits": True}, {"time": 1}, {"weights": True}, {"stats_only": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_and_without_it_all_rows_are_equal(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Model()
    with_it, first = recorded(tmp_path, "with", model, **options)
    off(monkeypatch)
    without, second = recorded(tmp_path, "without", model, **options)
    assert all(map(torch.equal, first, second))
    a, b = tables(with_it), tables(without)
    assert a["records"]
    assert a["waiting"] == []
    for name, rows in a.items():
        assert rows == b[name], name


def played(monkeypatch):
    """Return a list that gets all events that are played from now on."""
    noted = []
    play = player.Player._play

    def count(self):
        events = self.tape.take()
        noted.extend(events)
        self._waiting += events
        play(self)

    monkeypatch.setattr(player.Player, "_play", count)
    return noted


def test_most_calls_are_noted_on_it(tmp_path, monkeypatch):
    noted = played(monkeypatch)
    recorded(tmp_path, "run", Model())
    assert len(noted) > 50


def test_what_ran_before_the_program_failed_is_recorded(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Model(fails=True)
    for name in ("with", "without"):
        with pytest.raises(RuntimeError, match="the program fails"):
            recorded(tmp_path, name, model)
        off(monkeypatch)
    a, b = (tables(ld.open_run(tmp_path / name)) for name in ("with", "without"))
    assert a["records"]
    assert a == b


def test_a_recording_that_another_thread_stops_in_a_call_keeps_the_calls_before(tmp_path):
    class Waits(torch.nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(30)
            return x

    inside, go_on = threading.Event(), threading.Event()
    body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU(), Waits())
    model = torch.nn.Sequential(body)
    options = DumpOptions.of(name="run", path=tmp_path, stats_only=True, tokens="all")
    recording = Recording(model, options)
    recording.start()
    worker = threading.Thread(target=lambda: model(torch.ones(1, 2)))
    worker.start()
    assert inside.wait(30)
    run = recording.stop()
    go_on.set()
    worker.join()
    assert {"0.0", "0.1"} <= {record.site.path for record in run.records(role="output")}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_notes_nothing():
    tape = native.tape(False)
    tape.open()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(tape.begin("m", True, (), {})).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 5) == b"False"
    assert tape.begin("m", True, (), {})


def test_function_modes_of_the_program_see_nothing_of_it():
    class Sees(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, tape, tensor = [], native.tape(False), torch.ones(3)
    tape.open()
    with Sees():
        assert tape.begin("m", True, (tensor,), {})
        assert tape.end("m", True, (), {}, tensor)
        assert seen == []
        tensor.sum()
    assert len(seen) == 1


def test_an_unusual_call_leaves_the_tape_as_it_was():
    tape = native.tape(True)
    with torch.no_grad():
        assert not tape.begin("m", True, (), {})  # it is not open
        tape.open()
        assert not tape.begin("m", True, (torch.ones(1), torch.ones(0)), {})
    with torch.enable_grad():
        assert not tape.begin("m", True, (), {})
    assert len(tape) == 0
    with torch.no_grad():
        assert tape.begin("m", True, (1, None), {"a": [torch.ones(1)], "b": tape})
    ((tag, is_end, leaves),) = tape.take()
    assert (tag, is_end) == ("m", False)
    assert [slot for slot, _ in leaves] == ["0", "1", "kwargs.a.0", "kwargs.b"]
    assert leaves[3][1].kind == "Tape"


# -- exceptions, threads and exports in the middle of our own work ---------------------------------


@pytest.mark.parametrize("native_too", [True, False])
@pytest.mark.parametrize("mode", ["module", "module+aten"])
def test_a_stack_that_is_full_costs_single_rows_and_no_dump(
    native_too, mode, tmp_path, monkeypatch
):
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            def deep(y):
                return deep(self.layer(y))

            with contextlib.suppress(RecursionError):
                deep(x)
            return self.layer(x)

    if not native_too:
        off(monkeypatch)
    model, options = Deep(), {"stats_only": True, "path": tmp_path, "mode": mode}
    for more in range(4):  # it is full at other places in our own work
        with torch.no_grad(), ld.dump(model, name=f"run{more}", **options) as run:
            depth(more, lambda: model(torch.ones(2, 8)))
        assert len(list(run.records())) > 10


def depth(frames, work):
    return depth(frames - 1, work) if frames else work()


class TimeoutOfTheProgramError(Exception):
    pass


class HandlerOfTheProgram:
    def __init__(self):
        self.calls = []

    def __call__(self, number, frame):
        self.calls.append(number)
        raise TimeoutOfTheProgramError

    def method(self, number, frame):
        self.calls.append(number)
        raise TimeoutOfTheProgramError


HANDLERS = {
    "function": lambda owner: lambda number, frame: owner.method(number, frame),
    "method": lambda owner: owner.method,
    "partial": lambda owner: functools.partial(HandlerOfTheProgram.method, owner),
    "object": lambda owner: owner,
}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers here")
@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("native_too", [True, False])
def test_an_exception_of_the_programs_signal_handler_reaches_the_program(
    native_too, kind, tmp_path, monkeypatch
):
    owner = HandlerOfTheProgram()
    calls, handler = owner.calls, HANDLERS[kind](owner)
    if not native_too:
        off(monkeypatch)
    body, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8))), torch.ones(2, 4)
    model = torch.nn.Sequential(body)  # what lies directly in a model goes the long way
    got, ignored = 0, []  # by Python: an exception that is raised while it frees an object
    gc.collect()
    monkeypatch.setattr(sys, "unraisablehook", lambda told: ignored.append(told.exc_type))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with torch.no_grad(), ld.dump(model, name="run", stats_only=True, path=tmp_path) as run:
            model(x)
            for number in range(30):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-3 * (1 + number % 7))
                    while len(calls) == number:
                        model(x)
                except TimeoutOfTheProgramError:
                    got += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert got + ignored.count(TimeoutOfTheProgramError) == len(calls) == 30
    assert got > 20
    assert list(run.records())


class StopOfTheProgram(BaseException):
    """Not an Exception, as Ctrl-C is none: our own work lets it through wherever it comes."""


def stopped_once(monkeypatch, owner, name, before):
    """Let a function raise, once, before or after it has done its work."""
    work, stops = getattr(owner, name), [StopOfTheProgram]

    def stopping(*args, **kwargs):
        if before and stops:
            raise stops.pop()
        result = work(*args, **kwargs)
        if stops:
            raise stops.pop()
        return result

    monkeypatch.setattr(owner, name, stopping)


def two_calls(path, stop=lambda: None):
    """Record a model that is called twice, and stopped in the first call or not."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    with torch.no_grad(), ld.dump(model, name="run", path=path, mode="module+aten") as run:
        stop()
        for _ in range(2):
            with contextlib.suppress(StopOfTheProgram):
                model(x)
    return run


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("work", [(Writer, "commit"), (StepTracker, "take"), (WaitingRows, "fill")])
def test_a_stop_of_the_program_while_rows_are_committed_costs_none(
    work, before, tmp_path, monkeypatch
):
    expected = list(two_calls(tmp_path / "whole").records())
    run = two_calls(tmp_path / "stopped", lambda: stopped_once(monkeypatch, *work, before))
    assert [each.summary for each in run.records()] == [each.summary for each in expected]
    assert len(run.root_calls()) == 2
    assert len(run.operators()) == 4
    assert run.info()["lost"] == 0


def test_a_stop_while_calls_are_played_loses_no_other_call(tmp_path, monkeypatch):
    def sites(name, stop=lambda: None):
        torch.manual_seed(0)
        inside = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
        model = torch.nn.Sequential(torch.nn.Sequential(inside))
        options = {"path": tmp_path, "stats_only": True, "tokens": "all"}
        with torch.no_grad(), ld.dump(model, name=name, **options) as run:
            stop()
            for _ in range(2):
                with contextlib.suppress(StopOfTheProgram):
                    model(torch.ones(2, 4))
        # the calls around them were under way when the program was stopped
        return [record.site for record in run.records() if record.site.path.startswith("0.0.")]

    expected = sites("whole")
    assert len(expected) == 20
    found = sites("stopped", lambda: stopped_once(monkeypatch, NameFilter, "end", before=False))
    assert found == expected


def test_secrets_are_counted_once_though_a_commit_was_stopped(tmp_path, monkeypatch):
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    model.api_key = "hf_" + "a1B2" * 9
    with torch.no_grad(), ld.dump(model, name="run", path=tmp_path) as run:
        stopped_once(monkeypatch, Writer, "_put_meta", before=False)  # in the transaction
        for _ in range(2):
            with contextlib.suppress(StopOfTheProgram):
                model(x)
    assert run.info()["masked"] == 1
    assert len(run.root_calls()) == 2


def test_a_tensor_that_a_stop_left_half_described_describes_no_other(tmp_path, monkeypatch):
    off(monkeypatch)
    monkeypatch.setattr(recorder.native, "_make", lambda: None)  # all in Python
    run = two_calls(
        tmp_path, lambda: stopped_once(monkeypatch, recorder.kernel, "figures", before=True)
    )
    made = list(run.records())
    assert len(made) > 5
    assert all(each.summary.l2norm is not None for each in made)
    assert run.meta["lost"] == {CUT_SHORT: 1}


def test_models_that_run_in_several_threads_lose_no_call(tmp_path):
    layer = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())  # noqa: E731
    models = [torch.nn.Sequential(torch.nn.Sequential(layer(), layer())) for _ in range(4)]

    def work(model):
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(2, 4))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ld.dump(models, name="run", path=tmp_path, stats_only=True, tokens="all") as run:
            threads = [threading.Thread(target=work, args=(model,)) for model in models]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
    finally:
        sys.setswitchinterval(interval)
    assert run.meta["problems"] == {}
    roles = Counter(record.site.role for record in run.records())
    assert roles == {"input": 4 * 20 * 8, "output": 4 * 20 * 8}


def test_two_recordings_in_two_threads_share_no_memory():
    small, large = (torch.ones(200, n)[:, ::4].t() for n in (4000, 4999))
    expected = native.tape(False).look(small).content()
    for _ in range(30):
        found = {}

        def work(name, tensor, look, found=found):
            found[name] = look(tensor).content()

        threads = [
            threading.Thread(target=work, args=(name, tensor, native.eye().look))
            for name, tensor in (("small", small), ("large", large))
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert found["small"] == expected
    assert native.eye() is not native.eye()


def test_what_is_exported_in_a_forward_pass_opens_no_calls(tmp_path):
    class Exports(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            exported = torch.export.export(self.first, (x.detach(),))
            return self.second(exported.module()(x))

    options = {"stats_only": True, "path": tmp_path, "mode": "module+aten", "part": "out"}
    model = Exports()
    with torch.no_grad(), ld.dump(model, name="run", **options) as run:
        model(torch.ones(2, 4))
    paths = {record.site.path for record in run.records()}
    assert "second/Aten.addmm" in paths
    assert not any(path.startswith("first") for path in paths)


@pytest.mark.parametrize("native_too", [True, False])
def test_a_large_weight_that_an_operator_changes_in_place_has_its_new_values(
    native_too, tmp_path, monkeypatch
):
    class Filled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(2000, 64)

        def forward(self, x):
            y = self.table(x)
            with torch.no_grad():  # a row of which no sample is taken
                self.table.weight.index_fill_(0, torch.tensor([777]), 50.0)
            return y + self.table(x)

    if not native_too:
        off(monkeypatch)
    model, options = Filled(), {"stats_only": True, "path": tmp_path, "mode": "module+aten"}
    for name in ("first", "again"):
        with torch.no_grad(), ld.dump(model, name=name, **options) as run:
            model(torch.tensor([3]))
        (made,) = (
            record
            for record in run.records(role="output")
            if record.op.startswith("Aten.index_fill_")
        )
        assert made.summary.max == 50.0


@pytest.mark.parametrize("mode", ["module+aten", "module+api"])
def test_our_own_operators_are_not_those_of_a_new_thread(mode, tmp_path):
    model, x = torch.nn.Linear(600, 4), torch.randn(600, 1000).t()  # which C does not copy

    def work():
        with torch.no_grad():
            model(x)

    with ld.dump(model, name="run", stats_only=True, path=tmp_path, mode=mode) as run:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(run.operators()) == 1
