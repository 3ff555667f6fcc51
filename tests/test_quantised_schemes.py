"""Quantised models of several schemes: right ones agree, wrong ones are found in their module."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align import quantised as readings
from llmdebug_nb.comparison import clipping, grids, quantisation_steps
from quantised_models import KINDS, PROMPT, Model, folded, quantised

WEIGHTS, FUNCTIONS = {"weights": True}, {"weights": True, "mode": "module+api"}


def record(model, path, name, **options):
    with ld.dump(model, name=name, path=path, **options) as run, torch.no_grad():
        model(PROMPT)
    return run


def compared(path, mine, **options):
    golden = record(Model(), path, "golden", **options)
    return ld.compare(golden, record(mine, path, "mine", **options), progress=False)


@pytest.mark.parametrize("options", [WEIGHTS, FUNCTIONS], ids=["modules", "functions"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_quantised_model_is_within_noise(tmp_path, kind, options):
    report = compared(tmp_path, quantised(Model(), KINDS[kind]), **options)
    assert report.verdict == "within_noise"
    assert not report.findings
    assert "Quantised: 21 of 21 weights of mine are golden's within rounding" in str(report)


@pytest.mark.parametrize("options", [WEIGHTS, FUNCTIONS], ids=["modules", "functions"])
@pytest.mark.parametrize(
    ("bug", "at"), [("file", "layers.1.up"), ("bias", "layers.1.k"), ("bias", "layers.1.v")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_reads_right_weights_wrong_is_found(tmp_path, kind, bug, at, options):
    report = compared(tmp_path, quantised(Model(), KINDS[kind], bug, at), **options)
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == at
    assert "Quantised: 21 of 21 weights of mine" in str(report)


def test_inputs_that_are_clipped_are_found_though_steps_of_inputs_are_noise(tmp_path):
    mine = quantised(Model(), KINDS["W8A8"], "clip", "layers.1.up")
    report = compared(tmp_path, mine, weights=True)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "layers.1.up"


@pytest.mark.parametrize("options", [WEIGHTS, FUNCTIONS], ids=["modules", "functions"])
@pytest.mark.parametrize("kind", [None, "Awq", "W8A8"])
def test_factors_that_the_next_weight_takes_back_change_nothing(tmp_path, kind, options):
    mine = folded(Model())
    report = compared(tmp_path, quantised(mine, KINDS[kind]) if kind else mine, **options)
    assert report.verdict == "within_noise"
    assert not report.findings


@pytest.mark.parametrize("kind", [None, "Awq", "W8A8"])
@pytest.mark.parametrize("at", ["layers.1.k", "layers.2.up", "layers.1.down"])
def test_a_weight_that_lacks_its_factors_is_named(tmp_path, kind, at):
    mine = folded(Model(), at)
    report = compared(tmp_path, quantised(mine, KINDS[kind]) if kind else mine, weights=True)
    assert report.verdict == "diverged"
    assert report.findings[0].path == at
    assert report.findings[0].cause == "weight differs"


@pytest.mark.parametrize("bug", ["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_nothing_is_blamed_and_the_report_says_how_to_record_them(
    tmp_path, kind, bug
):
    report = compared(tmp_path, quantised(Model(), KINDS[kind], bug, "layers.1.v"))
    assert report.verdict == "incomparable"
    assert not report.findings
    for text in (str(report), report.summary()):
        assert "21 modules of mine have quantised weights" in text
        assert "Record both runs with weights=True (in a shell: --weights)." in text


def test_what_no_rounding_explains_is_blamed_without_weights_too(tmp_path):
    report = compared(tmp_path, quantised(Model(), KINDS["Awq"], "file", "layers.0.q"))
    assert report.verdict == "diverged"
    assert report.findings[0].path == "layers.0.q"
    assert "Record both runs with weights=True" in str(report)


def test_what_differs_before_the_first_quantised_module_is_blamed_without_weights(tmp_path):
    mine = quantised(Model(), KINDS["Gptq"])
    mine.layers[0].input_norm.eps = 0.1
    report = compared(tmp_path, mine)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "layers.0.input_norm"


def test_a_weight_that_is_rounded_but_kept_as_floats_is_judged_by_its_steps(tmp_path):
    mine = Model()
    with torch.no_grad():
        for layer in mine.layers:
            weight = layer.up.weight
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    assert compared(tmp_path, mine, weights=True).verdict == "within_noise"
    with torch.no_grad():
        mine.layers[1].up.weight[5] *= 1.1
    report = compared(tmp_path, mine, weights=True)
    assert report.verdict == "diverged"
    assert "row 5 is up to" in report.findings[0].evidence


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 8), st.floats(1e-3, 10))
def test_the_step_of_a_grid_is_found_and_other_floats_have_none(seed, bits, step):
    torch.manual_seed(seed)
    x = torch.randn(24, 32)
    most = 2 ** (bits - 1) - 1
    whole = (x / x.abs().max() * most).round()
    assert grids.step(whole * step) == pytest.approx(step, rel=1e-4) or whole.unique().numel() < 4
    assert grids.step(x) == 0.0


def test_activations_that_went_through_integers_have_their_steps():
    torch.manual_seed(1)
    golden = torch.randn(24, 32)
    mine = (golden / 0.03).round().clamp(-128, 127) * 0.03
    figures, _ = clipping.on_a_grid(golden, mine)
    share = 0.5 * 0.03 * (24 * 32) ** 0.5 / golden.norm()
    assert figures["grain_share"] == pytest.approx(float(share), rel=1e-3)
    assert figures["clipped"] == 0.0
    clipped = (golden / 0.03).round().clamp(-50, 50) * 0.03
    assert clipping.on_a_grid(golden, clipped)[0]["clipped"] > 8
    assert clipping.on_a_grid(golden, golden + 1e-3) == ({}, "")


@pytest.mark.parametrize("kind", KINDS)
def test_one_reading_gives_the_floats_of_the_kernel(kind):
    linear = Model().layers[0].up
    module = KINDS[kind](linear)
    stored = dict(module.named_buffers())
    name = next(n for n in stored if n in ("qweight", "weight_packed", "weight"))
    beside = [(n, x) for n, x in stored.items() if n != name]
    weight, made = linear.weight.detach(), module.floats().double()
    fits = list(readings.fits(stored[name], weight, beside, 1))
    same = [f for f in fits if torch.allclose(f(weight, stored[name])[1], made, atol=1e-9)]
    assert same
    figures, _ = quantisation_steps.compare(weight, made, same[0].grain(weight, stored[name]))
    assert figures["worst_channel"] <= 0.5


class Grouped(nn.Module):
    """A linear layer whose weight is stored in groups, with an axis for them or without."""

    def __init__(self, linear, names, flat):
        super().__init__()
        w = linear.weight.detach().unflatten(1, (-1, 16))
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        scale = (high - low) / 255
        zero = (-low / scale).round()
        q = (w / scale + zero).round().clamp(0, 255).to(torch.uint8)
        self.names, self.shape, self.bias = names, q.shape, linear.bias
        for name, x in zip(names, (q, scale, zero), strict=True):
            self.register_buffer(name, x.flatten(1) if flat else x)

    def forward(self, x):
        q, scale, zero = (getattr(self, name) for name in self.names)
        q = q.view(self.shape).float()
        scale, zero = (each.view(*self.shape[:2], 1) for each in (scale, zero))
        return nn.functional.linear(x, ((q - zero) * scale).flatten(1), self.bias)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("names", [("q", "sc", "z"), ("weight", "scale", "zero_point")], ids=str)
def test_groups_are_read_under_any_names_with_an_axis_of_their_own_or_without(names, flat):
    torch.manual_seed(0)
    golden = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.LayerNorm(32)).eval()
    mine = nn.Sequential(*(Grouped(m, names, flat) if isinstance(m, nn.Linear) else m
                           for m in copy.deepcopy(golden)))  # fmt: skip
    wrong = copy.deepcopy(mine)
    getattr(wrong[2], names[1])[5] *= 1.5
    x = torch.randn(2, 5, 32)
    for name, model in (("golden", golden), ("mine", mine), ("wrong", wrong)):
        with ld.dump(model, name=name, weights=True), torch.no_grad():
            model(x)
    assert ld.compare("golden", "mine").verdict == "within_noise"
    assert ld.compare("golden", "wrong").findings[0].path == "2"
