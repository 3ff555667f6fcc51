"""Values kept by the tape: the files are those that Python writes, byte for byte."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
import test_tape
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.tape import native, player
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.capture.values import KeptValues
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.store.catalog import process_folders
from llmdebug_nb.store.payload_files import PayloadWriter
from test_playing import PLANS, Guarded, Named, Only, Step, Takes, counting, recorded
from test_tape import tables

pytestmark = pytest.mark.skipif(native.player_in_c() is None, reason="the tape was not built")


def by_player_in_python(patch):
    patch.setattr(player, "player_in_c", lambda: None)


def without_tape(patch):
    patch.setattr(player, "tape", lambda *_: None)


def everything(run):
    """Return the tables of a run, and the bytes of its values."""
    (folder,) = process_folders(run.path)
    files = sorted(folder.glob("tensors*.bin"))
    return tables(run), [(file.name, file.read_bytes()) for file in files]


def in_all_ways(folder, model, *inputs, **options):
    """Record a program by the tape in C, by one that Python plays, and without one; compare."""
    options = {"mode": "module+api", "stats_only": False, **options}
    model = torch.nn.Sequential(Only(model))
    with counting() as played:
        run = recorded(folder, "c", copy.deepcopy(model), *inputs, **options)
    assert played["C"] or options.get("grad")  # then gradients are recorded, which need more
    found = everything(run)
    for name, way in {"player": by_player_in_python, "none": without_tape}.items():
        with pytest.MonkeyPatch.context() as patch:
            way(patch)
            other = recorded(folder, name, copy.deepcopy(model), *inputs, **options)
        assert (run.meta["problems"], run.meta["lost"]) == (
            other.meta["problems"], other.meta["lost"],
        )  # fmt: skip
        assert found == everything(other)
    return run


@settings(max_examples=40, deadline=None)
@given(
    plan=PLANS, mode=st.sampled_from(["module", "module+aten", "api", "module+api+aten"]),
    grad=st.booleans(),
)  # fmt: skip
def test_any_program_leaves_the_same_files(plan, mode, grad, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = torch.nn.Sequential(Step([*plan, ["add", plan]]))
    in_all_ways(folder, Guarded(model), torch.arange(16.0).view(4, 4) - 7, mode=mode, grad=grad)


@pytest.mark.parametrize(
    "options",
    [each for each in test_tape.OPTIONS if not each.get("stats_only")] + [{"max_bytes": 300}],
    ids=str,
)
def test_all_options_leave_the_same_files(options, tmp_path):
    torch.manual_seed(0)
    model, found = test_tape.Model(), []
    for name, way in {"c": None, "player": by_player_in_python, "none": without_tape}.items():
        with pytest.MonkeyPatch.context() as patch:
            if way is not None:
                way(patch)
            kept = {**options, "stats_only": False}
            run = test_tape.recorded(tmp_path, name, copy.deepcopy(model), **kept)[0]
        found.append((*everything(run), run.meta["lost"], run.meta["problems"]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "\0\1\b\t\n\x0b\f\r\x1f\x7f", "é\u2028😀"])
def test_names_with_any_character_are_written_as_python_writes_them(name, tmp_path):
    run = in_all_ways(tmp_path, Named(name, 10**250), torch.ones(2))
    slots = {record.site.slot for record in run.records() if record.site.path.endswith("takes")}
    assert slots == {"0", f"1.{name}"}


class Gives(torch.nn.Module):
    """Gives tensors of many kinds: strided, of other dtypes, twice the same, and views."""

    def __init__(self):
        super().__init__()
        self.inner, self.again = Kinds(), Any()

    def forward(self, x):
        return self.again(*self.inner(x))[0]


class Any(torch.nn.Module):
    def forward(self, *given):
        return given


class Kinds(torch.nn.Module):
    def forward(self, x):
        dtypes = [
            torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.float8_e4m3fnuz, torch.int8, torch.uint16, torch.uint64, torch.bool,
            torch.complex64, torch.complex128,
        ]  # fmt: skip
        strided = [x.t(), x[:, ::2], x.expand(3, *x.shape), x[:0], x.conj()]
        large = torch.ones(600, 700).t()  # more than the scratch holds
        return (x, x, x + 1, *(x.to(each) for each in dtypes), *strided, x.view(-1), large, [x, {}])


def test_tensors_of_any_kind_leave_the_same_files(tmp_path):
    run = in_all_ways(tmp_path, Gives(), torch.arange(12.0).view(3, 4))
    steps = [
        run.load(r)
        for r in run.records()
        if r.site.path.endswith("inner.inner") and r.site.slot == "2"
    ]
    assert len(steps) == 2
    assert torch.equal(steps[0], torch.arange(12.0).view(3, 4) + 1)


class Writes(torch.nn.Module):
    """Changes each result in place, as soon as it has it."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))

    def forward(self, x):
        for part in self.parts:
            x = part(x + 1)
            x.mul_(10)
            x.data[0] = 7
        return x


