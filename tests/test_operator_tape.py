"""Operators on the tape: what is recorded with it is what is recorded without it, bit for bit."""

from __future__ import annotations

import collections.abc
import contextlib
import gc
import signal
import threading

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import llmdebug_nb as ld
from llmdebug_nb.capture.operators import call_stacks
from llmdebug_nb.capture.operators.modes import AtenMode
from llmdebug_nb.capture.tape import native, torch_observer
from models import llama
from test_tape import off, played, tables

pytestmark = pytest.mark.skipif(native.tape(False) is None, reason="the tape was not built")


@pytest.fixture(autouse=True)
def noted_by_a_mode(monkeypatch):
    """What torch's own observer tells is tested in test_torch_observer.py."""
    monkeypatch.setattr(torch_observer, "observer", lambda: None)


class Views(torch.nn.Module):
    """Makes views of all kinds, and operators that take them."""

    def forward(self, x):
        a, b = x.chunk(2, -1)
        first, *_ = x.unbind(0)
        y = torch.cat([a.transpose(0, 1), b.t()]).view(-1, 2).expand(2, -1, 2)
        y = y.reshape(-1)[1::2].unsqueeze(0).squeeze(0) + first.sum()
        y = y.as_strided((3, 2), (1, 1)) * x[:, None, :2].select(1, 0)
        return y.flip(0).permute(1, 0).contiguous().flatten(), x.detach().diagonal().split(1)


class Indexed(torch.nn.Module):
    """Takes parts by indices of all kinds; a list of sizes is another one afterwards."""

    def forward(self, x):
        sizes, at = [2, 6], torch.tensor(1)
        y = x.view(sizes)
        sizes[:] = [6, 2]
        parts = [
            x[..., :2], x[..., None, 1:], x[:, None], x[1], x[..., 0:4:2], x[(slice(0, 2), [0, 1])],
            x[at:], x[:, at], x[np.int64(1) :], x[[0, 2]], x[x > 0], x[()],
            y.view(y.shape), y.reshape(y.size()),
            y[slice(None, at)], y.view(sizes), y.view((3, (4))), y.expand(*[2, -1, -1]),
        ]  # fmt: skip
        return sum(part.sum() + (part * 2).sum() for part in parts)


class Odd(torch.nn.Module):
    """Runs what the tape does not take, and errors that the program catches."""

    def forward(self, x):
        z = torch.complex(x, x).imag * 2
        with contextlib.suppress(RuntimeError):
            torch.mm(x, torch.ones(9, 9))
        with contextlib.suppress(RuntimeError):
            x.view(7, 7)
        empty = x[:0].exp()
        index = x.clone()
        index[:, torch.tensor([0, 3])] = 3.0
        values, places = torch.topk(index[0:1, [0, 2]], k=1, dim=-1, sorted=True)
        halves = x.to(torch.float8_e4m3fn).to(torch.float32) + x.double().float()
        x = x.clone().add_(1).clamp_(max=2.0).mul_(torch.tensor(2.0))
        x.unsqueeze_(0).squeeze_(0)
        if float(x.sum()) > 0 and bool(places[0] >= 0):
            x.zero_()
        return z, empty, values, torch.full((2, 2), 1.5, dtype=torch.bfloat16), x + halves


class Lazy(torch.nn.Module):
    """Runs what torch resolves when it is needed."""

    def forward(self, x):
        return torch.complex(x, x).conj().imag * 2


class Weighted(torch.nn.Module):
    """Has large weights, one of which it changes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 9000), torch.nn.Linear(9000, 4, bias=False)
        self.table = torch.nn.Embedding(3, 9000)

    def forward(self, x):
        y = self.up(x) + self.table(torch.tensor([0, 1, 2]))
        x = self.down(y)
        with torch.no_grad():
            self.up.weight += 1
            self.down.weight.data[0, 0] = 5.0
        return x + self.down(self.up(x)).sum(), self.up.weight[2:].sum()


class Own(torch.nn.Parameter):
    """A class of weights, as engines have them: its operators are those of any tensor."""


class Replaced(torch.nn.Module):
    """Its weight gets other memory in each step; another one is of a class of its own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 20_000))
        self.own = Own(torch.ones(4, 2))

    def forward(self, x):
        result = (x @ self.weight).sum() + x @ self.own
        values = self.weight.data.numpy().copy()
        values[0, 3] += 1
        self.weight.data = torch.from_numpy(values)
        return result


