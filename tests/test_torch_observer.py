"""Operators told by torch's own observer: the rows are those of a dispatch mode, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5Model,
    WhisperConfig,
    WhisperModel,
)

import llmdebug_nb as ld
from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.operators.tape_modes import NotingMode
from llmdebug_nb.capture.tape import native, torch_observer
from llmdebug_nb.cli import main
from models import llama
from test_operator_tape import OPTIONS, Model, Replaced, differences, recorded
from test_tape import tables

pytestmark = pytest.mark.skipif(native.tape(False) is None, reason="the tape was not built")


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory):
    """The observer, compiled for this PyTorch; where there is no compiler, all is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        torch_observer._load.cache_clear()
        if not (os.environ.get("CXX") or torch_observer._compilers()):
            pytest.skip("no C++ compiler")
        torch_observer.build()
        assert torch_observer.why_not() is None
        yield
    torch_observer._load.cache_clear()


@contextlib.contextmanager
def by_mode():
    """Let a dispatch mode see operators, as without a library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_observer, "observer", lambda: None)
        yield


@pytest.fixture
def observed(monkeypatch):
    """How many root calls torch told the operators of."""
    count, observe = [], NotingMode.observe

    def counted(mode):
        done = observe(mode)
        count.extend([done] * done)
        return done

    monkeypatch.setattr(NotingMode, "observe", counted)
    return count


def rows(path, name, model, call, context=torch.no_grad, **options):
    """Record a call; return all rows, and what came out."""
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", **options}
    torch.manual_seed(1)
    with context(), ld.dump(model, name=name, path=path, **options) as run:
        outputs = [call(model), call(model)]
    assert run.info()["complete"]
    assert not run.meta.get("problems")
    return tables(run), outputs


def same_both_ways(path, model, call, context=torch.no_grad, **options):
    """Assert that the rows are equal, and that the model gives what it gives without us."""
    told, outputs = rows(path, "told", model, call, context, **options)
    with by_mode():
        seen, _ = rows(path, "seen", model, call, context, **options)
    assert len(told["operators"]) > 0
    for found in (told, seen):  # the values that memory had are nobody's
        found["records"] = [row for row in found["records"] if "Aten.empty" not in row[7]]
    assert differences(told, seen)[:3] == []
    torch.manual_seed(1)
    with context():
        plain = [call(model), call(model)]
    torch.testing.assert_close(outputs, plain, rtol=0, atol=0, equal_nan=True)
    return told


class Copied(Replaced):
    """Gets other memory in each step, without the detour over numpy."""

    def forward(self, x):
        result = (x @ self.weight).sum() + x @ self.own
        values = self.weight.data.clone()
        values[0, 3] += 1
        self.weight.data = values
        return result


# torch calls the operator behind `from_numpy` through Python under a dispatch mode alone, where a
# function mode sees it
ATEN = [each for each in OPTIONS if "aten" in each.get("mode", "aten") and not each.get("grad")]


@pytest.mark.parametrize("options", ATEN, ids=str)
def test_all_rows_are_those_of_a_dispatch_mode(options, tmp_path, observed):
    torch.manual_seed(0)
    model = Model()
    model.layers[3] = Copied()
    del model.layers[-1]  # what torch resolves has no rows
    told = tables(recorded(tmp_path, "told", model, **options))
    notes = {"stats_only", "time", "layers", "contains", "ids"}.isdisjoint(options)
    assert bool(observed) == notes
    with by_mode():
        seen = tables(recorded(tmp_path, "seen", model, **options))
    assert told["records"]
    assert differences(told, seen)[:3] == []


def tiny(config, cls, **sizes):
    torch.manual_seed(0)
    return cls._from_config(config(vocab_size=99, **sizes), experts_implementation="eager").eval()


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.tensor([[5, 7, 9, 11, 2]])
MODELS = {
    "llama": (llama, lambda m: m(IDS).logits),
    "llama that generates": (
        llama,
        lambda m: m.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0),
    ),
    "gpt2": (
        lambda: tiny(GPT2Config, GPT2LMHeadModel, n_embd=32, n_layer=2, n_head=4),
        lambda m: m(IDS).logits,
    ),
    "bert": (
        lambda: tiny(BertConfig, BertModel, **SIZES),
        lambda m: m(IDS, attention_mask=torch.tensor([[1, 1, 1, 0, 0]])).last_hidden_state,
    ),
    "t5": (
        lambda: tiny(T5Config, T5Model, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        lambda m: m(input_ids=IDS, decoder_input_ids=IDS[:, :3]).last_hidden_state,
    ),
    "mixtral": (
        lambda: tiny(
            MixtralConfig, MixtralForCausalLM, **SIZES, num_local_experts=4, num_key_value_heads=2
        ),
        lambda m: m(IDS).logits,
    ),
    "whisper": (
        lambda: tiny(
            WhisperConfig, WhisperModel, d_model=32, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_source_positions=20, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        ),
        lambda m: m(torch.randn(1, 80, 40), decoder_input_ids=IDS).last_hidden_state,
    ),
}  # fmt: skip
CONTEXTS = {
    "no_grad": torch.no_grad,
    "autocast": lambda: _both(torch.no_grad(), torch.autocast("cpu", torch.bfloat16)),
}


@contextlib.contextmanager
def _both(first, second):
    with first, second:
        yield


@pytest.mark.parametrize("within", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_of_real_models_all_rows_are_those_of_a_dispatch_mode(name, within, tmp_path, observed):
    make, call = MODELS[name]
    same_both_ways(tmp_path, make(), call, CONTEXTS[within])
    assert observed


class Called(torch.nn.Module):
    """Calls a function on its input, between two layers."""

    def __init__(self, work):
        super().__init__()
        self.first, self.work, self.last = torch.nn.Linear(4, 4), work, torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.work(self.first(x)))


class Own(torch.Tensor):
    """A class of tensors that the program makes of what torch made."""


def of_other_classes(x):
    y = Own(2, 4).zero_() + torch.nn.Parameter(x * 2)[:2] + torch.Tensor(2, 4).fill_(1.0)
    return (x + 1).as_subclass(Own) + torch.Tensor._make_subclass(Own, x.exp()) + y.sum()


class Doubled(TorchDispatchMode):
    """A mode of the program that runs more than it is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 0 if isinstance(result, torch.Tensor) else result


