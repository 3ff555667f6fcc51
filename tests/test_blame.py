"""Planted bugs: the blamed call, the cause, and the evidence."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.engine import error
from llmdebug_nb.core import constants
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.replay import execution, operators, replay
from llmdebug_nb.replay.arguments import arguments_of
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs, Side
from llmdebug_nb.replay.swap import run_on_golden_inputs, untouched
from models import generate, gpt2, hooks_left, llama, mixtral, prompt, qwen2
from recordings import AGREED, compared

ALONE = "the live module, run alone on golden's inputs"

MODES = ("module", "module+api", "module+aten")


def record(model, name, mode="module", work=None, **options):
    with ld.dump(
        model, name=name, mode=mode, **{"tokens": "0-1", "phase": "forward", **options}
    ) as run:
        (work or (lambda m: generate(m, new=2)))(model)
    return run


def pair(model, plant, mode="module", **options):
    """Record a model and a changed copy of it."""
    broken = copy.deepcopy(model)
    plant(broken)
    report = ld.compare(
        record(model, "golden", mode, **options), record(broken, "mine", mode, **options)
    )
    report.models = model, broken  # held, so that the live one is there
    return report


def eager(make=llama, **changes):
    return make(attn_implementation="eager", **changes)


def patched(module, function):
    module.forward = types.MethodType(function, module)


def one(report):
    assert report.verdict == "diverged", repr(report)
    return report.findings[0]


# -- causes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "path"),
    [("module", ""), ("module+api", "/Tensor.add"), ("module+aten", "/Aten.add.Tensor")],
)
def test_another_eps_is_a_scalar_argument_that_differs(mode, path):
    def plant(model):
        model.model.layers[1].input_layernorm.variance_epsilon = 1e-3

    finding = one(pair(llama(), plant, mode))
    assert (finding.path, finding.cause) == (f"model.layers.1.input_layernorm{path}", causes.SCALAR)
    assert "in golden and 0.001 in mine" in finding.evidence


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, qwen2])
def test_an_activation_off_by_a_thousandth_is_blamed_on_its_module(make, mode):
    def plant(model):
        patched(model.model.layers[0].mlp.act_fn, lambda self, x: F.silu(x) * 1.001)

    finding = one(pair(make(), plant, mode))
    assert finding.path.partition("/")[0] == "model.layers.0.mlp.act_fn"
    assert finding.cause == {"module": causes.INTRODUCED}.get(mode, causes.OTHER_OPS)


def test_a_broken_kernel_is_found_by_calling_the_operator_again():
    """The kernel is broken below the recording: same operator, same arguments, another result."""
    golden, model = record(llama(), "golden", "module+api", tokens="0"), llama()

    class Broken(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 1.001 if func is torch.ops.aten.silu.default else out

    with (
        Broken() as broken,
        ld.dump(model, name="mine", mode="module+api", tokens="0", phase="forward") as mine,
    ):
        assert broken is not None
        generate(model, new=1)
    finding = one(ld.compare(golden, mine))
    assert (finding.path, finding.cause) == (
        "model.layers.0.mlp.act_fn/Functional.silu",
        causes.INTRODUCED,
    )
    assert "× eps/2 off float64, golden 0." in finding.evidence


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_scale_of_attention_is_a_scalar_that_differs(mode):
    def plant(model):
        model.model.layers[1].self_attn.scaling *= 1.1

    finding = one(pair(eager(), plant, mode))
    assert finding.path.partition("/")[0] == "model.layers.1.self_attn"
    assert finding.cause == causes.SCALAR
    assert "scaling is" in finding.evidence or "argument 1 is" in finding.evidence


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_wrong_mask_is_a_wrong_input(mode):
    def plant(model):
        layer = model.model.layers[1]
        right = layer.forward
        layer.forward = lambda x, attention_mask=None, **rest: right(
            x, attention_mask=attention_mask * 0, **rest
        )

    finding = one(pair(eager(), plant, mode, work=lambda m: m(prompt(), use_cache=False)))
    if mode == "module":
        assert finding.cause == causes.WRONG_MASK
        assert finding.path.startswith("model.layers.1.self_attn")
    else:  # the line that makes it is recorded
        assert (finding.path, finding.cause) == ("model.layers.1/Tensor.mul", causes.OTHER_OPS)
        assert "attention_mask" in finding.evidence
        assert "attention_mask * 0" in finding.mine.code


def test_other_positions_are_a_wrong_input():
    golden = record(llama(), "golden", work=lambda m: m(prompt(), use_cache=False))
    mine = record(
        llama(),
        "mine",
        work=lambda m: m(prompt(), position_ids=torch.arange(7)[None] + 3, use_cache=False),
    )
    finding = one(ld.compare(golden, mine))
    assert finding.cause == causes.WRONG_POSITION


@pytest.mark.parametrize("weights", [False, True])
def test_a_module_names_its_scalar_though_its_parts_have_recorded_weights(weights):
    class Gated(nn.Module):
        def __init__(self, share):
            super().__init__()
            self.left, self.right, self.share = nn.Linear(12, 12), nn.Linear(12, 12), share

        def forward(self, x):
            return self.right(self.left(x).tanh() * self.share)

    def program(share):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(12, 12), Gated(share), nn.Linear(12, 3))

    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
    golden, mine = (
        record(program(share), name, work=lambda model: model(x), weights=weights)
        for name, share in (("golden", 0.5), ("mine", 0.8))
    )
    finding = one(ld.compare(golden, mine))
    assert (finding.path, finding.cause) == ("1", causes.SCALAR)
    assert "share is 0.5 in golden and 0.8 in mine" in finding.evidence


def test_a_dropped_soft_cap_is_an_operator_that_only_golden_has():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = Gemma2Config(
        **shape, head_dim=8, attn_logit_softcapping=0.01, attn_implementation="eager"
    )
    model = Gemma2ForCausalLM(config).eval()

    def plant(model):
        model.model.layers[1].self_attn.attn_logit_softcapping = None

    finding = one(pair(model, plant, "module+api"))
    assert finding.path.partition("/")[0] == "model.layers.1.self_attn"
    assert finding.cause == causes.OTHER_OPS
    assert "only golden calls" in finding.evidence
    assert "attn_logit_softcapping is 0.01 in golden and None in mine" in finding.evidence
    by_module = one(pair(model, plant, "module"))
    assert (by_module.path, by_module.cause) == ("model.layers.1.self_attn", causes.SCALAR)


@pytest.mark.parametrize(("mode", "path"), [("module", ""), ("module+api", "/Functional.dropout")])
def test_dropout_left_on_is_a_scalar_that_differs(mode, path):
    finding = one(pair(gpt2(), lambda model: model.transformer.h[1].mlp.dropout.train(), mode))
    assert (finding.path, finding.cause) == (f"transformer.h.1.mlp.dropout{path}", causes.SCALAR)
    assert "training is False in golden and True in mine" in finding.evidence


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_dropout_that_is_on_in_both_is_nondeterministic_and_no_bug(mode):
    model = gpt2()
    model.transformer.h[1].mlp.dropout.train()
    runs = [
        record(model, name, mode, seed=seed, tokens="0")
        for seed, name in enumerate(("golden", "mine"))
    ]
    report = ld.compare(*runs)
    assert report.verdict == "nondeterministic"
    assert {f.cause for f in report.findings} == {causes.NONDETERMINISTIC}


class Dropping(torch.nn.Module):
    """Blocks that drop something between two layers, where no module stands."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(12))
        self.second = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(torch.nn.functional.dropout(first(x), 0.1, self.training))
        return x


