"""Playing the tape in C: the rows are those that Python makes, whatever the program does."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections import Counter, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
import test_operator_tape
import test_tape
from llmdebug_nb.capture.calls import Counts, OpenCall
from llmdebug_nb.capture.recorder import Packing, Recorder
from llmdebug_nb.capture.rows import MANY
from llmdebug_nb.capture.signatures import Signatures
from llmdebug_nb.capture.tape import native, player
from llmdebug_nb.capture.tape.player import Player
from llmdebug_nb.core.batches import NO_FRAMES, NO_ROWS
from llmdebug_nb.core.columns import COLUMNS
from test_tape import tables

pytestmark = pytest.mark.skipif(native.player_in_c() is None, reason="the tape was not built")
LONG = 3_000  # characters: more than a row usually has


def in_python(patch):
    patch.setattr(player, "player_in_c", lambda: None)


@contextlib.contextmanager
def counting():
    """Count the events that C and Python play."""
    played = Counter()
    with pytest.MonkeyPatch.context() as patch:
        by_python, in_c = Player._play_event, Player._play_in_c

        def play_event(self, event):
            played["Python"] += 1
            by_python(self, event)

        def play_in_c(self):
            before = len(self._waiting)
            left = in_c(self)
            played["C"] += before - len(self._waiting) - (left is not None)
            return left

        patch.setattr(Player, "_play_event", play_event)
        patch.setattr(Player, "_play_in_c", play_in_c)
        yield played


def recorded(folder, name, model, *inputs, grad=False, **options):
    options = {"mode": "module+api+aten", "stats_only": True, "tokens": "all", **options}
    with torch.set_grad_enabled(grad), ld.dump(model, name=name, path=folder, **options) as run:
        for _ in range(2):
            model(*(each.clone() for each in inputs))
    return run


def both(folder, model, *inputs, **options):
    """Return the tables of a run that C has played, and of one that Python has played.

    What lies directly in a recorded model goes the long way, as it may be called from outside.
    """
    model = torch.nn.Sequential(Only(model))
    again = copy.deepcopy(model)
    with counting() as played:
        in_c = recorded(folder, "c", model, *inputs, **options)
    assert played["C"]
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        other = recorded(folder, "python", again, *inputs, **options)
    assert in_c.meta["problems"] == other.meta["problems"]
    assert in_c.meta["lost"] == other.meta["lost"]
    return tables(in_c), tables(other)


class Only(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize("options", test_operator_tape.OPTIONS, ids=str)
def test_operators_have_the_rows_that_python_makes(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = test_operator_tape.Model()
    in_c = tables(test_operator_tape.recorded(tmp_path, "c", model, **options))
    in_python(monkeypatch)
    assert in_c == tables(test_operator_tape.recorded(tmp_path, "python", model, **options))


@pytest.mark.parametrize("options", test_tape.OPTIONS, ids=str)
def test_modules_have_the_rows_that_python_makes(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = test_tape.Model()
    in_c = tables(test_tape.recorded(tmp_path, "c", model, **options)[0])
    in_python(monkeypatch)
    assert in_c == tables(test_tape.recorded(tmp_path, "python", model, **options)[0])


class Step(torch.nn.Module):
    """Does what a list of words says; a list in it is what a module inside does."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.inner = torch.nn.ModuleList(Step(part) for part in plan if isinstance(part, list))

    def forward(self, x, scale=1.0, *more, **named):
        inner = iter(self.inner)
        for part in self.plan:
            if isinstance(part, list):
                with contextlib.suppress(ArithmeticError):
                    x = next(inner)(x, *more, mask={"x": x}, flag=None)
            else:
                x = DO[part](x)
        return x if scale else (x, scale)


def fail(x):
    raise ArithmeticError("the program fails")


def refused(x):
    with contextlib.suppress(RuntimeError):
        x.view(7, 7)
    return x


DO = {
    "add": lambda x: x + 1,
    "change": lambda x: x.mul_(0.5),
    "transpose": lambda x: x.t(),
    "back": lambda x: x.t().t(),
    "split": lambda x: torch.cat(x.chunk(2, -1), 0).view(x.shape),
    "copy": lambda x: x.flip(0).contiguous().reshape(-1).view(x.shape),
    "function": lambda x: torch.nn.functional.softmax(x, -1),
    "fails": fail,
    "refused": refused,
    "number": lambda x: x * float(x.sum() > 0),
}
PLANS = st.recursive(
    st.lists(st.sampled_from(sorted(DO)), max_size=4),
    lambda inner: st.lists(st.one_of(st.sampled_from(sorted(DO)), inner), max_size=5),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, mode=st.sampled_from(["module", "module+aten", "api", "module+api+aten"]))
