"""Stop and graft in lockstep: at a bug, never at what is written otherwise."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from lockstep_pairs import (
    ALL,
    BUGS,
    DOWN,
    INPUTS,
    MODULES,
    NORM,
    hooks,
    nothing_is_left,  # noqa: F401
    two,
)
from recordings import scaled

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from ports.sets import PORTS


def test_both_programs_are_stopped_at_the_first_divergence() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    seen: list[str] = []
    mine.model.layers[2].register_forward_pre_hook(lambda *_: seen.append("layer 2"))
    golden.lm_head.register_forward_pre_hook(lambda *_: seen.append("golden's head"))
    before = hooks(golden, mine)
    report = ld.lockstep(golden, mine, INPUTS, stop="first", progress=False)
    assert seen == []
    assert report.lockstep.stopped.startswith(DOWN)
    assert [f.path for f in report.findings] == [DOWN]
    assert "stopped at the first divergence" in str(report)
    assert hooks(golden, mine) == before


class Stack(torch.nn.Module):
    """Layers behind each other. ``counts``: how often it says which inputs are positive."""

    def __init__(self, counts: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.counts, self.scale = counts, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.counts):
            torch.gt(x, 0)
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (self.scale if i == 1 else 1.0)
        return x


def test_what_a_program_made_that_was_ahead_when_both_were_stopped_is_not_compared() -> None:
    golden, mine = Stack(0, 1.0), Stack(1, 1.25)  # golden looks for the call that mine alone makes
    x = torch.randn(2, 8)
    report = ld.lockstep(golden, mine, x, stop="first", progress=False, **ALL)
    assert report.lockstep.stopped.startswith("/Tensor.mul step 0 call 1")
    finding = report.findings[0]
    assert (finding.path, finding.cause) == ("/Tensor.mul", "scalar argument differs")
    for run in (report.golden, report.mine):
        made = {record.site.path for record in run.records(role="output")}
        assert "layers.1" in made
        assert not made & {"layers.2", ""}


@pytest.mark.parametrize("wanted", [{"stop": "first"}, {}])
def test_hooks_and_buffers_that_a_program_left_are_gone_before_it_runs_again(
    wanted: dict[str, Any],
) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    before, buffers = hooks(golden, mine), len([*mine.buffers()])

    def work(model: Any) -> None:
        norm = model.model.norm
        assert not norm._forward_hooks or len(norm._forward_hooks) == 1  # that of the recording
        handle = norm.register_forward_hook(lambda module, args, output: output * 1.5)
        norm.register_buffer("cache", torch.zeros(1))
        model(**INPUTS)
        handle.remove()

    ld.lockstep(golden, mine, work, progress=False, window=20_000, **wanted, **MODULES)
    assert hooks(golden, mine) == before
    assert len([*mine.buffers()]) == buffers


def test_calls_that_do_not_fit_the_window_are_told() -> None:
    torch.manual_seed(0)
    golden = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 5000))
    mine = copy.deepcopy(golden)
    scaled("1", 1.5)(mine)
    x = torch.randn(16, 64)
    small, large = (
        ld.lockstep(golden, mine, x, stop="first", window=window, progress=False, **MODULES)
        for window in (400_000, "1GiB")
    )
    assert large.lockstep.stopped.startswith("1 step 0")
    assert large.lockstep.unjudged == 0
    assert small.lockstep.stopped or small.lockstep.unjudged
    assert small.lockstep.stopped or "passed over" in str(small)
    assert small.verdict == large.verdict == "diverged"


class Sparse(torch.nn.Module):
    """A layer behind a product with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.eye(8).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.sparse.mm(self.mask, x))


def test_a_model_with_a_sparse_buffer_is_compared() -> None:
    golden, mine = Sparse(), Sparse()
    scaled("layer", 1.1)(mine)
    report = ld.lockstep(golden, mine, torch.randn(8, 8), progress=False, **MODULES)
    assert [finding.path for finding in report.findings] == ["layer"]
    assert torch.equal(mine.mask.to_dense(), torch.eye(8))


def test_programs_that_agree_are_not_stopped() -> None:
    golden, mine = two()
    mine = mine.to(torch.bfloat16)
    report = ld.lockstep(golden, mine, INPUTS, stop="first", progress=False)
    assert report.lockstep.stopped == ""
    assert report.verdict == "within_noise"