@pytest.mark.parametrize(
    ("seeds", "trains", "verdict"),
    [
        ((1, 2), (True, True), "nondeterministic"),
        ((1, 1), (True, True), "match"),
        ((1, 2), (True, False), "diverged"),  # one of them draws nothing: that is a difference
        ((1, 2), (False, False), "match"),
    ],
)
def test_modules_that_draw_other_numbers_tell_nothing_of_their_code(seeds, trains, verdict):
    torch.manual_seed(0)
    model, runs = Dropping(), []
    for name, seed, train in zip(("golden", "mine"), seeds, trains, strict=True):
        work = lambda m: m(torch.ones(3, 8))  # noqa: E731
        runs.append(record(model.train(train), name, "module", work, seed=seed))
    report = ld.compare(*runs)
    assert report.verdict == verdict
    if verdict == "nondeterministic":
        (finding,) = report.findings
        assert "both programs draw random numbers in this step" in finding.evidence
        assert "Call ld.seed_all in both programs" in str(report)


def test_what_a_step_drew_from_is_recorded_only_where_it_drew():
    model = Dropping()
    run = record(model.eval(), "eval", "module", lambda m: m(torch.ones(3, 8)))
    assert run.index.scalars(role="generator") == []
    run = record(model.train(), "train", "module", lambda m: [m(torch.ones(3, 8)) for _ in "ab"])
    first, second = run.index.scalars(role="generator")
    assert first.slot == second.slot == "cpu"
    before, after = first.value.split()
    assert before != after
    assert second.value.startswith(f"{after} ")


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_a_bug_beside_random_numbers_is_blamed_in_a_model_that_does_not_train(seeds):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
            self.act = torch.nn.functional.gelu

        def forward(self, x):
            return x + self.down(self.act(self.up(x)))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            torch.rand(1)  # as sampling does
            return x

    torch.manual_seed(0)
    model, runs = Net().eval(), []
    for name, seed in zip(("golden", "mine"), seeds, strict=True):
        runs.append(record(model, name, "module", lambda m: m(torch.ones(3, 8)), seed=seed))
        model.blocks[1].act = torch.nn.functional.relu
    report = ld.compare(*runs)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "blocks.1"