class Wrapped(torch.Tensor):
    """A tensor that runs operators of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})) * 1)


def under_a_mode(x):
    with Doubled():
        return torch.nn.functional.gelu(x).t().t()


def hidden_from_modes(x):
    with torch._C._DisableTorchDispatch():
        y = x.exp()
    return y + x


def with_errors(x):
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.mm(x, torch.ones(9, 9))
        try:
            torch.cat([x, torch.ones(1)])
        except RuntimeError:
            x = x + 1  # while an exception is handled
    return x


def with_gradients(x):
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        torch.nn.functional.silu(y).sum().backward()
    return x + y.grad


def in_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ x
    return y.float()


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, -1)
    y = torch.cat([parts[1], parts[0]], dim=-1)
    return torch.nn.functional.softmax(y, dim=-1, dtype=torch.float64).to(torch.float32)


@torch.library.custom_op("llmdebug_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x.exp() * by


@torch.library.custom_op("llmdebug_tests::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


def by_custom_operators(x):
    fill(x)
    return scaled(x) + scaled(x, 3.0)


def with_arguments(x):
    y = torch.arange(0, 4, dtype=torch.float32) + torch.full((3, 4), 2, dtype=torch.float32)
    y = y + torch.zeros_like(x, memory_format=torch.preserve_format) + x.to(torch.float64).float()
    y = y + torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) + x.std(0, correction=0)
    y[:, torch.tensor([0, 2])] += 1
    out = torch.zeros(3, 4)
    return (
        torch.add(y, x, alpha=2, out=out).clamp_(min=-9.0) + torch.einsum("ij,kj->ik", x, x)[:, :1]
    )


WORK = [
    under_a_mode, hidden_from_modes, with_errors, with_gradients, in_autocast, scripted,
    by_custom_operators, with_arguments,
    lambda x: torch.vmap(lambda a: a.sum() * a)(x),
    lambda x: torch.func.grad(lambda a: (a * a).sum())(x),
    lambda x: Wrapped(x).mul(2).inner,
    lambda x: (x.to_sparse() @ torch.ones(4, 4)) + x.to("meta").mul(2).numel(),
    lambda x: torch.bernoulli(x.sigmoid()) + torch.randn_like(x),
    lambda x: torch.nn.utils.rnn.pad_sequence([*x]).t() + x[:, None].expand(3, 3, 4)[0].t().t(),
]  # fmt: skip


@pytest.mark.parametrize("work", WORK, ids=lambda work: getattr(work, "__name__", "work"))
def test_whatever_a_program_does_all_rows_are_those_of_a_dispatch_mode(work, tmp_path, observed):
    torch.manual_seed(0)
    model = Called(work)
    same_both_ways(tmp_path, model, lambda m: m(torch.ones(3, 4) / 3).detach())
    assert observed


def test_what_torch_makes_is_left_for_the_program_to_class(tmp_path):
    """Under a dispatch mode, torch refuses to make it an object of another class."""
    model = Called(of_other_classes)
    told, outputs = rows(tmp_path, "told", model, lambda m: m(torch.ones(3, 4)[:2]))
    assert {"Aten.empty.memory_format", "Aten.exp"} <= {row[5] for row in told["operators"]}
    with torch.no_grad():
        assert torch.equal(outputs[0], model(torch.ones(3, 4)[:2]))


def test_a_lazy_negation_is_resolved_without_a_row_of_its_own(tmp_path):
    """Torch resolves it as it runs the operator, which a dispatch mode sees as one more."""
    model = Called(lambda x: torch.complex(x, x).conj().imag * 2)
    told, _ = rows(tmp_path, "told", model, lambda m: m(torch.ones(3, 4)))
    with by_mode():
        seen, _ = rows(tmp_path, "seen", model, lambda m: m(torch.ones(3, 4)))
    names = [[row[5] for row in found["operators"]] for found in (told, seen)]
    assert [name for name in names[1] if name != "Aten.clone"] == names[0]
    assert "Aten.clone" in names[1]


def test_operators_inside_of_one_of_higher_order_are_recorded(tmp_path):
    """A dispatch mode sees it as a whole, and makes no row of it."""
    model = Called(lambda x: torch.cond(x.sum() > 9, lambda a: a.exp(), lambda a: a.sin(), (x,)))
    told, _ = rows(tmp_path, "told", model, lambda m: m(torch.ones(3, 4)))
    with by_mode():
        seen, _ = rows(tmp_path, "seen", model, lambda m: m(torch.ones(3, 4)))
    names = [[row[5] for row in found["operators"]] for found in (told, seen)]
    assert [name for name in names[0] if name != "Aten.sin"] == names[1]
    assert names[0].count("Aten.sin") == 2


@pytest.mark.parametrize("within", [torch.enable_grad, torch.inference_mode])
def test_with_gradients_on_or_in_inference_mode_a_dispatch_mode_sees_operators(
    within, tmp_path, observed
):
    model = torch.nn.Linear(4, 4)
    told, _ = rows(tmp_path, "on", model, lambda m: m(torch.ones(3, 4)), within)
    assert told["operators"]
    assert not observed


def test_the_program_runs_the_operators_that_it_runs_without_a_recording(tmp_path):
    """Under a dispatch mode, torch makes views by another operator."""
    model = Called(lambda x: x.t()[None].reshape(4, 3).t())
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}

    def views(recording):
        with torch.no_grad(), recording, torch.profiler.profile() as found:
            model(torch.ones(3, 4))
        kinds = {"aten::_reshape_alias", "aten::view"}
        return [event.name for event in found.events() if event.name in kinds]

    plain = views(contextlib.nullcontext())
    assert plain == ["aten::_reshape_alias"]
    told = views(ld.dump(model, name="told", **options))
    assert [name for name in told if name != "aten::view"] == plain  # our own work makes views, too
    with by_mode():
        seen = views(ld.dump(model, name="seen", **options))
    assert "aten::_reshape_alias" not in seen


def test_afterwards_nothing_watches(tmp_path):
    model = torch.nn.Linear(4, 4)
    rows(tmp_path, "run", model, lambda m: m(torch.ones(3, 4)))
    assert not torch_modes.observed.here
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    told = torch_observer._Told()
    observer = torch_observer.observer()
    assert observer.start(object(), told)  # none is left from the recording
    try:
        torch.ones(2) + 1
    finally:
        assert observer.stop(told)
        assert not observer.stop(told)
    assert [call[0] for call in told.calls[::2]] == [
        torch.ops.aten.ones.default, torch.ops.aten.add.Tensor,
    ]  # fmt: skip


def test_a_call_that_raises_or_is_stopped_leaves_nothing_behind(tmp_path):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise KeyError((x + 1).shape)

    options = {"mode": "module+aten", "stats_only": True, "path": tmp_path, "tokens": "all"}
    model = Called(Failing())
    with torch.no_grad(), pytest.raises(KeyError), ld.dump(model, name="raises", **options):
        model(torch.ones(3, 4))
    assert not torch_modes.observed.here
    with torch.no_grad(), ld.dump(model, name="again", **options) as run:
        for _ in range(3):
            with contextlib.suppress(KeyError):
                model(torch.ones(3, 4))
    assert len(run.operators().query("op == 'Aten.add.Tensor'")) == 3


def test_two_recordings_and_several_threads_have_all_operators(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}

    def work():
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(2, 4))

    with ld.dump(model, name="one", **options) as one, ld.dump(model, name="two", **options) as two:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for each in [*threads]:
            each.start()
        work()
        for each in threads:
            each.join()
    for run in (one, two):
        assert run.info()["complete"]
        assert len(run.operators().query("op == 'Aten.gelu'")) == 80


def test_a_second_recording_of_a_part_has_none_of_our_own_operators(tmp_path):
    """Whoever began first is told, the other one has a mode; what we run to measure is nobody's."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Called(lambda x: torch.complex(x, x).real))
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}

    def run(name, outer, inner):
        def work():
            with torch.no_grad():
                model(torch.ones(2, 4))

        with outer, ld.dump(model, name=name, **options) as found, inner:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return [row[5] for row in tables(found)["operators"]]

    alone = run("alone", contextlib.nullcontext(), contextlib.nullcontext())
    part = ld.dump(model[0], name="part", **options)
    assert run("beside", contextlib.nullcontext(), part) == alone
    with by_mode():
        assert run("seen", contextlib.nullcontext(), contextlib.nullcontext()) == alone


