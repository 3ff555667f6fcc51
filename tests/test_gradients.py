"""Gradients of modules, operators and parameters: the right ones, without changing a bit."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core.options import DumpOptions
from models import llama, prompt
from recordings import record


def step(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def backward(run, role):
    return run.to_pandas().query(f"phase == 'backward' and role == '{role}'")


def test_gradients_of_parameters_are_those_that_backward_adds():
    model, ids = llama().train(), prompt(batch=2)
    run = record(model, lambda: step(model, ids))
    for name, parameter in model.named_parameters():
        path, _, slot = name.rpartition(".")
        assert torch.equal(
            run.tensor(path, phase="backward", role="grad", slot=slot), parameter.grad
        )


def test_gradients_of_module_inputs_and_outputs_equal_those_of_autograd():
    model, ids = llama().train(), prompt(batch=2)
    run = record(model, lambda: step(model, ids))
    seen = {}

    def keep(path):
        def hook(module, args, kwargs, output):
            tensor = output[0] if isinstance(output, tuple) else output
            inputs = [*args, *kwargs.values()]
            seen[path] = (
                tensor,
                [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad],
            )

        return hook

    handles = [
        module.register_forward_hook(keep(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path.startswith("model.layers")
    ]
    loss = model(input_ids=ids, labels=ids).loss
    for handle in handles:
        handle.remove()
    for path, (output, _) in seen.items():
        (expected,) = torch.autograd.grad(loss, output, retain_graph=True)
        assert torch.equal(run.tensor(path, phase="backward", role="input"), expected), path
    # a module's own part of its input's gradient comes from the gradient of its output
    for path, (output, inputs) in seen.items():
        arrived = run.tensor(path, phase="backward", role="input")
        rows = backward(run, "output").query(f"path == '{path}'")
        (expected,) = torch.autograd.grad(output, inputs[0], arrived, retain_graph=True)
        assert torch.allclose(
            run.tensor(path, phase="backward", slot=rows.slot.iloc[0]), expected, atol=1e-7
        ), path


def test_a_module_called_twice_has_its_gradients_apart():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x)).sum()

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 2, requires_grad=True)
    run = record(model, lambda: model(x).backward())
    weight = model.inner.weight.detach()
    ones = torch.ones(3, 2)
    assert torch.equal(run.tensor("inner", call=1, phase="backward", role="input"), ones)
    assert torch.allclose(run.tensor("inner", call=1, phase="backward"), ones @ weight, atol=1e-6)
    assert torch.allclose(
        run.tensor("inner", call=0, phase="backward"), ones @ weight @ weight, atol=1e-6
    )


def test_contributions_of_one_module_to_one_input_are_added_up():
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return x * self.scale + torch.sin(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.uses = Uses()

        def forward(self, x):
            y = x * 1.0
            return (self.uses(y) + y).sum()  # the last term is not the module's part

    model, x = Model(), torch.randn(4)
    x.requires_grad_()
    run = record(model, lambda: model(x).backward())
    assert torch.allclose(run.tensor("uses", phase="backward"), 3 + torch.cos(x.detach()))


def test_operators_have_the_gradients_of_their_own_arguments():
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    run = record(model, lambda: F.mse_loss(model(x), y).backward(), mode="api")
    arrived = run.tensor("/Functional.linear", phase="backward", role="input")
    assert torch.allclose(arrived, (model(x).detach() - y) / 4, atol=1e-6)
    assert torch.equal(
        run.tensor("/Functional.linear", phase="backward", slot="1"), model.weight.grad
    )
    assert torch.equal(
        run.tensor("/Functional.linear", phase="backward", slot="2"), model.bias.grad
    )


def test_operators_of_the_backward_pass_name_their_forward_operator():
    model, ids = llama().train(), prompt(batch=2)
    calls = record(model, lambda: step(model, ids), mode="aten").operators()
    passes = calls[calls.phase == "backward"]
    assert len(passes) > 100
    assert passes.forward_path.notna().all()
    silu = passes[passes.op == "Aten.silu_backward"]
    assert set(silu.forward_path) == {f"model.layers.{i}.mlp.act_fn/Aten.silu" for i in (0, 1)}
    assert set(silu.path) == {f"model.layers.{i}.mlp.act_fn/Aten.silu_backward" for i in (0, 1)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["module", "api", "aten"])
def test_checkpointed_layers_have_the_gradients_of_plain_ones(mode, reentrant):
    model, ids = llama().train(), prompt(batch=2)
    plain = record(model, lambda: step(model, ids), mode=mode)
    model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    saved = record(model, lambda: step(model, ids), mode=mode)

    def table(run):
        rows = backward(run, "input")
        # the engine adds gradients in its own way, which depends on who else holds them
        rows = rows[rows.path.str.contains("layers.0.mlp") & ~rows.path.str.contains("Aten.add")]
        return {(r.path, r.call, r.slot): r.fingerprint for r in rows.itertuples()}

    assert table(saved) == table(plain)
    assert len(table(plain)) >= 5


def test_gradient_accumulation_keeps_each_pass_apart():
    model = nn.Linear(2, 2)
    inputs = [torch.randn(3, 2) for _ in range(3)]
    grads = []

    def work():
        for x in inputs:
            before = None if model.weight.grad is None else model.weight.grad.clone()
            model(x).sum().backward()
            grads.append(
                model.weight.grad.clone() if before is None else model.weight.grad - before
            )

    run = record(model, work)
    for at, grad in enumerate(grads):
        assert torch.allclose(
            run.tensor("", step=at, phase="backward", role="grad", slot="weight"), grad, atol=1e-6
        )


def test_parameters_are_not_copied_by_the_engine_because_we_look():
    """The engine keeps a gradient that nobody else holds, and copies any other."""
    model, ids = llama().train(), prompt(batch=2)
    calls = record(model, lambda: step(model, ids), mode="module+api+aten").operators()
    assert "Aten.copy_" not in set(calls[calls.phase == "backward"].op)


def test_only_the_phases_asked_for_are_recorded():
    model, ids = llama().train(), prompt(batch=2)
    for phase in ("forward", "backward"):
        for mode in ("module", "api", "aten"):
            assert set(
                record(model, lambda: step(model, ids), phase=phase, mode=mode).to_pandas().phase
            ) == {phase}


def test_steps_counted_by_hand_hold_several_calls():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    recording = Recording(model, DumpOptions(name="r", tokens="0,2"), manual=True)
    run = recording.start()
    for _ in range(4):
        for _ in range(2):
            model(x).sum().backward()
        recording.step()
    recording.stop()
    table = run.to_pandas().query("phase == 'forward' and role == 'output'")
    assert list(zip(table.step, table.call, strict=True)) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert len(backward(run, "grad")) == 8


def test_pausing_stops_calls_and_can_let_gradients_finish():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    for backward_goes_on, grads in ((True, 2), (False, 0)):
        recording = Recording(model, DumpOptions(name="r"))
        run = recording.start()
        loss = model(x).sum()
        recording.pause(backward=backward_goes_on)
        loss.backward()
        model(x)
        recording.resume()
        model(x)
        recording.stop()
        table = run.to_pandas()
        assert sorted(set(table[table.phase == "forward"].step)) == [0, 2]
        assert len(backward(run, "grad")) == grads


def test_saved_variables_and_their_gradients_are_recorded():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    recording = Recording(model, DumpOptions(name="r"))
    run = recording.start()
    hidden = model(x)
    recording.save("hidden", {"value": hidden, "twice": [hidden * 2]})
    (hidden.sum() * 3).backward()
    recording.stop()
    assert torch.equal(run.tensor("save/hidden", slot="value"), hidden)
    assert torch.equal(run.tensor("save/hidden", slot="twice.0"), hidden * 2)
    assert torch.equal(
        run.tensor("save/hidden", slot="value", phase="backward", role="input"),
        torch.full((3, 1), 3.0),
    )


def test_no_hook_outlives_the_recording_on_a_graph_that_is_kept():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    with ld.dump(model, name="r", mode="module+api") as run:
        loss = model(x).sum()
    before = len(run.to_pandas())
    loss.backward()
    assert len(run.to_pandas()) == before
    assert run.info()["complete"]


class Attention(torch.nn.Module):
    """One causal head. ``late``: scores are scaled, not queries. ``bug``: of a bias's gradient."""

    def __init__(self, late, bug=None):
        super().__init__()
        torch.manual_seed(0)
        self.late, self.bug = late, bug
        self.q, self.k, self.v = (torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        bias = {name: getattr(self, name).bias for name in "qkv"}
        if self.bug is not None:
            bias[self.bug].register_hook(lambda g: g * 1.0001)
        q, k, v = self.q(x), self.k(x), self.v(x)
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scale, turned = 12**-0.5, k.transpose(-1, -2)
        scores = q @ turned * scale if self.late else (q * scale) @ turned
        return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("bug", [None, "q", "v"])
def test_the_gradient_of_a_bias_whose_terms_cancel_is_noise_and_others_are_judged(bug, tmp_path):
    def run(name, late, bug=None):
        model = Attention(late, bug)
        torch.manual_seed(1)
        with ld.dump(model, name=name, path=tmp_path) as run:
            model(torch.randn(4, 9, 12)).square().mean().backward()
        return run

    golden, mine = run("golden", False), run("mine", True, bug)
    report = ld.compare(golden, mine, progress=False)
    of_bias = {
        d.site.path: d for d in report.differences if (d.site.role, d.site.slot) == ("grad", "bias")
    }
    # softmax does not see what is added to all scores of a query: but for rounding, it is zero
    zero = of_bias["k"].pair.golden
    terms = next(golden.records(path="k", phase="backward", role="input"))
    assert zero.summary.l2norm < 1e-5 * terms.summary.l2norm
    assert of_bias["k"].verdict in ("match", "within_noise")
    assert (report.verdict == "diverged") == (bug is not None)
    assert [d.site.path for d in report.differences if d.verdict == "diverged"] == [bug] * (
        bug is not None
    )


def test_a_small_gradient_of_a_scale_is_no_sum_that_cancels(tmp_path):
    class Scale(nn.Module):
        def __init__(self, bug):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(12))
            if bug:
                self.gamma.register_hook(lambda gradient: gradient * 1.001)

        def forward(self, x):
            return x * self.gamma

    def run(name, bug):
        model = nn.Sequential(Scale(bug), nn.Linear(12, 12))
        torch.manual_seed(0)
        nn.init.normal_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        with ld.dump(model, name=name, path=tmp_path) as run:
            (model(1e-4 * torch.randn(4, 9, 12)) + 1).square().mean().backward()
        return run

    report = ld.compare(run("golden", False), run("mine", True), progress=False)
    wrong = [d.site.slot for d in report.differences if d.verdict == "diverged"]
    assert wrong == ["gamma"]
