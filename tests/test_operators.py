"""Operator levels: the recorded operators, their modules, and no other effect."""

from __future__ import annotations

import inspect
import linecache
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import relu

import llmdebug_nb as ld
from llmdebug_nb.capture.hooks import module_tree
from llmdebug_nb.capture.operators.kinds import operator_name
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import CallKey, Frame
from models import llama, mixtral, prompt
from recordings import record

LEVELS = ("module", "api", "aten")


class Block(nn.Module):
    """Has an early import, a repeated call, an in-place write, a scalar, a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = relu(x)
        x = F.dropout(F.softmax(self.inner(x), dim=-1), 0.1, training=False)
        y = torch.add(x, x, alpha=3)
        y.mul_(2)
        return y.reshape(2, 2, -1).transpose(0, 1).sum()


def forward_only(model, *args):
    with torch.no_grad():
        return model(*args)


# --- names and places ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", [torch.mm, torch.dsmm])
def test_a_function_of_several_names_has_the_name_of_the_dispatcher(first):
    operator_name.cache_clear()  # it takes equal functions for one, whichever comes first
    assert first == torch.mm
    assert {operator_name(first), operator_name(torch.spmm)} == {"Torch.mm"}


def test_functions_and_methods_are_recorded_with_their_prefix_and_module():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="api")
    calls = run.operators()
    assert list(zip(calls.path, calls.call, strict=True)) == [
        ("/Functional.relu", 0),
        ("inner/Functional.linear", 0),
        ("/Functional.softmax", 0),
        ("/Functional.dropout", 0),
        ("/Torch.add", 0),
        ("/Tensor.mul_", 0),
        ("/Tensor.sum", 0),
    ]
    assert set(calls.level) == {"api"}
    assert set(calls.within.dropna()) == {"", "inner"}


def test_the_dispatcher_level_names_overloads_and_skips_views():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="aten")
    assert list(run.operators().op) == [
        "Aten.relu",
        "Aten.addmm",
        "Aten._softmax",
        "Aten.add.Tensor",
        "Aten.mul_.Tensor",
        "Aten.sum",
    ]


def test_linear_attention_norms_and_embedding_are_seen():
    model = llama()
    run = record(model, lambda: forward_only(model, prompt()), mode="api")
    seen = set(run.operators().op)
    assert {
        "Functional.linear",
        "Functional.scaled_dot_product_attention",
        "Functional.embedding",
    } <= seen
    layer_norm, group_norm = nn.LayerNorm(4), nn.RMSNorm(4)
    norms = record(
        [layer_norm, group_norm], lambda: group_norm(layer_norm(torch.randn(2, 4))), mode="api"
    )
    assert list(norms.operators().op) == ["Functional.layer_norm", "Functional.rms_norm"]


def test_repeated_calls_in_one_module_are_numbered_not_overwritten():
    class Twice(nn.Module):
        def forward(self, x):
            return F.silu(F.silu(x))

    model = nn.Sequential(Twice(), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    run = record(model, lambda: forward_only(model, x), mode="api")
    first = run.tensor("0/Functional.silu", call=0)
    assert torch.equal(first, F.silu(x))
    assert torch.equal(run.tensor("0/Functional.silu", call=1), F.silu(first))


def test_what_an_operator_was_given_is_what_it_was_before_an_in_place_write():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.add_(1)

    model, x = InPlace(), torch.zeros(3)
    model.weight = nn.Parameter(torch.ones(1))
    for mode, path in (("api", "/Tensor.add_"), ("aten", "/Aten.add_.Tensor")):
        run = record(model, lambda: forward_only(model, x.clone()), mode=mode)
        assert torch.equal(run.tensor(path, role="input"), torch.zeros(3))
        assert torch.equal(run.tensor(path), torch.ones(3))


def test_a_write_through_an_index_has_the_written_tensor_as_output():
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            x[0] = 7.0
            return x

    model = Sets()
    run = record(model, lambda: forward_only(model, torch.zeros(2)), mode="api")
    assert torch.equal(run.tensor("/Tensor.__setitem__", role="input"), torch.zeros(2))
    assert torch.equal(run.tensor("/Tensor.__setitem__"), torch.tensor([7.0, 0.0]))


def test_scalar_arguments_are_recorded():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="api")
    scalars = {
        (s["path"], s["slot"]): s["value"] for s in map(dict, run.scalars().to_dict("records"))
    }
    assert scalars["/Torch.add", "kwargs.alpha"] == "3"
    assert scalars["/Functional.dropout", "kwargs.p"] == "0.1"


def test_each_operator_knows_its_source_line():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="api")
    frames = run.stack("/Functional.relu")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "x = relu(x)" in text)
    assert frames[0] == f"{shown(__file__)}:{line} forward"
    assert any("test_each_operator_knows_its_source_line" in frame for frame in frames)
    assert run.operators().source[0] == frames[0]
    silent = record(
        model, lambda: forward_only(model, torch.randn(4, 4)), mode="api", sources=False
    )
    assert silent.operators().source.isna().all()


def test_an_input_names_the_record_that_produced_it():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="api")
    records = {record.id: record for record in run.records()}
    softmax = next(
        r for r in records.values() if r.op == "Functional.softmax" and r.site.role == "input"
    )
    assert records[softmax.producer].op == "Functional.linear"


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_several_levels_record_the_union_of_each_alone(grad):
    model = llama().train(grad)
    ids = prompt(batch=2)

    def work():
        with torch.set_grad_enabled(grad):
            out = model(input_ids=ids, labels=ids)
            if grad:
                out.loss.backward()

    def counts(mode):
        table = record(model, work, mode=mode).to_pandas()
        return table.groupby(["path", "phase", "role"]).size()

    alone = (
        sum(len(counts(level).index) for level in LEVELS),
        sum(counts(level).sum() for level in LEVELS),
    )
    together = counts("module+api+aten")
    assert (len(together.index), together.sum()) == alone


def test_an_aten_operator_knows_the_function_that_it_is_part_of():
    model = Block()
    run = record(model, lambda: forward_only(model, torch.randn(4, 4)), mode="api,aten")
    calls = run.operators().set_index("op")
    assert calls.within["Aten.addmm"] == "inner/Functional.linear"
    assert calls.within["Functional.linear"] == "inner"


# --- where it has to work -----------------------------------------------------------------------


def test_inference_mode_gives_the_same_operators_as_no_grad():
    model = llama()

    def trace(mode):
        def work():
            with mode():
                model(prompt())

        return list(record(model, work, mode="aten").operators().path)

    assert trace(torch.inference_mode) == trace(torch.no_grad)


def test_autocast_shows_the_casts_and_the_low_precision_results():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def work():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            forward_only(model, torch.randn(2, 4))

    run = record(model, work, mode="aten")
    assert "Aten._to_copy" in set(run.operators().op)
    assert run.tensor("0/Aten.addmm").dtype == torch.bfloat16


def test_torch_func_transforms_are_recorded_with_their_batch():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    weights, inputs = dict(model.named_parameters()), torch.randn(5, 3)

    def per_sample():
        def loss(weights, x):
            return torch.func.functional_call(model, weights, (x,)).sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, inputs)

    expected = per_sample()
    results = []
    run = record(model, lambda: results.append(per_sample()), mode="module+api+aten")
    assert all(torch.equal(results[0][name], expected[name]) for name in expected)
    assert torch.equal(run.tensor("0", role="input"), inputs)
    assert run.tensor(
        "1/Functional.tanh" if "1/Functional.tanh" in set(run.operators().path) else "1/Torch.tanh"
    ).shape == (5, 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("mode", [*LEVELS, "module+api+aten"])
def test_fused_paths_of_attention_and_encoder_layers_stay_taken(mode):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
    ).eval()
    x = torch.randn(2, 5, 16)
    for model, operator in (
        (encoder, "_transformer_encoder_layer_fwd"),
        (Attention().eval(), "_native_multi_head_attention"),
    ):
        expected = forward_only(model, x)
        found = []
        run = record(
            model, lambda model=model, found=found: found.append(forward_only(model, x)), mode=mode
        )
        assert torch.equal(found[0], expected)
        with torch.profiler.profile() as profile, ld.dump(model, name="p", mode=mode):
            forward_only(model, x)
        assert any(operator in event.name for event in profile.events())
        if mode != "module":
            assert any(operator in op for op in run.operators().op)


def test_recordings_that_overlap_leave_torch_as_it_was():
    asked, ran = torch.overrides.has_torch_function, torch.autograd._engine_run_backward
    model, x = Attention().eval(), torch.ones(1, 2, 16)
    first, second = (
        ld.dump(model, name=name, mode="module+api+aten") for name in ("first", "second")
    )
    runs = [first.start(), second.start()]
    expected = forward_only(model, x)
    first.stop()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    second.stop()
    assert (torch.overrides.has_torch_function, torch.autograd._engine_run_backward) == (asked, ran)
    assert [sorted(set(run.to_pandas().step)) for run in runs] == [[0], [0, 1]]
    paths = [list(run.operators().query("step == 0").path) for run in runs]
    assert paths[0] == paths[1]


def test_operators_of_a_model_that_runs_in_another_thread_are_recorded():
    model = Block()
    thread = threading.Thread(target=forward_only, args=(model, torch.randn(4, 4)))

    def work():
        thread.start()
        thread.join()

    assert len(record(model, work, mode="api").operators()) == 7


def test_only_operators_of_the_steps_asked_for_are_recorded_and_the_rest_costs_nothing():
    model = llama()
    stacks = []

    def spy(*_):
        stacks.append((torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()))

    handle = model.lm_head.register_forward_pre_hook(spy)
    run = record(
        model,
        lambda: model.generate(prompt(), max_new_tokens=4, do_sample=False),
        mode="module+api+aten",
        tokens="0-1",
    )
    handle.remove()
    assert set(run.to_pandas().step) == {0, 1}
    assert stacks == [(1, 1), (1, 1), (0, 0), (0, 0)]


def test_tokens_before_the_first_one_asked_for_run_without_modes_too():
    model = llama()
    stacks = []
    handle = model.lm_head.register_forward_pre_hook(
        lambda *_: stacks.append(torch._C._len_torch_dispatch_stack())
    )
    record(
        model,
        lambda: model.generate(prompt(), max_new_tokens=3, do_sample=False),
        mode="aten",
        tokens="2",
    )
    handle.remove()
    assert stacks == [0, 0, 1]


def test_operators_in_custom_functions_are_paired_too():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return Scale.apply(self.inner(x))

    model = Model()
    calls = record(model, lambda: model(torch.ones(1, 2)).sum().backward(), mode="aten").operators()
    pairs = calls[(calls.phase == "backward") & (calls.op == "Aten.mul.Tensor")]
    assert list(pairs.forward_path) == ["/Aten.mul.Tensor"]


def test_the_loss_outside_the_model_is_recorded_and_the_optimizer_is_not():
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer, target = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 1)

    def work():
        F.mse_loss(model(torch.randn(4, 3)), target).backward()
        optimizer.step()

    paths = list(record(model, work, mode="api").operators().path)
    assert paths == ["0/Functional.linear", "/Functional.mse_loss"]


def test_experts_are_seen_below_a_fused_mixture():
    model = mixtral()
    run = record(model, lambda: forward_only(model, prompt()), mode="aten")
    assert any(".mlp" in path and "mm" in path for path in run.operators().path)


# --- interference -------------------------------------------------------------------------------


def test_an_exception_inside_the_model_leaves_no_mode_behind_and_later_calls_have_their_place():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.fails = True

        def forward(self, x):
            x = self.inner(x)
            if self.fails:
                torch.linalg.inv(torch.zeros(2, 2))
            return torch.relu(x)

    model = Fails()

    def work():
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 2))
        assert torch._C._len_torch_dispatch_stack() == 1  # of the block, not of the call
        model.fails = False
        forward_only(model, torch.ones(1, 2))

    run = record(model, work, mode="module+api+aten")
    assert (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()) == (0, 0)
    calls = run.operators()
    assert calls[calls.op == "Torch.relu"].within.tolist() == [""]


def test_modes_of_the_program_stay_as_they_are():
    from torch.utils.flop_counter import FlopCounterMode

    model, x = Block(), torch.randn(4, 4)
    with FlopCounterMode(display=False) as plain:
        forward_only(model, x)

    def work():
        with FlopCounterMode(display=False) as watched:
            forward_only(model, x)
        assert watched.get_total_flops() == plain.get_total_flops()

    record(model, work, mode="module+api+aten")
    recording = ld.dump(model, name="interleaved", mode="module+api+aten")
    with FlopCounterMode(display=False) as outer:
        recording.start()
        forward_only(model, x)
    recording.stop()
    assert outer.get_total_flops() == plain.get_total_flops()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_compiled_code_is_refused_by_name_or_run_eagerly_on_request():
    ids = prompt()
    compiled = torch.compile(llama(), backend="aot_eager")
    with torch.no_grad():
        expected = compiled(ids).logits
    with pytest.raises(ld.errors.CaptureError, match="force_eager=True"):
        ld.dump(compiled).start()
    results = []
    run = record(
        compiled,
        lambda: results.append(forward_only(compiled, ids).logits),
        mode="module+aten",
        force_eager=True,
    )
    assert "model.layers.0.mlp" in set(run.to_pandas().path)
    assert torch.allclose(results[0], expected, atol=1e-6)
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    forward_only(compiled, ids)
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames  # what was compiled still is


def test_a_compiled_function_inside_a_model_is_named():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.act = nn.Linear(2, 2), torch.compile(torch.tanh)

        def forward(self, x):
            return self.act(self.inner(x))

    with pytest.raises(ld.errors.CaptureError, match="the function 'act' of Holds is compiled"):
        ld.dump(Holds()).start()


def test_a_function_that_is_never_compiled_is_recorded():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compiler.disable(nn.Sequential(nn.Linear(2, 2)))
            self.act = torch.compiler.disable(torch.tanh)

        @torch.compiler.disable(recursive=False)
        def scaled(self, x):
            return x.mul(2)

        @torch.compiler.disable
        def forward(self, x):
            return self.scaled(self.act(self.inner(x)))

    model = Holds()
    run = record(model, lambda: forward_only(model, torch.ones(1, 2)), mode="module+api")
    assert {"Functional.linear", "Torch.tanh", "Tensor.mul"} == set(run.operators().op)
    assert any(path.endswith("0") for path in run.to_pandas().path)


# --- selection ----------------------------------------------------------------------------------


def test_operators_are_chosen_by_name_glob_function_or_file(tmp_path):
    model = llama()
    wanted = tmp_path / "apis.yaml"
    wanted.write_text("include: ['linear', 'Functional.s*']\nexclude: [silu]\n", encoding="utf-8")
    expected = {"Functional.linear", "Functional.scaled_dot_product_attention"}
    for apis in ("linear,Functional.s*,!silu", [F.linear, "scaled_dot*"], wanted):
        run = record(model, lambda: forward_only(model, prompt()), mode="api", apis=apis)
        assert set(run.operators().op) == expected


def test_operators_count_with_the_modules_that_they_run_in():
    model = llama()
    run = record(
        model, lambda: forward_only(model, prompt()), mode="aten", layers="model.layers.0.mlp"
    )
    assert {path.partition("/")[0] for path in run.operators().path} == {
        "model.layers.0.mlp",
        *(f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
    }


def test_calls_are_chosen_by_full_name_and_by_scope():
    model = llama()
    work = lambda: forward_only(model, prompt())  # noqa: E731
    some = record(model, work, mode="module+api", contains="LlamaMLP,silu.1")
    assert set(some.to_pandas().path) == {
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "model.layers.1.mlp.act_fn/Functional.silu",
    }
    scope = record(
        model, work, mode="api", scope="Functional.linear.4.forward,Functional.silu.0.forward"
    )
    assert list(scope.operators().op) == ["Functional.linear", "Functional.silu"]
    output = scope.to_pandas().query("op == 'Functional.silu' and role == 'output'")
    assert len(output) == 1  # the last call of the scope is whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "api", "apis": "liner"},
            "no operator of level api is called 'liner'; nearest: linear",
        ),
        ({"mode": "aten", "apis": "Aten.addm"}, "nearest: .*Aten.addmm"),
        ({"mode": "api", "apis": "conv2d"}, "none of the operators 'conv2d' ran"),
        (
            {"mode": "api", "contains": "Functional.liner"},
            "contains 'Functional.liner' matches none.*Functional.linear",
        ),
        ({"mode": "api", "scope": "Functional.silu.9,Functional.silu.10"}, "scope .* matches none"),
        ({"overflow": 0}, "no call overflowed"),
        ({"overflow": 0, "stats_only": True}, "no call overflowed"),
    ],
)
def test_a_selection_that_matches_nothing_is_explained(options, message):
    model = llama()
    with pytest.raises(ld.errors.EmptyDumpError, match=message):
        record(model, lambda: forward_only(model, prompt()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "kernel"}, "mode 'kernel' is not known; known: module, api, aten"),
        ({"mode": ""}, "mode '' is not known"),
        ({"scope": "one"}, "expected two full names"),
        ({"apis": "missing.yaml"}, "missing.yaml"),
        ({"phase": "sideways"}, "known: both, forward, backward"),
        ({"overflow": -1}, "0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ld.errors.OptionError, match=message):
        ld.dump(llama(), **options)


def test_only_calls_that_overflow_are_recorded_with_their_inputs():
    model = llama()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
    run = record(model, lambda: forward_only(model, prompt()), mode="module+api", overflow=2)
    table = run.to_pandas()
    assert list(dict.fromkeys(table.path)) == [
        "model.layers.1.mlp.down_proj/Functional.linear",
        "model.layers.1.mlp.down_proj",
    ]
    assert set(table.role) == {"input", "output"}


def test_only_the_last_logits_of_each_step_are_recorded():
    model = llama()
    results = []
    run = record(
        model,
        lambda: results.append(
            model.generate(
                prompt(),
                max_new_tokens=3,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ),
        logits=True,
        tokens="0-1",
    )
    assert list(run.to_pandas().path) == ["lm_head", "lm_head"]
    for step, logits in enumerate(results[0].logits[:2]):
        assert torch.equal(run.tensor("lm_head", step=step)[:, -1], logits)


def test_weights_are_recorded_once_under_their_names():
    model = llama()
    run = record(
        model, lambda: model.generate(prompt(), max_new_tokens=2, do_sample=False), weights=True
    )
    weights = run.to_pandas().query("role == 'weight'")
    named = {f"{p}.{s}" if p else s for p, s in zip(weights.path, weights.slot, strict=True)}
    assert {name for name, _ in model.named_parameters()} <= named
    assert len(weights) == len(named)
    weight = run.tensor("model.layers.0.mlp.up_proj", role="weight", slot="weight")
    assert torch.equal(weight, model.model.layers[0].mlp.up_proj.weight)


# --- frames and code -----------------------------------------------------------------------------


def _deep(x):
    return torch.sigmoid(x)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.helped(self.linear(x))

    def helped(self, x):
        return _deep(x) * 2


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested = _Nested()

    def forward(self, x):
        return self.nested(x)


def _key(run, path, phase="forward"):
    table = run.operators()
    row = table[(table.path == path) & (table.phase == phase)].iloc[0]
    rank, generation, step = (int(row[name]) for name in ("rank", "generation", "step"))
    return CallKey(rank, generation, step, phase, path, int(row.call))


def test_frames_lead_from_the_operator_to_the_forward_of_its_module_and_no_further():
    model = _Around()
    run = record(model, lambda: forward_only(model, torch.ones(2, 4)), mode="module+api")
    frames = run.index.frames(_key(run, "nested/Torch.sigmoid"))
    assert [frame.function for frame in frames] == ["_deep", "helped", "forward"]
    assert {frame.file for frame in frames} == {shown(__file__)}
    assert [run.index.code(frame) for frame in frames] == [
        "return torch.sigmoid(x)", "return _deep(x) * 2", "return self.helped(self.linear(x))",
    ]  # fmt: skip


def test_an_operator_of_a_module_of_pytorch_has_the_line_that_calls_the_module():
    model = _Around()
    run = record(model, lambda: forward_only(model, torch.ones(2, 4)), mode="module+api")
    (frame,) = run.index.frames(_key(run, "nested.linear/Functional.linear"))
    assert run.index.code(frame) == "return self.helped(self.linear(x))"


def test_a_gradient_has_the_frames_of_its_forward_call():
    model = _Around()

    def work():
        model(torch.ones(2, 4)).sum().backward()

    run = record(model, work, mode="aten")
    table = run.operators()
    backward = table[(table.phase == "backward") & (table.forward_path == "nested/Aten.sigmoid")]
    key = _key(run, backward.iloc[0].path, "backward")
    assert [frame.function for frame in run.index.frames(key)] == ["_deep", "helped", "forward"]


def test_the_code_travels_with_the_dump(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nclass Net(torch.nn.Module):\n    @torch.no_grad()\n"
        "    def forward(self, x):\n        return torch.tanh(x)  # here\n",
        encoding="utf-8",
    )
    space: dict = {}
    exec(compile(program.read_text(encoding="utf-8"), str(program), "exec"), space)
    model = space["Net"]()
    run = record(model, lambda: model(torch.ones(2)), mode="module+api")
    program.unlink()
    linecache.clearcache()
    opened = ld.open_run(run.path)
    (frame, *_) = opened.index.frames(_key(opened, "/Torch.tanh"))
    assert frame == (str(program), 5, "forward")
    assert opened.index.code(frame) == "return torch.tanh(x)  # here"
    source = opened.nodes[0].source
    assert source == (str(program), 4, "Net.forward")
    assert opened.index.code(source) == "def forward(self, x):"
    assert opened.index.code(source._replace(line=1)) == ""


def test_a_class_without_a_forward_of_its_own_shows_the_one_it_inherits_and_a_list_none():
    model = nn.Sequential(nn.ModuleList([_Nested()]), _Nested(), nn.ReLU())
    nodes = {node.path: node.source for node in module_tree.build(model)}
    assert nodes["0"] is None
    assert nodes["1"].function == "_Nested.forward"
    file = inspect.getsourcefile(nn.ReLU)
    assert nodes["2"].file == shown(file)
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    assert lines[nodes["2"].line - 1].strip().startswith("def forward(")


def test_without_sources_there_are_no_frames():
    model = _Around()
    run = record(
        model, lambda: forward_only(model, torch.ones(2, 4)), mode="module+api", sources=False
    )
    assert run.index.frames(_key(run, "nested/Torch.sigmoid")) == ()
    assert run.index.frames(CallKey(0, 0, 0, "forward", "nested", 0)) == ()


def test_a_cell_of_a_notebook_is_named_by_its_number(monkeypatch):
    from IPython.core.compilerop import CachingCompiler

    compiler = CachingCompiler()
    code = (
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.exp()\n"
    )
    name = compiler.cache(code, 7)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=compiler))
    space: dict = {"__name__": "__main__"}
    exec(compiler(code, name, "exec"), space)
    model = space["Net"]()
    run = record(model, lambda: model(torch.ones(2)), mode="module+api")
    (frame, *_) = run.index.frames(_key(run, "/Tensor.exp"))
    assert frame == ("cell 7", 4, "forward")
    assert run.index.code(frame) == "return x.exp()"
    assert run.nodes[0].source == ("cell 7", 3, "Net.forward")


@given(st.text(), st.integers(0, 10**8), st.text().filter(lambda text: " " not in text))
def test_a_frame_is_read_back_from_its_text(file, line, function):
    assert Frame.read(str(Frame(file, line, function))) == (file, line, function)