def test_what_is_kept_is_what_the_hook_saw(tmp_path):
    run = in_all_ways(tmp_path, Writes(), torch.zeros(3), mode="module")
    kept = [
        run.load(record).tolist()[1]
        for record in run.records()
        if record.site.role == "output" and ".parts." in record.site.path
    ]
    assert kept == 2 * [1, 11, 111, 1111]


KILLED = """
import os, sys
import torch
import llmdebug_nb as ld

class Dies(torch.nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), 9)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.dies = torch.nn.Identity(), Dies()
    def forward(self, x):
        for _ in range(int(sys.argv[2])):
            x = self.inner(x)
        return self.dies(x * 2)

model = torch.nn.Sequential(Model())
with ld.dump(model, name="killed", path=sys.argv[1], tokens="all"), torch.no_grad():
    model(torch.ones(2, 4))
"""


def killed(folder, calls):
    """Return the run of a program that is killed in the last call of a module."""
    command = [sys.executable, "-c", KILLED, folder, str(calls)]
    done = subprocess.run(command, timeout=90, check=False)
    assert done.returncode == -signal.SIGKILL
    return ld.open_run(folder / "killed")


def test_a_program_that_is_killed_leaves_the_inputs_of_its_last_call(tmp_path):
    run = killed(tmp_path, calls=1)
    (last,) = [record for record in run.records() if record.site.path == "0.dies"]
    assert last.site.role == "input"
    before = [record for record in run.records() if record.site.path == "0.inner"]
    assert torch.equal(run.load(last), 2 * run.load(before[-1]))


class Changes(torch.nn.Module):
    """Each call in it has other values."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Identity()

    def forward(self, x):
        for _ in range(4):
            x = self.other(x + 1)
        return x


def test_values_that_a_finalizer_brings_within_our_own_work_are_kept(tmp_path, monkeypatch):
    """They can't be played then, and may change before they are."""
    model = torch.nn.Sequential(Only(Changes()))
    keep, given = KeptValues.keep_seen, []

    def meddles(self, seen, header):
        if not given:
            given.append(torch.full((3,), 5.0))
            model[0].inner.other(given[0])
            given[0].zero_()
        return keep(self, seen, header)

    monkeypatch.setattr(KeptValues, "keep_seen", meddles)
    run = recorded(tmp_path, "run", model, torch.ones(3), mode="module", stats_only=False)
    rows = tables(run)["records"]
    assert [row[0] for row in rows] == [*range(len(rows))]
    assert run.meta["problems"] == {} == run.meta["lost"]
    assert [5.0, 5.0, 5.0] in [run.load(record).tolist() for record in run.records()]
    for record in run.records():
        assert run.load(record).mean().item() == record.summary.mean


def test_a_full_disk_is_said_as_python_says_it(tmp_path, monkeypatch):
    append, count = PayloadWriter.append, []

    def fails(self, parts):
        count.append(1)
        if len(count) % 100 == 7:
            raise OSError(28, "No space left on device")
        return append(self, parts)

    monkeypatch.setattr(PayloadWriter, "append", fails)
    lost = []
    for name, way in {"c": None, "player": by_player_in_python, "none": without_tape}.items():
        count.clear()
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(DumpWriteError):
            if way is not None:
                way(patch)
            run = ld.dump(model := test_tape.Model(), name=name, path=tmp_path, tokens="all")
            with torch.no_grad(), run:
                model(torch.ones(3, 4))
        run = ld.open_run(tmp_path / name)
        why = [record.lost and record.lost.partition(" in ")[0] for record in run.records()]
        lost.append(why)
    assert lost[0] == lost[1] == lost[2]
    assert {*lost[0]} == {None, "no space left for the dump"}


class Timeout(Exception):
    pass