class Differentiated(torch.nn.Module):
    """Differentiates inside of a forward pass, with gradients off around it."""

    def forward(self, x):
        inner = torch.func.grad(lambda a: (a * a).sum())(x)
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            (found,) = torch.autograd.grad((y * y).sum(), y)
        return inner + found + torch.vmap(lambda a: a * 2)(x)


class Executed(torch.nn.Module):
    """Runs code that is compiled anew in each step, as a cell of a notebook is."""

    def forward(self, x):
        names = {"x": x}
        exec(compile("y = x.exp()\ny = y + 1", "made.py", "exec"), names)
        return names["y"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = [
            Views(), Odd(), Weighted(), Replaced(), Differentiated(), Executed(), Indexed(), Lazy(),
        ]  # fmt: skip
        self.layers = torch.nn.ModuleList(parts)

    def forward(self, x):
        results = [layer(x) for layer in self.layers for _ in range(2)]
        with contextlib.suppress(RuntimeError):
            self.layers[0](x[0, 0])
        return results


def recorded(folder, name, model, inputs=None, grad=False, **options):
    torch.manual_seed(1)
    inputs = torch.randn(3, 4) if inputs is None else inputs
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", **options}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.set_grad_enabled(grad), ld.dump(model, name=name, path=folder, **options) as run:
        for _ in range(3):
            model(inputs.clone())
    model.load_state_dict(state)
    return run


OPTIONS = [
    {}, {"mode": "aten"}, {"mode": "module+api+aten"}, {"mode": "module+api"}, {"mode": "api"},
    {"mode": "module+api", "grad": True}, {"mode": "module+api", "grad": True, "phase": "forward"},
    {"mode": "api", "part": "in"}, {"mode": "api", "part": "out"},
    {"mode": "api", "sources": False}, {"mode": "api+aten"}, {"grad": True}, {"sources": False},
    {"part": "in"}, {"part": "out"}, {"apis": "add,mm,cat"}, {"apis": "!add"}, {"every": 2},
    {"last": 2}, {"layers": "layers.1"}, {"contains": "mm"}, {"ids": "1"},
    {"grad": True, "phase": "forward"}, {"weights": True}, {"stats_only": False}, {"time": 1},
]  # fmt: skip


def differences(a, b):
    return [
        (name, x, y) for name in a for x, y in zip(a[name], b[name], strict=False) if x != y
    ] or [(name, len(a[name]), len(b[name])) for name in a if len(a[name]) != len(b[name])]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_and_without_it_all_rows_are_equal(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Model()
    with_it = tables(recorded(tmp_path, "with", model, **options))
    off(monkeypatch)
    without = tables(recorded(tmp_path, "without", model, **options))
    assert with_it["records"]
    assert differences(with_it, without)[:3] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_language_model_all_rows_are_equal(dtype, tmp_path, monkeypatch):
    model, ids = llama().to(dtype), torch.tensor([[5, 7, 9, 11]])
    with_it = tables(recorded(tmp_path, "with", model, ids))
    off(monkeypatch)
    without = tables(recorded(tmp_path, "without", model, ids))
    assert len(with_it["operators"]) > 100
    assert differences(with_it, without)[:3] == []


def test_nearly_all_operators_and_views_are_noted(tmp_path, monkeypatch):
    events = played(monkeypatch)
    run = recorded(tmp_path, "run", llama(), torch.tensor([[5, 7, 9, 11]]))
    operators = sum(len(event) == 5 for event in events)
    # each kind goes the long way once, and so does each new call stack
    assert operators > 0.6 * len(run.operators())
    assert sum(len(event) == 4 for event in events) > 50


def test_nearly_all_functions_and_their_views_are_noted(tmp_path, monkeypatch):
    events = played(monkeypatch)
    run = recorded(tmp_path, "run", llama(), torch.tensor([[5, 7, 9, 11]]), mode="module+api")
    functions = sum(len(event) == 5 and event[4] == "api" for event in events)
    assert functions > 0.6 * len(run.operators())
    assert sum(len(event) == 1 for event in events) > 0.9 * functions  # their ends
    views = [event for event in events if len(event) == 4]
    assert len(views) > 50
    assert sum("slice" in repr(event[2]) for event in views) > 5  # halves that are rotated


def test_functions_that_copy_instead_of_making_a_view_are_noted(tmp_path, monkeypatch):
    class Copies(torch.nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x.to(torch.float64).t().contiguous().reshape(-1, 4)[[0, 2, 1]].to(torch.float32)
            return x

    events = played(monkeypatch)
    recorded(tmp_path, "run", torch.nn.Sequential(Copies()), mode="api")
    noted = collections.Counter(
        event[0].name for event in events if len(event) == 5 and event[4] == "api"
    )
    names = ("Tensor.to", "Tensor.contiguous", "Tensor.__getitem__")
    assert all(noted[name] >= 6 for name in names)  # each call stack goes the long way once


class _Reserved(torch.Tensor):
    """Knows two functions, and no other one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.Tensor.to, torch.Tensor.reshape):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


def test_what_looks_for_views_asks_no_tensor_of_a_class_of_its_own(tmp_path):
    class Careful(torch.nn.Module):
        def forward(self, x):
            x.to(torch.float64).reshape(-1)
            torch.nn.UninitializedParameter().to(torch.float64)
            return torch.ones(2)

    model = torch.nn.Sequential(Careful())
    with ld.dump(model, name="run", path=tmp_path, mode="module+api", stats_only=True) as run:
        model(torch.ones(4).as_subclass(_Reserved))
    assert len(run.to_pandas())


def test_sizes_of_a_tensor_are_noted_as_arguments(tmp_path, monkeypatch):
    class Sized(torch.nn.Module):
        def forward(self, x):
            for _ in range(9):
                x = x.view(-1).view(x.shape)
            return x + 1

    events = played(monkeypatch)
    recorded(tmp_path, "run", torch.nn.Sequential(Sized()), mode="api")
    assert sum(len(event) == 4 and event[2] == ((3, 4),) for event in events) > 20


class _Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(torch.overrides.resolve_name(func))
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["aten", "api"])
@pytest.mark.parametrize("mode", [_Seen, _Dispatched])
def test_modes_of_the_program_see_what_they_see_without_a_recording(
    mode, level, tmp_path, monkeypatch
):
    model, ids = llama(), torch.tensor([[5, 7, 9, 11]])
    with torch.no_grad(), mode() as plain:
        expected = model(ids).logits
    rows = []
    for name in ("with", "without"):
        if name == "without":
            off(monkeypatch)
        options = {"mode": f"module+{level}", "stats_only": True, "tokens": "all", "path": tmp_path}
        with torch.no_grad(), mode() as seen, ld.dump(model, name=name, **options) as run:
            seen.names.clear()
            logits = model(ids).logits
            names = list(seen.names)
        assert torch.equal(logits, expected)
        assert names == plain.names
        rows.append(tables(run))
    assert differences(*rows)[:3] == []


def test_operators_of_other_threads_are_recorded_beside_those_that_are_noted(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}
    with torch.no_grad(), ld.dump(model, name="run", **options) as run:
        threads = [threading.Thread(target=work, args=(model,)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert run.info()["complete"]
    assert len(run.operators().query("op == 'Aten.gelu'")) == 4 * 20


def work(model):
    with torch.no_grad():
        for _ in range(20):
            model(torch.ones(2, 4))


@pytest.mark.parametrize("level", ["aten", "api"])
def test_what_an_operator_raises_reaches_the_program_with_its_inputs_recorded(level, tmp_path):
    class Fails(torch.nn.Module):
        def forward(self, x):
            for _ in range(3):  # the first one goes the long way
                with contextlib.suppress(RuntimeError):
                    torch.mm(x, x)
            return torch.mm(x, x)

    model = Fails()

    options = {"mode": f"module+{level}", "stats_only": True, "tokens": "all", "path": tmp_path}
    with (
        pytest.raises(RuntimeError, match="cannot be multiplied"),
        torch.no_grad(),
        ld.dump(model, name="run", **options),
    ):
        model(torch.ones(2, 3))
    run = ld.open_run(tmp_path / "run")
    assert run.info()["ended_by"] == "RuntimeError"
    calls = [(each.site.call, each.site.role) for each in run.records() if each.op.endswith(".mm")]
    assert calls == [(call, "input") for call in range(4) for _ in range(2)]


def test_a_tape_watches_once_and_takes_no_nonsense():
    tape = native.tape(False)
    with pytest.raises(ValueError, match="7 arguments"):
        tape.watch({}, None)
    tape.watch({}, None, {}, {}, None, True, True)
    with pytest.raises(ValueError, match="once"):
        tape.watch({}, None, {}, {}, None, True, True)


def test_calls_of_a_gate_without_a_tape_go_the_long_way():
    class Mode(native.gate_class()):
        tape = None

        def slowly(self, *given):
            return given

    assert Mode().__torch_dispatch__(1, (), ()) == (1, (), ())
    assert Mode().__torch_dispatch__(1, (), (), None) == (1, (), (), None)
    assert Mode().__torch_dispatch__(1) == (1,)


def test_neither_operators_nor_their_tensors_are_kept(tmp_path):
    """Each is let go when the recording ends: a program may run for months."""
    gc.collect()
    there = gc.get_objects()  # held: what other tests left behind isn't freed while this one counts
    theirs = {id(each) for each in there}

    def kept(*kinds):
        return sum(isinstance(each, kinds) and id(each) not in theirs for each in gc.get_objects())

    model = torch.nn.Linear(4, 4)
    before = None
    for _ in range(4):
        options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}
        with torch.no_grad(), ld.dump(model, name="run", **options):
            for _ in range(30):
                model(torch.ones(2, 4))
        gc.collect()
        now = kept(native.seen_class()), kept(AtenMode, torch.Tensor)
        assert before is None or now == before
        before = now


def test_code_that_is_compiled_anew_is_one_place_and_is_noted(tmp_path, monkeypatch):
    events, kinds = played(monkeypatch), []
    of = call_stacks.CallStacks.of.__func__

    def keep(cls, recorder):
        kinds.append(of(cls, recorder))
        return kinds[-1]

    monkeypatch.setattr(call_stacks.CallStacks, "of", classmethod(keep))
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}
    sizes = []
    model = torch.nn.Sequential(Executed())
    with torch.no_grad(), ld.dump(model, name="more", **options) as run:
        for _ in range(40):
            model(torch.ones(2))
            stacks = kinds[-1]
            sizes.append((len(stacks.numbers), len(stacks.lines), len(stacks.kinds.codes)))
    # Python rewrites code that ran some times, which moves places in it once
    assert sizes[-20] == sizes[-1]
    assert len(run.operators()) == 80
    # the first operator of new code goes the long way, which makes the code known
    assert sum(len(event) == 5 for event in events) >= 35


def test_functions_that_give_no_tensors_or_run_others_are_recorded_as_without_it(
    tmp_path, monkeypatch
):
    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.MultiheadAttention(4, 2)
            self.cell = torch.nn.LSTM(4, 4)

        def forward(self, x):
            x[0] = 2.0
            x[:, x[0] > 0] += 1
            torch.nn.init.zeros_(x[1])
            y, _ = self.inner(x, x, x, need_weights=True)
            z, (h, c) = self.cell(x)
            kept = torch.unique(x, return_counts=True), torch.split(z, 1), torch.aminmax(y)
            with contextlib.suppress(TypeError):
                torch.add(x, "nothing")
            with contextlib.suppress(RuntimeError):
                torch.cat([x, torch.ones(9, 9)])
            return torch.einsum("ij,kj->ik", x, h), kept, torch.where(x > 0), y.mul_(2), c.T

    torch.manual_seed(0)
    model = Nested()
    for name, mode in (("functions", "module+api"), ("both", "module+api+aten")):
        with_it = tables(recorded(tmp_path, name, model, mode=mode))
        with monkeypatch.context() as patch:
            off(patch)
            without = tables(recorded(tmp_path, f"{name}2", model, mode=mode))
        assert differences(with_it, without)[:3] == []


def test_an_interrupt_while_it_looks_into_an_object_reaches_the_program(tmp_path):
    class Cache(collections.abc.Mapping):
        """Its keys take as long as they need to be interrupted in."""

        def __getitem__(self, name):
            return torch.ones(2)

        def __len__(self):
            return 1

        def __iter__(self):
            yield "key"
            if armed:
                armed.clear()
                signal.raise_signal(signal.SIGINT)

    class Layer(torch.nn.Module):
        def forward(self, x, cache):
            return x + 1

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x, cache):
            return self.layer(x, cache)

    armed, model = [], Outer()
    options = {"stats_only": True, "tokens": "all", "path": tmp_path}
    with torch.no_grad(), ld.dump(model, name="run", **options) as run:
        model(torch.ones(2), Cache())
        armed.append(True)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2), Cache())
        model(torch.ones(2), Cache())
    assert run.info()["complete"]