def test_a_step_that_sets_its_generator_draws_the_same_numbers_from_any_state():
    class Sets(Dropping):
        def forward(self, x):
            torch.manual_seed(7)
            return super().forward(x)

    torch.manual_seed(0)
    model, runs = Sets(), []
    for seed, name in enumerate(("golden", "mine")):
        runs.append(record(model, name, "module", lambda m: m(torch.ones(3, 8)), seed=seed))
        with torch.no_grad():
            model.first[3].weight *= 1.5
    report = ld.compare(*runs)
    assert report.verdict == "diverged"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", [False, True])
def test_another_weight_is_named_without_weights_in_the_dump(mode, weights):
    def plant(model):
        model.model.layers[1].mlp.up_proj.weight.data[0] *= 1.5

    finding = one(pair(llama(), plant, mode, weights=weights))
    assert (finding.path, finding.cause) == ("model.layers.1.mlp.up_proj", causes.WEIGHT)
    assert "its parameter weight differs" in finding.evidence


@pytest.mark.parametrize(("mode", "path"), [("module", ""), ("module+api", "/Torch.matmul")])
def test_overflow_starts_where_finite_values_became_infinite(mode, path):
    def large(model):
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight *= 3000
            model.model.layers[1].self_attn.k_proj.weight *= 3000
        return model

    work = lambda m: m(prompt(), use_cache=False)  # noqa: E731
    golden = record(large(eager(initializer_range=0.2)), "golden", mode, work)
    mine = record(large(eager(initializer_range=0.2)).half(), "mine", mode, work)
    finding = one(ld.compare(golden, mine))
    assert (finding.path, finding.cause) == (f"model.layers.1.self_attn{path}", causes.OVERFLOW)
    assert "its inputs are finite" in finding.evidence