@pytest.mark.parametrize("mode", ["module", "api", "module+api"])
def test_a_handler_of_the_program_may_raise_while_values_are_written(mode, tmp_path, monkeypatch):
    """The program gets its exception, and what is recorded afterwards belongs to its own calls."""

    def handler(*_):
        raise Timeout

    payload, count = KeptValues.keep_seen, []

    def interrupted(self, *args):
        count.append(1)
        if len(count) in (3, 6):
            signal.raise_signal(signal.SIGUSR1)
        return payload(self, *args)

    class Tries(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.takes = Takes()

        def forward(self, x):
            for _ in range(6):
                with contextlib.suppress(Timeout):
                    x = torch.nn.functional.relu(self.takes(x + 1, x, 1)) * 2
            return x

    monkeypatch.setattr(KeptValues, "keep_seen", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    model = torch.nn.Sequential(Only(Tries()))
    try:
        with torch.no_grad(), ld.dump(model, name="r", path=tmp_path, mode=mode) as run:
            model(torch.ones(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(count) > 6
    kept = [record for record in run.records() if record.lost is None]
    assert kept
    for record in kept:
        digest = xxhash.xxh3_64_hexdigest(to_bytes(run.load(record)))
        assert record.summary.fingerprint == f"xxh3:{digest}"
    calls = defaultdict(dict)
    for record in kept:
        if record.op == "Functional.relu":
            calls[record.site.key][record.site.role] = run.load(record)
    whole = [call for call in calls.values() if len(call) == 2]
    assert bool(whole) == ("api" in mode)
    assert all(torch.equal(call["output"], call["input"].relu()) for call in whole)


def test_an_interrupt_while_values_are_written_comes_at_the_end_of_the_hook(tmp_path, monkeypatch):
    keep, count = KeptValues.keep_seen, []

    def interrupted(self, *args):
        count.append(1)
        if len(count) == 2:
            signal.raise_signal(signal.SIGINT)
        return keep(self, *args)

    monkeypatch.setattr(KeptValues, "keep_seen", interrupted)
    model = torch.nn.Sequential(Only(Changes()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            torch.no_grad(),
            ld.dump(model, name="r", path=tmp_path) as run,
        ):
            model(torch.ones(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(count) == 2
    for record in run.records():
        assert run.load(record).shape == record.summary.shape


def test_no_tensor_of_the_program_is_held(tmp_path):
    held = []

    class Makes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x):
            for _ in range(3):
                x = self.inner(x + 1)
                held.append(weakref.ref(x))
                held.append(weakref.ref(self.inner(x.t())))
            gc.collect()
            assert sum(ref() is not None for ref in held) <= 2
            return x

    model = torch.nn.Sequential(Only(Makes()))
    with torch.no_grad(), ld.dump(model, name="r", path=tmp_path, tokens="all"):
        model(torch.ones(3, 4))
    assert not any(ref() is not None for ref in held)


def test_a_program_that_is_killed_loses_few_records_that_repeat_others(tmp_path):
    there = len([*killed(tmp_path, calls=200).records()])
    assert there > 2 + 2 * 200 - 40


# -- code of the program that runs within our own work --------------------------------------------


class Lazy(Mapping):
    """A container whose code does something when its items are asked for."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 1

    def __iter__(self):
        return iter(["a"])

    def __getitem__(self, key):
        return 1

    def items(self):
        self.act()
        return [("a", 1)]


ACTS = {
    "in place": lambda x: x.add_(1),
    "unseen": lambda x: x.data.add_(1),
    "freed": lambda x: x.untyped_storage().resize_(0),
    "another": lambda x: x.set_(torch.full_like(x, 7.0)),
}


class Walked(torch.nn.Module):
    """Gives a tensor, and a container that acts on it; ``more``: behind that."""

    def __init__(self, act, size, more=()):
        super().__init__()
        self.takes, self.act, self.size, self.more = Swallows(), act, size, more

    def forward(self, x):
        y = torch.arange(float(self.size))
        self.takes(y, Lazy(lambda: ACTS[self.act](y)), *self.more)
        return x


class Swallows(torch.nn.Module):
    def forward(self, *given):
        return torch.ones(2)


class Unusual(torch.Tensor):
    pass


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("size", [10, 100_000, 1_000_000])
@pytest.mark.parametrize("refused", [False, True])
def test_values_are_those_of_their_fingerprint_whatever_a_container_does(
    act, size, refused, tmp_path
):
    """A tensor of another class makes C refuse what it has noted so far."""
    more = (torch.ones(2).as_subclass(Unusual),) if refused else ()
    model = torch.nn.Sequential(Only(Walked(act, size, more)))
    run = recorded(tmp_path, "run", model, torch.ones(2), mode="module", stats_only=False)
    kept = [record for record in run.records() if record.lost is None]
    assert len(kept) > 10
    for record in kept:
        digest = xxhash.xxh3_64_hexdigest(to_bytes(run.load(record)))
        assert record.summary.fingerprint == f"xxh3:{digest}"


CALLS_WITHIN = """
import os, sys
import torch
import llmdebug_nb as ld
sys.path.insert(0, sys.argv[2])
from test_kept_in_c import Lazy

class Dies(torch.nn.Module):
    def forward(self, x, lazy):
        os.kill(os.getpid(), 9)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dies, self.other = Dies(), torch.nn.Identity()
    def forward(self, x):
        calls = Lazy(lambda: self.other(torch.full((3,), 43.0)))
        self.dies(torch.full((3,), 42.0), calls)

model = torch.nn.Sequential(Model())
with ld.dump(model, name="killed", path=sys.argv[1], tokens="all"), torch.no_grad():
    model(torch.ones(2))
"""


def test_a_container_that_calls_the_model_keeps_no_values_from_the_disk(tmp_path):
    command = [sys.executable, "-c", CALLS_WITHIN, tmp_path, Path(__file__).parent]
    subprocess.run(command, timeout=90, check=False)
    run = ld.open_run(tmp_path / "killed")
    held = [run.load(record).tolist() for record in run.records()]
    assert [42.0] * 3 in held
    assert [43.0] * 3 in held


def test_values_whose_writing_was_given_up_are_written_for_the_next_record(tmp_path, monkeypatch):
    """A handler raises while a row is written that a finalizer's call has met meanwhile."""
    model = torch.nn.Sequential(Only(Changes()))
    keep, met = KeptValues._keep, []

    def interrupted(self, row, *args):
        if not met:
            met.append(row)
            model[0].inner.other(torch.full((2,), 42.0))
            raise Timeout
        return keep(self, row, *args)

    monkeypatch.setattr(KeptValues, "_keep", interrupted)
    monkeypatch.setattr("llmdebug_nb.core.interrupts.is_of_handler", lambda error: True)
    with torch.no_grad(), ld.dump(model, name="r", path=tmp_path, tokens="all") as run:
        with contextlib.suppress(Timeout):
            model(torch.full((2,), 42.0))
        model(torch.full((2,), 42.0))
    assert met
    within = [record for record in run.records() if record.site.path == "0.inner.other"]
    assert within
    for record in within:
        assert record.lost is None
        assert run.load(record).numel() == record.summary.numel


class Strided(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.takes, self.other = Swallows(), Swallows()

    def forward(self, x):
        gc.collect()
        for number in range(60):
            other = torch.full((30, 3), float(number)).t()
            waiting = [[] for _ in range(number)]
            Finalized(lambda other=other: self.other(other))
            threshold = gc.get_threshold()
            gc.set_threshold(60)
            self.takes(torch.randn(30, 3).t())
            gc.set_threshold(*threshold)
            del waiting
            gc.collect()
        return x


class Finalized:
    def __init__(self, act):
        self.me, self.act = self, act

    def __del__(self):
        self.act()


@pytest.mark.parametrize("stats_only", [False, True])
def test_a_finalizer_with_a_strided_tensor_leaves_others_alone(stats_only, tmp_path):
    """Both are packed in the same memory."""
    model = torch.nn.Sequential(Only(Strided()))
    gc.collect()
    gc.freeze()  # so that collections take little time
    try:
        run = recorded(tmp_path, "run", model, torch.ones(2), mode="module", stats_only=stats_only)
    finally:
        gc.unfreeze()
    taken = [r for r in run.records() if r.site.path.endswith("takes") and r.site.role == "input"]
    assert len(taken) == 120
    assert all(record.summary.min < record.summary.max for record in taken)


def test_recordings_let_go_of_the_model_and_of_themselves(tmp_path):
    def ours():
        return sum(type(each) in (Player, Recorder) for each in gc.get_objects())

    gc.collect()
    gone, before = [], ours()  # other tests may hold theirs
    for number in range(4):
        model = torch.nn.Sequential(Only(Changes()))
        with torch.no_grad(), ld.dump(model, name=f"r{number}", path=tmp_path, tokens="all"):
            model(torch.ones(3))
        gone.append(weakref.ref(model))
        del model
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert ours() <= before
