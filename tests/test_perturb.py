"""Perturbations: planted sensitive operators come first, and nothing of the program changes."""

from __future__ import annotations

import copy
import math
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import llmdebug_nb as ld
import models
from llmdebug_nb.app.perturbing.search import most_runs, search
from llmdebug_nb.capture import moves
from llmdebug_nb.core.errors import CaptureError, CompareError, OptionError
from llmdebug_nb.core.perturbations import KINDS, Moved, Unit


class Function(nn.Module):
    """A model that computes one function of its input and of a parameter of ones."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


class Robust(nn.Module):
    """A residual network whose layers are alike."""

    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def perturb(model: nn.Module, inputs: Any, **options: Any) -> Any:
    return ld.perturb(model, inputs, progress=False, **options)


def first(model: nn.Module, inputs: Any, kind: str = "ulp", **options: Any) -> Moved:
    return perturb(model, inputs, kinds=kind, **options).rows[0]


# -- what is ranked first -------------------------------------------------------------------------


def cancels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x - 100.0) * w * 2.0 + 1.0


def sharp_softmax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * w * 2.0


def norm_of_nearly_equal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=0.0) * w * 0.5


PLANTED = [
    (cancels, "sub", values(16, 32) * 1e-2 + 100.0),
    (sharp_softmax, "softmax", values(16, 32) + 1e5),
    (norm_of_nearly_equal, "layer_norm", values(16, 32) * 1e-3 + 100.0),
]


@pytest.mark.parametrize("mode", ["api", "aten"])
@pytest.mark.parametrize(("function", "operator", "x"), PLANTED)
def test_a_planted_sensitive_operator_comes_first(function, operator, x, mode):
    rows = perturb(Function(function), x, kinds="ulp", mode=mode).rows
    assert operator in rows[0].units[0].op
    assert rows[0].amplification > 30
    assert function.__name__ in rows[0].units[0].source
    assert len(rows) > 2
    assert all(row.amplification < 3 for row in rows[1:])


def test_what_cancellation_amplifies_is_what_the_formula_says():
    x = values(16, 32, dtype=torch.float64) * 1e-2 + 100.0
    row = first(Function(lambda x, w: x - 100.0, torch.float64), x)
    assert row.amplification == pytest.approx(float(x.norm() / (x - 100.0).norm()), rel=0.01)


def test_the_first_module_is_the_one_around_the_planted_operator():
    model = nn.Sequential(nn.Linear(32, 32), Function(cancels), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    assert first(model, values(16, 32), mode="module").units[0].path == "1"


def test_a_robust_model_ranks_evenly():
    found = perturb(Robust(), values(32, 64), kinds=("ulp", "noise"), top=None)
    for kind in ("ulp", "noise"):
        linear = [r.amplification for r in found.result.rows[kind] if "linear" in r.units[0].op]
        assert len(linear) == 4
        assert max(linear) / min(linear) < 3
        assert max(r.amplification for r in found.result.rows[kind]) < 3


class Rounding(nn.Module):
    """Attention in float32 around a softmax in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.softmax = nn.Linear(32, 32), Softmax()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.before(x).bfloat16()).float() @ self.before.weight


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)


def test_more_precision_moves_the_result_most_where_digits_are_lost():
    model, x = Rounding(), values(16, 32)
    found = perturb(model, x, kinds="precise", mode="module")
    row = found.rows[0]
    assert row.units[0].path == "softmax"
    with torch.no_grad():
        before = model(x)
        scores = model.before(x).bfloat16().float()
        exact = torch.softmax(scores, -1) @ model.before.weight
    assert row.moved == pytest.approx(float((exact - before).norm() / before.norm()), rel=1e-3)
    assert all(other.moved < row.moved / 3 for other in found.rows[1:] if other.units[0].path)


def test_the_math_kernel_of_one_attention_moves_what_the_switch_of_torch_moves():
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x) + x

    model, x = Attention(), values(1, 2, 16, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x).double()
        with sdpa_kernel(SDPBackend.MATH):
            after = model(x).double()
    row = first(model, x, "math_sdpa")
    assert row.moved == pytest.approx(float((after - before).norm() / before.norm()))
    assert row.moved > 0
    assert "scaled_dot_product_attention" in row.units[0].op


# -- figures beside independent calculations ------------------------------------------------------