def test_an_extra_operator_is_named():
    def plant(model):
        mlp = model.model.layers[1].mlp
        patched(
            mlp,
            lambda self, x: self.down_proj(
                torch.tanh(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            ),
        )

    finding = one(pair(llama(initializer_range=0.3), plant, "module+api"))
    assert (finding.path, finding.cause) == ("model.layers.1.mlp/Torch.tanh", causes.OTHER_OPS)
    assert finding.source is not None
    assert "test_blame.py" in finding.source


class Pair(nn.Linear):
    def forward(self, x):
        half = self.in_features // 2
        return x[..., :half] @ self.weight[:, :half].T + x[..., half:] @ self.weight[:, half:].T


@pytest.mark.parametrize("mode", MODES)
def test_a_harmless_rewrite_blames_nothing(mode):
    def plant(model):
        model.model.layers[1].self_attn.o_proj.__class__ = Pair

    report = pair(llama(), plant, mode)
    assert report.verdict in AGREED
    assert report.findings == []


@pytest.mark.parametrize("mode", ["module+api", "module+aten"])
def test_memory_that_nothing_was_written_to_is_not_held_against_anything(mode, monkeypatch):
    class Fill(nn.Module):
        def forward(self, x):
            room = torch.empty_like(x)
            room.copy_(x)
            return room

    runs = []
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for name, filled in (
        ("golden", True),
        ("mine", False),
    ):  # deterministic algorithms fill it with NaN
        torch.use_deterministic_algorithms(filled)
        try:
            runs.append(record(nn.Sequential(Fill()), name, mode, lambda m: m(torch.ones(2, 3))))
        finally:
            torch.use_deterministic_algorithms(False)
    report = ld.compare(*runs)
    assert report.findings == []
    assert report.verdict == "match"
    alone = [d.reason for d in report.differences if d.verdict == "unmatched"]
    assert alone
    assert all("was not written to yet" in reason for reason in alone)


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_another_eps_is_blamed_though_noise_hides_what_it_does(mode):
    def plant(model):
        model.model.layers[1].input_layernorm.variance_epsilon = 1.5e-6

    golden, mine = llama(initializer_range=0.5), llama(initializer_range=0.5).bfloat16()
    plant(mine)
    report = ld.compare(
        record(golden, "golden", mode, tokens="0"), record(mine, "mine", mode, tokens="0")
    )
    assert report.first_divergence is None
    assert report.verdict == "diverged"
    (finding,) = report.findings
    assert (finding.path.partition("/")[0], finding.cause) == (
        "model.layers.1.input_layernorm",
        causes.SCALAR,
    )
    assert "their settings differ" in report.summary()


# -- calling again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
@pytest.mark.parametrize("mode", ["api", "aten"])
def test_right_operators_called_again_stay_clean(make, dtype, mode):
    run = record(make().to(dtype), "run", mode)
    side = Side(run)
    runs, units = Runs(side, side, error), []
    for made in run.records(role="output"):
        try:
            call = replay.Replayed(side, made.site.key)
            units.append(call.units(runs))
            again = call.run()
        except CannotReplay:
            continue
        assert error(run.load(made), again[made.site.slot]) < 1e-6
    assert len(units) > 40
    assert max(units) < constants.OPERATOR_EPSILONS
    # a mean near zero cancels: processors that sum in another order take some units more there
    assert sorted(units)[9 * len(units) // 10] < constants.OPERATOR_EPSILONS / 3


def test_the_unit_oferror_is_half_an_epsilon_of_the_coarsest_dtype():
    assert replay.unit(["float32", "torch.bfloat16", "int64"]) == 2.0**-8

    class Leaf(nn.Module):
        def forward(self, x):
            return F.silu(x)

    golden = record(nn.Sequential(Leaf()), "golden", "module+api", lambda m: m(torch.ones(1, 4)))
    call = replay.Replayed(Side(golden), CallKey(0, 0, 0, "forward", "0/Functional.silu", 0))
    wrong = Runs(
        Side(golden), Side(golden), lambda a, b: error(a, b * (1 + 2.0**-10))
    )  # of which 2**-24 is half an epsilon
    assert call.units(wrong) == pytest.approx(2.0**14, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "Torch.load",
        "Functional.__builtins__",
        "Tensor.apply_",
        "Aten.from_file",
        "Torch.os",
        "save",
        "Aten.no.such",
        "Torch.nn.Linear",
    ],
)
def test_only_operators_of_torch_are_called(name):
    with pytest.raises(CannotReplay):
        operators.replayed(name)


@pytest.mark.parametrize(
    "text",
    ["(__import__('os').system('x'),)", "[open('x')]", "slice(exit())", "(1,", "(lambda: 1,)"],
)
def test_what_a_dump_says_is_never_evaluated(text):
    with pytest.raises(CannotReplay):
        arguments_of([], {"0": ("str", text)})


def test_indices_and_sizes_are_read_back():
    args, kwargs = arguments_of(
        [],
        {
            "0": ("str", "(slice(None, -1, None), Ellipsis, None, 3)"),
            "kwargs.size": ("str", "[2, -1]"),
            "kwargs.p": ("float", "inf"),
        },
    )
    assert args == [(slice(None, -1, None), ..., None, 3)]
    assert kwargs == {"size": (2, -1), "p": float("inf")}


def _call_of(report, path):
    from llmdebug_nb.graph.compared_calls import Calls

    return next(c for c in Calls(list(report.differences), "forward").all if c.path == path)


def test_a_module_alone_on_goldens_inputs_tells_made_from_received():
    def plant(model):
        patched(model.model.layers[0].mlp.act_fn, lambda self, x: F.silu(x) * 1.01)

    report = pair(llama(), plant, tokens="0")
    runs = Runs(Side(report.golden), Side(report.mine), error, report.models[1].get_submodule)
    made = run_on_golden_inputs(_call_of(report, "model.layers.0.mlp"), runs)
    received = run_on_golden_inputs(_call_of(report, "model.layers.1.mlp"), runs)
    assert made.error > 0.005
    assert received.error < 1e-6


def test_swapping_leaves_model_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[0].weight.requires_grad_(False)
    random, before = torch.get_rng_state(), hooks_left(model)
    with untouched(model), execution.quiet(1):
        model(torch.randn(4, 3))
        model.eval()
    assert calls == []
    assert model.training
    assert model[1].training
    assert not model[0].weight.requires_grad
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert hooks_left(model) == before


def test_a_model_that_no_longer_computes_what_was_recorded_is_no_evidence():
    model = llama()
    golden = record(model, "golden", tokens="0")
    handle = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, a, out: out * 1.01)
    mine = record(model, "mine", tokens="0")
    handle.remove()
    finding = one(ld.compare(golden, mine))
    assert (finding.path, finding.cause) == ("model.layers.0.mlp.act_fn", causes.INTRODUCED)
    assert "live module" not in finding.evidence