def test_any_program_has_the_rows_that_python_makes(plan, mode, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = torch.nn.Sequential(Step([*plan, ["add", plan]]))
    in_c, other = both(folder, Guarded(model), torch.arange(16.0).view(4, 4) - 7, mode=mode)
    assert in_c == other


class Guarded(torch.nn.Module):
    """Runs a program that may fail."""

    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, x):
        with contextlib.suppress(ArithmeticError):
            x = self.program(x)
        return x + 0


def test_c_plays_nearly_all(tmp_path):
    with counting() as played:
        recorded(tmp_path, "run", test_operator_tape.llama(), torch.tensor([[5, 7, 9, 11]]))
    assert played["C"] > 500
    assert played["Python"] <= 5


class Repeats(torch.nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times
        self.act = torch.nn.Identity()

    def forward(self, x):
        for _ in range(self.times):
            x = self.act(x)
        return x


def test_many_rows_of_a_root_call_are_committed_meanwhile(tmp_path, monkeypatch):
    batches = []
    commit = Recorder.flush
    monkeypatch.setattr(
        Recorder,
        "flush",
        lambda self, calls=(): (batches.append(self.hand.count), commit(self, calls)),
    )
    in_c, other = both(tmp_path, Repeats(3 * MANY), torch.ones(2), mode="module")
    assert in_c == other
    assert len(in_c["records"]) > 6 * MANY
    assert max(batches) < 2 * MANY


class Nested(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x):
        return x + 1 if self.inner is None else self.inner(x)


def test_calls_that_lie_deep_in_each_other_are_pythons_to_play(tmp_path):
    model = Nested(200)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        in_c, other = both(tmp_path, model, torch.ones(2), mode="module+aten")
    finally:
        sys.setrecursionlimit(limit)
    assert in_c == other
    assert len(in_c["records"]) > 800


class Named(torch.nn.Module):
    """Is given tensors under names of any length, and numbers of any size."""

    def __init__(self, name, number):
        super().__init__()
        self.name, self.number = name, number
        self.inner = torch.nn.Identity()
        self.takes = Takes()

    def forward(self, x):
        self.takes(x, {self.name: x}, self.number)
        return self.inner(x)


class Takes(torch.nn.Module):
    def forward(self, x, named, number):
        return x


@pytest.mark.parametrize(
    "name", ["é" * LONG, "a.b", "", "\U0001f600", "x" * 31, "x" * 32, "x" * 256]
)
def test_names_of_any_length_are_whole(name, tmp_path):
    in_c, other = both(tmp_path, Named(name, 10**250), torch.ones(2))
    assert in_c == other
    slots = {row[COLUMNS.index("slot")] for row in in_c["records"]}
    assert "1." + name.replace(".", "\\.") in slots


@pytest.mark.parametrize("number", [-1, 2**31, 2**63, 2**64, 1.5, float("nan"), True, 1j, "text"])
def test_numbers_and_texts_are_those_of_python(number, tmp_path):
    in_c, other = both(tmp_path, Named("x", number), torch.ones(2))
    assert in_c == other


def test_an_event_that_fails_is_a_problem_and_the_others_are_played(tmp_path):
    """Python shows no number with so many digits."""
    in_c, other = both(
        tmp_path, Named("x", 10 ** (sys.get_int_max_str_digits() + 5)), torch.ones(2)
    )
    assert in_c == other
    assert any(row[2].endswith("inner.takes") for row in in_c["records"])


def test_half_a_character_in_a_name_or_text_is_written_out(tmp_path):
    in_c, other = both(tmp_path, Named("\ud800", "\udfff"), torch.ones(2))
    assert in_c == other
    assert "1.\\ud800" in {row[COLUMNS.index("slot")] for row in in_c["records"]}
    assert "\\udfff" in {row[6] for row in in_c["scalars"]}


class OtherTakes(torch.nn.Module):
    def forward(self, one, two, three):
        return one


def give_it_a_forward(module):
    module.forward = lambda first, second, third: first


def give_it_a_class(module):
    module.__class__ = OtherTakes


class Changes(torch.nn.Module):
    """Changes a module in it before its second call."""

    def __init__(self, change):
        super().__init__()
        self.takes, self.change, self.calls = Takes(), change, 0

    def forward(self, x):
        if self.calls == 1:
            self.change(self.takes)
        self.calls += 1
        return self.takes(x, x, 1)


@pytest.mark.parametrize(
    ("change", "name"), [(give_it_a_forward, "first"), (give_it_a_class, "one")]
)
def test_a_module_that_the_program_changes_is_read_anew(change, name, tmp_path):
    in_c, other = both(tmp_path, Changes(change), torch.ones(2), mode="module")
    assert in_c == other
    calls = [row for row in in_c["records"] if row[2].endswith("takes")]
    assert {"x", name} <= {row[COLUMNS.index("argument")] for row in calls}


def arguments(waiting, recorder=None):
    """Return arguments of the player in C, for events that say nothing."""

    class Nobody:
        records = 0

        class hand:
            packed, measured = bytearray(NO_ROWS), {}
            called, operators, scalars = [], [], []

    def nothing(*_):
        return None

    return (
        native.Means(OpenCall, nothing, {}, nothing, nothing, nothing, {}, {}, True, False),
        native.Now(waiting, [], [], Counts({}, {}, {}), 0, ""),
        Packing(
            recorder or Nobody(), {}, [], ({}, [], {}, nothing, nothing), Nobody(), None, *NO_FRAMES
        ),
    )


@pytest.mark.parametrize("event", [(), (1, 2), (1, 2, 3, 4, 5, 6), None, "text", (None,)])
def test_an_event_of_another_shape_is_pythons_to_play(event):
    waiting = deque([event, "next"])
    assert native.player_in_c()(*arguments(waiting)) is event or event is None
    assert [*waiting] == ["next"]


@pytest.mark.parametrize("recorder", [object(), "text"])
def test_a_recorder_that_lacks_what_is_needed_is_an_error_and_the_event_is_spent(recorder):
    waiting = deque([(1,), (2,)])
    with pytest.raises(AttributeError):
        native.player_in_c()(*arguments(waiting, recorder=recorder))
    assert [*waiting] == [(2,)]


@pytest.mark.parametrize("given", [(), (1, 2, 3), ((), (), ())])
def test_other_arguments_are_refused(given):
    with pytest.raises(TypeError, match="play"):
        native.player_in_c()(*given)


def test_a_packed_row_has_all_columns(tmp_path):
    in_c, _ = both(tmp_path, Repeats(1), torch.ones(2))
    assert {len(row) for row in in_c["records"]} == {len(COLUMNS)}


class Keywords(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.takes = name, Any()

    def forward(self, x):
        return self.takes(x, **{self.name: x})


class Any(torch.nn.Module):
    def forward(self, x, **named):
        return x


def test_half_a_character_in_a_keyword_is_written_out(tmp_path):
    in_c, other = both(tmp_path, Keywords("\ud800"), torch.ones(2))
    assert in_c == other
    slots = {row[COLUMNS.index("slot")] for row in in_c["records"]}
    assert "kwargs.\\ud800" in slots


def test_parameters_that_cannot_be_found_out_leave_the_call_open(tmp_path, monkeypatch):
    """Both count one problem and go on."""

    def fails(self, module):
        if isinstance(module, Takes):
            raise LookupError("no parameters")
        return ()

    monkeypatch.setattr(Signatures, "of", fails)
    in_c, other = both(tmp_path, Named("x", 1), torch.ones(2), mode="module")
    assert in_c == other


def test_a_finalizer_that_calls_a_part_of_the_model_loses_nothing(tmp_path, monkeypatch):
    """It may run whenever Python makes an object, also while C plays."""
    model = torch.nn.Sequential(Only(Two()))
    seen = Signatures.of

    def meddles(self, module):
        if isinstance(module, Takes) and not model.done:
            model.done = True
            model[0].inner.other(torch.ones(2).to_sparse())
        return seen(self, module)

    counts = []
    for name in ("c", "python"):
        model.done = False
        with monkeypatch.context() as patch:
            patch.setattr(Signatures, "of", meddles)
            if name == "python":
                in_python(patch)
            run = recorded(tmp_path, name, model, torch.ones(2), mode="module")
        rows = tables(run)["records"]
        assert [row[0] for row in rows] == [*range(len(rows))]
        assert run.meta["problems"] == {}
        counts.append(Counter((row[2], row[5]) for row in rows))
    assert counts[0] == counts[1]


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.takes, self.other = Takes(), torch.nn.Identity()

    def forward(self, x):
        for _ in range(3):
            x = self.takes(self.other(x), x, 1)
        return x


def test_no_call_of_several_threads_is_lost(tmp_path):
    model = torch.nn.Sequential(Only(Two()))
    barrier, steps = threading.Barrier(4), 40

    def work():
        barrier.wait()
        with torch.no_grad():
            for _ in range(steps):
                model(torch.ones(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    with ld.dump(model, name="run", path=tmp_path, stats_only=True, tokens="all") as run:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = tables(run)
    calls = Counter(row[1] for row in found["calls"])
    assert set(calls.values()) == {4 * steps, 3 * 4 * steps}
    assert len(found["root_calls"]) == 4 * steps