class Watched(nn.Module):
    """Keeps what its parts are given, outside of the model's own state."""

    def __init__(self, inside: nn.Module, seen: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.inside, self.seen = inside, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen(x.clone())
        return self.inside(x)


@pytest.mark.parametrize("kind", ["ulp", "noise"])
def test_moved_and_amplification_are_those_of_the_jacobian(kind):
    torch.manual_seed(0)
    seen: list[torch.Tensor] = []
    inside = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Softmax(-1)).double()
    model = nn.Sequential(nn.Linear(8, 8).double(), Watched(inside, seen.append))
    x = values(4, 8, dtype=torch.float64)
    found = perturb(model, x, kinds=kind, mode="module", top=None)
    row = next(row for row in found.rows if row.units[0].path == "1")
    base = seen[0]
    moved = next(each for each in seen if row.given == pytest.approx(
        float((each - base).norm() / base.norm()), rel=1e-9))  # fmt: skip
    inside.requires_grad_(False)
    result, slope = torch.func.jvp(inside, (base,), (moved - base,))
    tolerance = {"ulp": 0.5, "noise": 0.05}[kind]  # of rounding, and of the curvature
    assert row.moved == pytest.approx((slope.norm() / result.norm()).item(), rel=tolerance)
    assert row.amplification == pytest.approx(row.moved / row.given)


def test_result_and_loss_move_as_in_a_run_that_is_perturbed_by_hand():
    model, ids = models.llama(), models.prompt(12)
    taken: list[torch.Tensor] = []
    model.lm_head = Watched(model.lm_head, taken.append)
    inputs = {"input_ids": ids, "labels": ids}
    found = perturb(model, inputs, kinds="noise", mode="module")
    assert (found.result.result, found.result.positions) == ("logits", 12)
    head = next(row for row in found.rows if row.units[0].path == "lm_head")
    hidden = next(each for each in taken if head.given == pytest.approx(
        float((each - taken[0]).norm() / taken[0].norm()), rel=1e-5))  # fmt: skip
    with torch.no_grad():
        before, after = (model.lm_head.inside(each) for each in (taken[0], hidden))
    assert head.moved == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    assert head.flips == int((after.argmax(-1) != before.argmax(-1)).sum())
    loss = [float(functional.cross_entropy(each[0, :-1], ids[0, 1:])) for each in (before, after)]
    assert head.loss == pytest.approx(abs(loss[1] - loss[0]) / loss[0], rel=1e-2, abs=1e-6)


def test_the_number_of_flips_is_counted_by_position():
    ties = Function(lambda x, w: x * 1)
    x = torch.ones(200, 2)
    x[:, 1] += 2.0**-22  # two units above: a move of one each may turn the order
    row = first(ties, x)
    assert 25 < row.flips < 75  # of 200: one in four goes up on the left and down on the right


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.lists(st.floats(-1e4, 1e4, allow_nan=False), min_size=1, max_size=20),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_move_of_one_ulp_is_to_a_neighbour(dtype, numbers, seed):
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    moved = moves.by_one_ulp(x, torch.Generator().manual_seed(seed))
    if dtype in (torch.float32, torch.float64):
        up = torch.nextafter(x, torch.full_like(x, math.inf))
        down = torch.nextafter(x, torch.full_like(x, -math.inf))
        assert bool(((moved == up) | (moved == down) | ((x == 0) & (moved == 0))).all())
    assert bool((moved[x == 0] == 0).all())
    assert bool((moved[x != 0] != x[x != 0]).all())
    gap = (moved.double() - x.double()).abs()
    assert bool((gap <= torch.finfo(dtype).eps * x.double().abs() + 1e-7).all())


@pytest.mark.parametrize("move", [moves.by_one_ulp, moves.by_noise])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_masks_and_bad_values_stay(move, dtype):
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 2.0], dtype=dtype)
    x = torch.cat([x, torch.tensor([torch.finfo(dtype).min, torch.finfo(dtype).max], dtype=dtype)])
    moved = move(x, torch.Generator().manual_seed(1))
    stays = torch.tensor([0, 1, 2, 3, 4, 7, 8])
    assert torch.equal(moved[stays].nan_to_num(5), x[stays].nan_to_num(5))
    assert bool(torch.isfinite(moved[5:7]).all())
    assert move(torch.tensor(3.0), torch.Generator()).shape == ()


def test_noise_is_at_most_half_a_step_of_the_row():
    x = values(20, 50)
    moved = moves.by_noise(x, torch.Generator().manual_seed(1))
    steps = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((moved - x).abs() <= steps * 0.5001).all())
    assert float(((moved - x) / steps).std()) == pytest.approx(1 / math.sqrt(12), rel=0.1)


# -- the search -----------------------------------------------------------------------------------


def units_of(count: int) -> list[Unit]:
    return [Unit(f"layers.{at // 7}/op", at) for at in range(count)]