def test_the_run_keeps_the_model_only_as_long_as_somebody_else_does():
    def plant(model):
        patched(model.model.layers[0].mlp.act_fn, lambda self, x: F.silu(x) * 1.01)

    broken = llama()
    plant(broken)
    golden, mine = record(llama(), "golden"), record(broken, "mine")
    assert ALONE in ld.compare(golden, mine).findings[0].evidence
    assert ALONE in ld.compare("golden", "mine").findings[0].evidence
    del broken
    gc.collect()
    assert "live" not in ld.compare(golden, mine).findings[0].evidence
    again = llama()
    plant(again)
    assert ALONE in ld.compare(golden, mine, model=again).findings[0].evidence
    with pytest.raises(ld.errors.OptionError, match=r"expected a torch.nn.Module, got str"):
        ld.compare(golden, mine, model="again")


def test_a_call_that_only_magnifies_passes_the_blame_on():
    class Cancel(nn.Module):
        def forward(self, x):
            return x - torch.ones_like(x)

    class Noise(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x * (1 + self.by * torch.tensor([0.0, 1.0, 0.0, 0.0]))

    x, runs, models = torch.tensor([[1.0 + 1e-4, 1.0 + 2e-4, 1.0 - 1e-4, 1.0]]), [], []
    for name, by in (("golden", 0.0), ("mine", 2.0**-23)):
        models.append(nn.Sequential(nn.Identity(), Noise(by), Cancel()))
        runs.append(record(models[-1], name, work=lambda m: m(x)))
    assert ld.compare(*runs).verdict == "within_noise"  # golden's module gives the same of mine's
    del models[0]
    gc.collect()
    report = ld.compare(*runs)
    assert report.first_divergence.site.path == "2"
    assert report.findings[0].path == "1"


# -- what a reader gets ---------------------------------------------------------------------------


def printed_by(script):
    """Return the figures that a repro script prints, by what they are of."""
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True
    )
    lines = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {name.strip(): float(figure) for name, _, figure in lines}


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_the_repro_script_runs_and_shows_whose_error_it_is(mode, tmp_path):
    def plant(model):
        model.model.layers[1].input_layernorm.variance_epsilon = 1e-2

    finding = one(pair(llama(), plant, mode))
    figures = printed_by(finding.save_repro(tmp_path / "repro.py"))
    assert figures["output, mine against golden:"] > 1e-3
    if mode == "module+api":
        assert figures["golden's call replayed, against golden's record:"] == 0.0
        assert figures["mine's call replayed, against mine's record:"] == 0.0
        assert figures["mine's call on golden's inputs, against golden's record:"] > 1e-3
    else:
        assert figures["input 0, mine against golden:"] == 0.0