def test_inference_mode_within_a_call_shows_what_torch_runs(tmp_path):
    def work(x):
        with torch.inference_mode():
            y = torch.nn.functional.dropout(x, 0.5)
        return x + y.shape[0]

    told, _ = rows(tmp_path, "told", Called(work), lambda m: m(torch.ones(3, 4)))
    assert "Aten.bernoulli_.float" in [row[5] for row in told["operators"]]


@pytest.mark.parametrize("broken", ["home", "owner"])
def test_a_place_that_can_not_be_looked_at_is_a_reason_and_no_error(broken, monkeypatch):
    built_in = os.environ["TORCH_EXTENSIONS_DIR"]
    torch_observer._load.cache_clear()
    try:
        if broken == "home":
            monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
            monkeypatch.setattr(torch_observer.Path, "home", lambda: 1 / 0)
            expected = "can't be used"
        else:
            torch_observer.place().chmod(0o777)
            expected = "can be written by others"
        assert torch_observer.observer() is None
        assert expected in torch_observer.why_not()
    finally:
        monkeypatch.undo()
        assert os.environ["TORCH_EXTENSIONS_DIR"] == built_in
        if broken == "owner":
            torch_observer.place().chmod(0o700)
        torch_observer._load.cache_clear()
        assert torch_observer.why_not() is None


