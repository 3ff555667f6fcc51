"""Int8 activations against floats: their steps are noise, what steps do not explain is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import llmdebug_nb as ld
from atb_llama import AtbLlama
from atb_quantised import Int8AtbLlama
from llmdebug_nb.align import rounded
from llmdebug_nb.comparison import clipping
from llmdebug_nb.core import constants
from models import llama

PROMPT = torch.tensor([5, 7, 9, 11, 2, 3, 17, 40, 41, 42, 8, 60])
BLAMED = {
    "wrong_scale": "3_Prefill_layer.0_Attention.0_RmsNorm",
    "clip": "3_Prefill_layer.2_Mlp",
    "zero_forgotten": "3_Prefill_layer.2_Mlp.3_Linear",
    "other_channel": "3_Prefill_layer.2_Mlp.1_Linear",
}
SIZES = {"num_hidden_layers": 4, "hidden_size": 64}


@torch.no_grad()
def atb(folder: Path, bug: str = "") -> ld.Report:
    """Compare the float and the int8 program of ATB."""
    model = llama(seed=0, **SIZES)
    bases = [folder / name / "atb_dump_data/data/0_7" for name in ("float", "int8")]
    AtbLlama(model, bases[0]).generate(PROMPT, 1)
    mine = Int8AtbLlama(model, bases[1], bug)
    mine.calibrated(PROMPT, 1)
    mine.generate(PROMPT, 1)
    return ld.compare(*(base.parents[1] for base in bases), progress=False)


def test_a_right_int8_program_of_atb_is_within_noise_of_the_float_program(tmp_path):
    report = atb(tmp_path)
    assert report.verdict == "within_noise"
    assert not report.findings
    assert "inputs and outputs of whole numbers are" in str(report)
    says = {d.pair.fit.says for d in report.differences if d.pair.fit is not None}
    assert "dequantised: (q - zero) * scale, as its call was given" in says
    assert "dequantised: q * scale of each row, by least squares" in says


@pytest.mark.parametrize("bug", BLAMED)
def test_a_bug_of_an_int8_program_of_atb_is_found_at_its_operation(tmp_path, bug):
    report = atb(tmp_path, bug)
    assert report.verdict == "diverged"
    assert report.findings[0].path == BLAMED[bug]


class Int8Linear(nn.Module):
    """``round(x / s) @ q.T * s * scales``, s of each token; ``bug`` as in `Int8AtbLlama`."""

    def __init__(self, linear: nn.Linear, bug: str) -> None:
        super().__init__()
        weight, self.bug = linear.weight.detach(), bug
        scales = weight.abs().amax(1) / 127
        self.register_buffer("qweight", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.abs().amax(-1, keepdim=True) / 127
        most = 100 if self.bug == "clip" else 127
        q = torch.clamp(
            torch.round(x / (steps * (1.25 if self.bug == "wrong_scale" else 1))), -most, most
        )
        total = torch.matmul(q.to(torch.int8).int(), self.qweight.int().t())
        scales = self.scales.roll(1) if self.bug == "other_channel" else self.scales
        return total.to(x.dtype) * steps * scales


def int8(model: nn.Module, bug: str) -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            own = bug if name == "model.layers.1.mlp.down_proj" else ""
            model.set_submodule(name, Int8Linear(module, own))
    return model


def compared(folder: Path, mode: str, bug: str = "") -> ld.Report:
    sizes = {"num_hidden_layers": 3, "initializer_range": 0.1, "hidden_size": 64}
    models = {"golden": llama(**sizes), "mine": int8(llama(**sizes), bug)}
    for name, model in models.items():
        with ld.dump(model, name=name, path=folder, mode=mode, weights=True), torch.no_grad():
            model.generate(PROMPT[None], max_new_tokens=2, do_sample=False)
    return ld.compare(folder / "golden", folder / "mine", progress=False)


@pytest.mark.parametrize("mode", ["module", "api", "aten"])
def test_a_right_int8_model_of_torch_is_within_noise(tmp_path, mode):
    report = compared(tmp_path, mode)
    assert report.verdict == "within_noise"
    assert not report.findings


@pytest.mark.parametrize("bug", ["wrong_scale", "clip", "other_channel"])
@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_a_bug_of_an_int8_model_of_torch_is_found_in_its_module(tmp_path, mode, bug):
    report = compared(tmp_path, mode, bug)
    assert report.verdict == "diverged"
    assert report.findings[0].path.partition("/")[0] == "model.layers.1.mlp.down_proj"


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["", "row", "column"]), st.floats(0, 0.05))
def test_scales_are_found_by_least_squares_and_steps_explain_the_rest(seed, of, noise):
    torch.manual_seed(seed)
    x = torch.randn(24, 32)
    x = x * {"": 1, "row": torch.rand(24, 1) + 0.01, "column": torch.rand(1, 32) + 0.01}[of]
    axis = {"": (0, 1), "row": (1,), "column": (0,)}[of]
    scale = x.double().abs().amax(axis, keepdim=True) / 127
    q = (x / scale).round().to(torch.int8)
    golden = x.double() * (1 + noise * torch.randn(24, 32))
    steps = rounded._fitted(q.double(), golden)
    assert steps is not None
    apart = (steps.floats(q) - golden) / steps.scale
    assert float(apart.square().mean().sqrt()) <= 0.5 + 127 * noise
    figures, _ = clipping.compare(golden, steps.floats(q), steps.scale.expand(24, 32), q, side=1)
    assert figures["clipped"] <= constants.EVEN_ERRORS


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_integers_that_say_nothing_of_the_floats_are_given_no_scale(seed):
    torch.manual_seed(seed)
    q = torch.randint(-127, 128, (24, 32)).double()
    assert rounded._fitted(q, torch.randn(24, 32).double()) is None


def test_ones_and_zeros_are_no_steps():
    mask = (torch.arange(64).reshape(8, 8) % 3 == 0).double()
    assert rounded._fitted(mask, mask.clone()) is None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([90, 100, 110]))
def test_a_clip_inside_the_range_is_told_from_one_at_its_end(seed, most):
    torch.manual_seed(seed)
    golden = (torch.rand(24, 32).double() * 2 - 1) * 140
    grain = torch.ones_like(golden)
    for at, is_found in ((most, True), (127, False)):
        q = golden.round().clamp(-at, at)
        figures, says = clipping.compare(golden, q, grain, q, side=1)
        assert (float(figures["clipped"] or 0) > constants.EVEN_ERRORS) is is_found
        assert says.startswith("clipped") is is_found