def test_the_repro_of_an_operator_that_only_one_run_calls_makes_that_call(tmp_path):
    class Adds(nn.Module):
        extra = False

        def forward(self, x):
            return (torch.sigmoid(x) if self.extra else x) * 2

    def plant(model):
        model[0].extra = True

    finding = one(pair(nn.Sequential(Adds()), plant, "module+api", work=lambda m: m(torch.ones(2))))
    assert (finding.path, finding.cause) == ("0/Torch.sigmoid", causes.OTHER_OPS)
    figures = printed_by(finding.save_repro(tmp_path / "repro.py"))
    assert figures["the call that only mine makes, against its record:"] == 0.0
    assert figures["input 0 of 0/Tensor.mul, mine against golden:"] == pytest.approx(
        1 - 1 / (1 + 2.718281828**-1), rel=1e-5
    )


def test_names_in_a_repro_are_data_and_never_code(tmp_path):
    hostile = "x\"\"\"); raise SystemExit(9); '''"
    runs = []
    for name, factor in (("golden", 1.0), ("mine", 2.0)):
        module = nn.Sequential()
        module.add_module(hostile, nn.Linear(2, 2, bias=False))
        module[0].weight.data.fill_(factor)
        runs.append(record(module, name, "module+api", lambda m: m(torch.ones(1, 2))))
    finding = one(ld.compare(*runs))
    script = finding.save_repro(tmp_path / "repro.py")
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0


def test_without_values_there_is_no_repro_and_it_says_so(tmp_path):
    def plant(model):
        model.model.norm.variance_epsilon = 1e-2

    finding = one(pair(llama(), plant, stats_only=True))
    assert finding.cause == causes.SCALAR
    with pytest.raises(ld.errors.StoreError, match="its tensors were not recorded"):
        finding.save_repro(tmp_path / "repro.py")


def test_the_summary_ends_with_the_coverage():
    def plant(model):
        model.model.norm.variance_epsilon = 1e-2

    text = pair(llama(), plant).summary()
    assert text.startswith(
        "golden and mine first differ in step 0, at the forward output 0 of model.norm"
    )
    assert "The error is made in model.norm (LlamaRMSNorm), by a different setting" in text
    assert "Set it to golden's value and compare again" in text
    fine = pair(llama(), lambda model: None).summary()
    assert "bit for bit the same" in fine
    assert text.endswith(" and 0 of 2 results agree.")  # the logits of two steps
    assert fine.endswith(". 100 % of golden's 71 values and 2 of 2 results agree.")
    assert " Mine is golden's value with one factor per index of the tokens: " in text
    assert (text.count(". "), fine.count(". ")) == (4, 3)


def test_attributes_and_fingerprints_are_recorded_once():
    run = record(llama(), "run", tokens="0-1")
    attributes = run.index.query(
        tuple,
        "SELECT count(*) FROM scalar_rows WHERE role = 'attribute' AND path = 'model.norm' AND "
        "slot = 'variance_epsilon'",
    )
    assert attributes == [(1,)]
    weights = dict(
        run.index.query(
            tuple, "SELECT path, value FROM scalar_rows WHERE role = 'weight' AND slot = 'weight'"
        )
    )
    assert len(weights) == len(
        [name for name, _ in llama().named_parameters() if name.endswith("weight")]
    )
    assert all(value.startswith("xxh3:") for value in weights.values())


class HandsOn(torch.nn.Module):
    """Hands on what its only part gives."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.part(x)


class Lists(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(HandsOn() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_module_that_hands_on_what_its_part_gave_is_blamed_and_not_the_list_around_it(tmp_path):
    golden, mine = Lists(), Lists()
    mine.layers[1].register_forward_hook(lambda module, args, output: output - args[0])
    x = torch.randn(4, 8)
    report = compared(golden, mine, x, path=tmp_path, mode="module")
    assert report.findings[0].path == "layers.1"