@given(st.integers(1, 150), st.integers(1, 6), st.integers(0, 1000), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_search_finds_the_worst_knows_each_unit_once_and_keeps_its_promise(
    count, top, seed, few
):
    units = units_of(count)
    draw = np.random.default_rng(seed)
    size = dict(zip(units, draw.uniform(0.5, 1.0, count), strict=True))
    worst = units[seed % count]
    size[worst] = 2.0 * count
    runs = 0

    def measure(several: tuple[Unit, ...]) -> Moved:
        nonlocal runs
        runs += 1
        return Moved("ulp", several, math.sqrt(sum(size[unit] ** 2 for unit in several)))

    rows: list[Moved] = []
    for rows in search(units, measure, top, 0.0, few):
        known = [unit for row in rows for unit in row.units]
        assert sorted(known, key=units.index) == units
        assert len(known) == len(units)
    assert runs <= most_runs(count, top, few)
    assert max(rows, key=lambda row: row.moved or 0.0).units == (worst,)


def test_a_big_model_takes_far_fewer_runs_than_it_has_operators():
    assert most_runs(5000, 10) < 300
    assert most_runs(100, 10) == 101
    assert most_runs(5000, None) == 5001


# -- nothing of the program changes ---------------------------------------------------------------


class Stateful(nn.Module):
    """Has everything that a run may change: statistics, counters, caches, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.seen: list[torch.Tensor] = []
        self.state = {"calls": 0, "last": torch.zeros(8)}
        self.memory = torch.zeros(8)
        self.calls = 0
        self.fails_at, self.error = -1, RuntimeError

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.detach())
        self.state["calls"] += 1
        self.state["last"] += x.detach().mean(0)
        self.memory += 1
        total[0] += 1
        if total[0] == self.fails_at:
            raise self.error("planted")
        if cache is not None:
            cache.append(x)
            x += 1  # its own input
        random.random(), np.random.rand()
        return self.drop(self.linear(self.norm(x))) + self.memory


total = [0]


def snapshot(model: Stateful, x: torch.Tensor, cache: list[torch.Tensor]) -> list[Any]:
    return [
        {name: each.clone() for name, each in model.state_dict().items()},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [id(p.grad) for p in model.parameters()],
        [m.training for m in model.modules()],
        [each.clone() for each in model.seen], copy.deepcopy(model.state), model.memory.clone(),
        id(model.seen), id(model.state), id(model.memory), model.calls,
        x.clone(), [each.clone() for each in cache],
        torch.get_rng_state(), random.getstate(), np.random.get_state(),
        models.hooks_left(model), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        torch.backends.cuda.flash_sdp_enabled(), signal.getsignal(signal.SIGINT),
    ]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(
    st.sampled_from(["module", "api", "aten"]),
    st.booleans(),
    st.sampled_from([None, RuntimeError, KeyboardInterrupt]),
    st.integers(1, 30),
    st.integers(0, 100),
)
@settings(max_examples=10, deadline=None)
def test_model_inputs_random_numbers_and_flags_are_as_before(mode, training, error, at, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    model, x, cache = Stateful().train(training), values(4, 8), [values(2, 2)]
    model(x.clone()).sum().backward()
    total[0] = 0
    if error is not None:
        model.fails_at, model.error = at, error
    before = snapshot(model, x, cache)
    failed = False
    try:
        found = perturb(model, (x, cache), mode=mode)
    except (OptionError, KeyboardInterrupt):
        failed = True
    assert same(before, snapshot(model, x, cache))
    if error is None:
        assert not failed
        assert found.result.spread == 0
    elif not failed and error is KeyboardInterrupt:
        assert found.result.interrupted


def test_an_interrupt_keeps_what_is_known_and_says_so():
    model, x = Stateful().eval(), values(4, 8)
    total[0] = 0
    model.fails_at, model.error = 8, KeyboardInterrupt
    found = perturb(model, x, kinds=("ulp", "noise"))
    assert found.result.interrupted
    assert "interrupted" in str(found)
    rows = found.result.rows["ulp"]
    assert any(row.moved is not None for row in rows)
    assert any("before it was measured" in row.problem for row in rows)
    assert sum(len(row.units) for row in rows) == found.result.units["ulp"]


def test_a_run_that_fails_when_it_is_perturbed_is_a_row_that_says_why():
    def checks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if float(y[0, 0]) != float(x[0, 0]):
            raise ValueError("not what it should be")
        return y + 1

    found = perturb(Function(checks), values(4, 4), kinds="ulp")
    rows = {row.units[0].op: row for row in found.rows}
    assert rows["Tensor.mul"].problem == "ValueError: not what it should be"
    assert rows["Tensor.mul"].moved is None
    assert rows["Tensor.add"].moved is not None
    assert "not what it should be" in str(found)


def test_a_program_that_is_not_deterministic_is_measured_against_itself():
    source = random.Random(0)
    noisy = Function(lambda x, w: (x * w) * (1 + 1e-2 * source.random()) + 1)
    found = perturb(noisy, values(8, 8), kinds="ulp")
    assert 1e-4 < found.result.spread < 1e-1
    assert "not deterministic" in str(found)
    assert not any(row.moved is not None and row.moved > 0.05 for row in found.rows)
    frame = found.to_pandas()
    assert set(frame["above_spread"]) <= {True, False}


def test_functions_as_inputs_run_the_program_of_the_user():
    model = models.llama()
    ids = models.prompt()
    found = perturb(model, lambda: model(ids).logits.softmax(-1), kinds="ulp", mode="module")
    assert {row.units[0].path for row in found.rows} >= {"lm_head", "model.layers.0.mlp"}


def test_nothing_is_left_in_a_model_of_transformers_and_its_cache():
    model, ids = models.llama(), models.prompt()
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        kept = [layer.keys.clone() for layer in past.layers]
        before = model(ids).logits
    perturb(model, {"input_ids": ids, "past_key_values": past}, kinds="ulp", mode="module")
    assert all(torch.equal(a, b.keys) for a, b in zip(kept, past.layers, strict=True))
    assert models.hooks_left(model) == 0
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


# -- options and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    ({"mode": "modul"}, "nearest: module"), ({"kinds": "nois"}, "nearest: noise"),
    ({"kinds": ()}, "expected any of"), ({"top": 0}, "a number from 1"),
    ({"result": "logit"}, "nearest: 0"), ({"result": lambda out: 3}, "not a tensor"),
])  # fmt: skip
def test_wrong_options_say_what_was_expected(options, says):
    with pytest.raises(OptionError, match=says):
        perturb(Robust(1), values(2, 64), **options)


@pytest.mark.parametrize(("model", "inputs", "says"), [
    ("model", values(2, 64), "expected a torch.nn.Module, got str"),
    (Robust(1), 5, "got int"), (Robust(1), values(2, 3), "the model fails on these inputs"),
    (Robust(1), values(2, 64) * math.nan, "no finite number"),
    (Function(lambda x, w: x > w), values(2), "no floating-point tensor"),
    (Robust(1), (value for value in ()), "got generator"),
    (Robust(1), {"x": (value for value in ())}, "can't be copied"),
])  # fmt: skip
def test_wrong_models_and_inputs_say_what_was_expected(model, inputs, says):
    with pytest.raises(OptionError, match=says):
        perturb(model, inputs)


def test_a_recording_that_runs_is_not_disturbed(tmp_path):
    model = Robust(1)
    x = values(2, 64)
    with ld.dump(model, name="run", path=tmp_path):
        model(x)
        with pytest.raises(CaptureError, match="end it"):
            perturb(model, x)


def test_what_can_not_be_moved_is_counted():
    model = Function(lambda x, w: functional.relu_(x * w) + torch.arange(4).sum())
    found = perturb(model, values(4), kinds="ulp")
    assert any("take no floating-point tensor" in note for note in found.result.notes)
    assert sum(len(row.units) for row in found.rows) == found.result.units["ulp"]


def test_every_kind_is_a_row_of_the_table_and_csv_holds_no_formula(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("=cmd<b>", nn.Linear(4, 4))
    found = perturb(model, values(2, 4), mode="module")
    frame = found.to_pandas()
    assert set(frame["kind"]) >= {"ulp", "noise", "precise", "deterministic"} <= set(KINDS)
    assert list(frame["moved"][frame["kind"] == "ulp"]) == sorted(
        frame["moved"][frame["kind"] == "ulp"], reverse=True
    )
    text = found.to_csv(tmp_path / "t.csv").read_text(encoding="utf-8")
    assert "'=cmd" in text
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;" in found._repr_html_()
    assert "ulp: inputs move" in repr(found)


def test_the_example_of_the_documentation_ranks_what_it_says(capsys):
    text = (Path(__file__).parent.parent / "docs" / "perturb.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert "Tensor.sub" in names["found"].rows[0].units[0].op
    assert "ulp: inputs move" in capsys.readouterr().out
    assert all(f"`{kind}`" in text for kind in KINDS)


# -- in a notebook --------------------------------------------------------------------------------


@pytest.fixture
def shell(ipython):
    ipython.user_ns |= {"net": Robust(1), "x": values(2, 64)}
    return ipython


def test_the_magic_shows_a_table(shell):
    found = shell.run_line_magic("llmperturb", "net x --kinds ulp noise --mode aten --top 3")
    assert list(found.result.rows) == ["ulp", "noise"]
    assert "<table>" in found._repr_html_()
    assert "addmm" in str(found)


@pytest.mark.parametrize(("line", "says"), [
    ("net", "INPUTS_EXPR"), ("net y", "nearest: net"), ("x net", "expected a torch.nn.Module"),
    ("net x --kinds ulps", "invalid choice"), ("net x --top 0", "a number from 1"),
    ("net x --result logit", "returns no 'logit'"), ("net x[:,:3]", "fails on these inputs"),
])  # fmt: skip
def test_the_magic_says_in_a_line_what_is_wrong(shell, line, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        shell.run_line_magic("llmperturb", line)


def test_completion_offers_models_then_variables_and_kinds(shell):
    from llmdebug_nb.notebook.completion import _completions

    assert next(text for text, _ in _completions(shell, "%llmperturb ")) == "net"
    assert "x" in [text for text, _ in _completions(shell, "%llmperturb net ")]
    kinds = [text for text, _ in _completions(shell, "%llmperturb net x --kinds ")]
    assert kinds == list(KINDS)


# -- the calibration of a comparison --------------------------------------------------------------


def record(model: nn.Module, name: str, folder: Path, mode: str = "module") -> Any:
    with torch.no_grad(), ld.dump(model, name=name, mode=mode, path=folder) as run:
        model(models.prompt(24))
    return run


def wrong_activation(model: Any) -> Any:
    """Let the activation of the first layer give 0.1 % too much."""
    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.act_fn.register_forward_hook(
        lambda m, args, out: (functional.silu(args[0].float()) * 1.001).to(out.dtype)
    )
    return changed


@pytest.mark.parametrize("mode", ["module", "module+aten"])
def test_right_programs_calibrate_to_no_alarm_and_a_small_bug_is_still_found(tmp_path, mode):
    model = models.llama().bfloat16()
    port = models.llama(attn_implementation="eager").bfloat16()
    port.load_state_dict(model.state_dict())
    golden, mine = record(model, "golden", tmp_path, mode), record(port, "mine", tmp_path, mode)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    report = ld.compare(golden, mine, calibrate="auto", progress=False)
    assert report.verdict == "within_noise"
    assert "ran again with another rounding" in report.limits
    bug = record(wrong_activation(model), "bug", tmp_path, mode)
    report = ld.compare(golden, bug, calibrate="auto", progress=False)
    assert report.verdict == "diverged"
    assert report.findings[0].path.startswith("model.layers.0.mlp.act_fn")
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert models.hooks_left(model) == 0


class Cancelling(nn.Module):
    """Two right ways to compute what loses three digits."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sub, self.last = nn.Linear(64, 64), Subtraction(), nn.Linear(64, 64)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.first.weight.T + self.first.bias) if self.other else self.first(x)
        return self.last(self.sub(y + 3000.0))


class Subtraction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()


def test_calibration_measures_what_a_call_amplifies(tmp_path):
    runs = []
    for other, factor in ((False, 1.0), (False, 1 + 2e-6)):
        model = Cancelling(other)
        with torch.no_grad(), ld.dump(model, name=f"run{factor}", path=tmp_path) as run:
            model.first.bias.mul_(factor)
            model(values(8, 64))
        runs.append((model, run))
    (_, golden), (_, mine) = runs
    plain = {d.site: d for d in ld.compare(golden, mine, progress=False, explain=False).differences}
    report = ld.compare(golden, mine, calibrate="auto", progress=False, explain=False)
    rows = {d.site: d for d in report.differences}
    site = next(s for s in rows if s.path == "sub" and s.role == "output")
    assert rows[site].limit > plain[site].limit


def test_calibration_without_golden_s_model_says_what_to_do(tmp_path, monkeypatch):
    model = models.llama()
    golden = record(model, "golden", tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(CompareError, match="no longer computes what was recorded"):
        ld.compare(golden, golden, calibrate="auto", progress=False)
    del model
    with pytest.raises(CompareError, match="give another recording of golden"):
        ld.compare(golden, golden, calibrate="auto", progress=False)


def test_calibration_refuses_a_model_that_draws_random_numbers(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    with torch.no_grad(), ld.dump(model, name="golden", path=tmp_path) as golden:
        model(values(4, 8))
    with pytest.raises(CompareError, match="two results for the same inputs"):
        ld.compare(golden, golden, calibrate="auto", progress=False)