def test_an_operator_that_is_lost_is_a_problem_of_the_dump(tmp_path, monkeypatch):
    def find(mode, name, overload):
        mode.lost(f"{name} is unknown")

    monkeypatch.setattr(NotingMode, "find", find)
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}
    model = Called(lambda x: torch.special.i1e(x))
    with torch.no_grad(), ld.dump(model, name="run", **options) as run:
        model(torch.ones(3, 4))
    assert "aten::special_i1e is unknown" in str(run.meta["problems"])


class Late(Exception):
    """What the program's handler of a signal raises."""


def test_exceptions_of_a_handler_reach_the_program_and_none_comes_twice(tmp_path):
    """But for those that come within a finalizer, which Python itself drops."""
    model, fired, raised = llama(), 0, 0
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}

    def raise_late(*_):
        nonlocal fired
        fired += 1
        raise Late

    before = signal.signal(signal.SIGALRM, raise_late)
    try:
        with torch.no_grad(), ld.dump(model, name="run", **options) as run:
            for number in range(40):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0004 * number)
                    while fired == number:
                        model(IDS)
                except Late:
                    raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert fired == 40
    assert 0.8 * fired < raised <= fired
    assert len(ld.open_run(run.path).operators()) > 100
    assert not torch_modes.observed.here
    assert torch._C._is_torch_function_enabled()
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