@pytest.mark.parametrize("wanted", [{"stop": "first"}, {"graft": True}])
def test_values_in_another_order_are_no_divergence(wanted: dict[str, Any]) -> None:
    port = PORTS["meta"]  # it rotates neighbouring channels, so its query weights are permuted
    golden = port.golden()
    mine = port.mine(golden)

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    report = ld.lockstep(golden.model, mine.model, work, progress=False, **wanted, **MODULES)
    took = report.lockstep
    assert (took.stopped, took.grafts) == ("", [])
    assert "layers.*.attention.wq" in took.passed
    assert report.verdict == "within_noise"
    assert "no stop and no graft at these places" in str(report)


@pytest.mark.parametrize("window", ["1GiB", "60kB"])
def test_a_graft_shows_two_bugs_in_one_pass(window: str) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    before = hooks(golden, mine)
    plain = ld.lockstep(golden, mine, INPUTS, window=window, progress=False)
    report = ld.lockstep(golden, mine, INPUTS, graft=True, window=window, progress=False)
    assert {f.path for f in report.findings} == {DOWN, NORM}
    assert report.verdict == "diverged"
    assert [graft.path for graft in report.lockstep.grafts] == [DOWN, NORM]
    results = [d for d in report.differences if d.site.path == "lm_head"]
    assert {d.verdict for d in results} == {"match"}
    assert {d.verdict for d in plain.differences if d.site.path == "lm_head"} == {"diverged"}
    assert hooks(golden, mine) == before


class Learner(torch.nn.Module):
    """Two layers. ``wrong``: the result is too large. ``cut``: no gradient leaves the first one."""

    def __init__(self, wrong: bool = False, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.wrong, self.cut = wrong, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x.detach() if self.cut else x) + (0.25 if self.wrong else 0.0)


@pytest.mark.parametrize("cut", [False, True])
def test_a_backward_pass_goes_through_a_graft(cut: bool) -> None:
    """Of the last result of all, too, and it shows a gradient that is wrong by itself."""

    def run(model: nn.Module) -> None:
        model(torch.ones(2, 8)).square().sum().backward()

    report = ld.lockstep(Learner(), Learner(True, cut), run, graft=True, progress=False)
    assert [each.path for each in report.lockstep.grafts] == [""]
    assert report.findings[0].path == ""
    backward = [d for d in report.differences if d.site.phase == "backward"]
    agree = {d.site.path for d in backward if d.verdict in ("match", "within_noise")}
    assert ("first" in agree) == (not cut)
    assert "last" in agree


@pytest.mark.parametrize("how", ["grad", "jvp", "vmap of grad"])
def test_transforms_go_through_a_graft(how: str) -> None:
    def run(model: nn.Module) -> None:
        own, x = dict(model.named_parameters()), torch.ones(2, 8)

        def loss(own: dict[str, torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
            return torch.func.functional_call(model, own, (x,)).square().sum()

        if how == "grad":
            torch.func.grad(loss)(own)
        elif how == "jvp":
            torch.func.jvp(loss, (own,), (own,))
        else:
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, x)
        model(x)

    report = ld.lockstep(Learner(), Learner(True), run, graft=True, progress=False)
    assert [each.path for each in report.lockstep.grafts][-1] == ""


def test_a_graft_in_a_port_names_both_bugs() -> None:
    port = PORTS["attention"]
    golden = port.golden()
    mine = port.mine(golden, port.bug("k_heads"))
    right = port.mine(golden)
    last = next(p for p, m in reversed(list(right.model.named_modules())) if not [*m.children()])

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    plain = ld.lockstep(golden.model, mine.model, work, progress=False)
    scaled(last, 1.2)(mine.model)
    report = ld.lockstep(golden.model, mine.model, work, graft=True, progress=False)
    paths = [finding.path for finding in report.findings]
    assert plain.findings[0].path in paths
    assert last in paths


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(x))


@pytest.mark.parametrize("alone", [False, True])
def test_a_graft_leaves_a_layer_on_its_fast_path(alone: bool) -> None:
    golden = Encoder().eval().requires_grad_(False)
    golden = golden.encoder.layers[1] if alone else golden
    mine = copy.deepcopy(golden)
    (mine if alone else mine.encoder.layers[1]).linear1.weight.mul_(1.5)
    inputs = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    report = ld.lockstep(golden, mine, inputs, graft=True, progress=False)
    paths = [{each.site.path for each in run.records()} for run in (report.golden, report.mine)]
    assert paths[0] == paths[1]  # off that path, the modules inside a layer are called, too
    assert [graft.path for graft in report.lockstep.grafts] == ["" if alone else "encoder.layers.1"]
    assert not hooks(golden, mine).count(1)
    shared = nn.modules.module
    assert not shared._global_forward_hooks
    assert not shared._global_forward_pre_hooks