class Gone(BaseException):
    """What ends a thread."""


def test_a_thread_that_ends_in_the_midst_of_a_call_ends_nothing_else(tmp_path):
    def leave():
        raise Gone

    class Leaving(torch.nn.Module):
        def forward(self, x):
            leave()

    model, caught = Called(Leaving()), []
    options = {"mode": "module+aten", "stats_only": True, "tokens": "all", "path": tmp_path}

    def work():
        with torch.no_grad():
            try:
                model(torch.ones(3, 4))
            except Gone:
                caught.append(1)

    with ld.dump(model, name="run", **options) as run:
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert len(caught) == 3
    assert len(run.operators()) == 3 * 1


def test_an_operator_that_is_defined_anew_is_recorded_as_it_is_now(tmp_path):
    """As a cell of a notebook does that is run again."""

    def define(count):
        library = torch.library.Library("llmdebug_anew", "FRAGMENT")
        more = ", Tensor other" * (count - 1)
        library.define(f"work(Tensor x{more}) -> Tensor")
        library.impl("work", lambda *given: sum(given) + 0.5, "CPU")
        return library

    def work(x):
        for count in (1, 2, 1):
            library = define(count)
            x = torch.ops.llmdebug_anew.work.default(*[x] * count)
            library._destroy()
            torch.ops.llmdebug_anew._dir.clear()
            vars(torch.ops.llmdebug_anew).pop("work", None)
        return x.relu()

    told, _ = rows(tmp_path, "told", Called(work), lambda m: m(torch.ones(3, 4)))
    names = [row[5] for row in told["operators"]]
    assert names.count("Aten.relu") == 2
    assert sum("work" in name for name in names) == 6
    given = [row for row in told["records"] if "work" in row[7] and row[5] == "input"]
    assert len(given) == 2 * (1 + 2 + 1)


@pytest.mark.parametrize("grad", [True, False])
def test_nested_tensors_are_no_trouble(grad, tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    context = torch.enable_grad if grad else torch.no_grad
    told, _ = rows(
        tmp_path,
        "told",
        Called(lambda x: x * 2),
        lambda m: m(nested).to_padded_tensor(0.0),
        context,
    )
    assert told["operators"]


def test_a_composite_operator_that_computes_itself_is_recorded(tmp_path):
    model = Called(lambda x: torch.nn.functional.max_pool1d(x[None], 2).repeat(1, 1, 2)[0])
    told, _ = rows(tmp_path, "told", model, lambda m: m(torch.ones(3, 4)))
    assert [row[5] for row in told["operators"]].count("Aten.max_pool1d") == 2


def test_no_tensor_lives_longer(tmp_path):
    gone = []

    def work(x):
        y = x + 1
        weakref.finalize(y.untyped_storage(), gone.append, 1)
        del y
        assert gone.pop() == 1
        return x * 2

    model = Called(work)
    rows(tmp_path, "run", model, lambda m: m(torch.ones(3, 4)))
    gc.collect()


def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = torch_observer.place()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"none")
    torch_observer._load.cache_clear()
    try:
        assert torch_observer.observer() is None
        assert "can't be used" in torch_observer.why_not()
        library.unlink()
        torch_observer._load.cache_clear()
        assert torch_observer.why_not() == "llmdebug build makes it for this PyTorch"
    finally:
        monkeypatch.undo()
        torch_observer._load.cache_clear()
        assert torch_observer.why_not() is None


def test_the_command_builds_it_and_says_why_it_can_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "it"))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert main(["build"]) == 3
    assert "no-compiler" in capsys.readouterr().err
    monkeypatch.setenv("CXX", f"{sys.executable} -c raise(SystemExit('error:_it_is_no_compiler'))")
    assert main(["build"]) == 3
    assert "can't compile the observer for torch" in capsys.readouterr().err
    assert not [*(tmp_path / "it" / "llmdebug_nb").iterdir()]


def test_the_version_says_whether_it_is_used():
    command = [sys.executable, "-m", "llmdebug_nb.cli", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    assert "with the observer of operators" in said
    off = {**os.environ, "LLMDEBUG_NATIVE": "0"}
    said = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", env=off
    ).stdout
    assert "without the observer of operators" in said
