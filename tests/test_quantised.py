"""A quantised model against its float form: its own steps are noise, anything beyond is found."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.align import quantised
from llmdebug_nb.comparison import quantisation_steps

ROWS, COLUMNS = 24, 32


def quantize(weight):
    """Return int8 weights, scales and zeros by row."""
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    scales = (high - low) / 255
    zeros = (-128 - low / scales).round()
    stored = (weight / scales[:, None] + zeros[:, None]).round().clamp(-128, 127)
    return stored.to(torch.int8), scales, zeros.to(torch.int8)


class Int8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        parts = zip(("qweight", "scales", "zeros"), quantize(linear.weight.detach()), strict=True)
        for name, part in parts:
            self.register_buffer(name, part)

    def forward(self, x):
        steps = self.qweight.to(torch.int16) - self.zeros[:, None]
        return nn.functional.linear(x, steps * self.scales[:, None])


class Net(nn.Module):
    def __init__(self, linear=lambda inner: inner):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(linear(nn.Linear(COLUMNS, COLUMNS, False)) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _record(model, name, path):
    torch.manual_seed(1)
    with ld.dump(model, name=name, path=path, weights=True) as run, torch.no_grad():
        model(torch.randn(1, 8, COLUMNS))
    return run


def _compared(path, change=lambda model: None):
    mine = Net(Int8Linear)
    change(mine)
    return ld.compare(_record(Net(), "golden", path), _record(mine, "mine", path), progress=False)


def test_a_right_quantised_model_is_within_noise_and_its_weights_are_paired(tmp_path):
    report = _compared(tmp_path)
    assert report.verdict == "within_noise"
    assert report.findings == []
    (line,) = [line for line in str(report).splitlines() if line.startswith("Quantised: ")]
    assert line.startswith("Quantised: 5 of 5 weights of mine are golden's within rounding")
    assert line in report.summary()
    assert line in report.to_html(tmp_path / "report.html").read_text().replace("&#39;", "'")
    weights = [d for d in report.differences if d.site.role == "weight" and d.pair.golden]
    assert [d.pair.mine.site.slot for d in weights] == ["qweight"] * 5
    for d in weights:
        weight = Net().get_submodule(d.site.path).weight.detach()
        scales = quantize(weight)[1]
        most = 0.5 * math.sqrt(COLUMNS) * float(scales.norm() / weight.norm())
        assert d.limit == pytest.approx(most, rel=1e-6)
        assert most / 4 < d.error < most


@pytest.mark.parametrize("what", ["scale of a channel", "zero of a channel", "another weight"])
def test_what_the_steps_do_not_explain_is_a_finding_with_the_channel(tmp_path, what):
    def change(model):
        layer = model.layers[2]
        if what == "scale of a channel":
            layer.scales[11] *= 1.1
        elif what == "zero of a channel":
            layer.zeros[11] += 1
        else:
            layer.qweight.copy_(model.layers[1].qweight)

    report = _compared(tmp_path, change)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "layers.2"
    assert "weight" in report.findings[0].cause
    assert "Quantised: 4 of 5 weights of mine" in str(report)
    row = next(d for d in report.differences if d.site.role == "weight" and d.verdict == "diverged")
    assert row.site.path == "layers.2"
    if what != "another weight":
        assert row.reason.startswith("row 11 is ")
        assert "its parameter weight differs: row 11 is " in report.findings[0].evidence


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["row", "column", "tensor"]), st.integers(2, 8))
def test_rounding_to_the_nearest_is_explained_whatever_the_weight(seed, by, bits):
    torch.manual_seed(seed)
    w = torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1) ** 3 * 50
    axis = {"row": (1,), "column": (0,), "tensor": (0, 1)}[by]
    scale = (w.abs().amax(axis, keepdim=True) / (2 ** (bits - 1) - 0.5)).double()
    m = (w / scale).round() * scale
    figures, _ = quantisation_steps.compare(w, m, scale.expand(ROWS, COLUMNS))
    assert figures["channels_off"] == 0
    assert figures["worst_channel"] <= 0.5
    assert (m - w).norm() / w.norm() <= figures["grain_share"]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, ROWS - 1), st.sampled_from([0, 1]))
def test_a_channel_that_is_off_is_named_on_its_axis(seed, at, axis):
    torch.manual_seed(seed)
    w = torch.randn(ROWS, COLUMNS)
    step = (w.abs().amax(1 - axis, keepdim=True) / 127).double()
    m = (w / step).round() * step
    m.select(axis, at).mul_(1.3)
    figures, says = quantisation_steps.compare(w, m, step.expand(ROWS, COLUMNS))
    assert figures["channels_off"] == 1
    assert says.startswith(f"{('row', 'column')[axis]} {at} is ")


def test_channels_in_another_order_are_left_to_what_follows():
    w = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    stored, scales, zeros = quantize(w)
    m = ((stored.double() - zeros[:, None]) * scales[:, None]).flip(0)
    spread = scales.flip(0)[:, None].expand(ROWS, COLUMNS).double()
    figures, _ = quantisation_steps.compare(w, m, spread)
    assert figures["worst_channel"] > 0.5
    assert figures["channels_off"] == 0


def test_scales_count_as_no_shape_of_a_matrix_and_a_norm_keeps_its_own():
    linear = {"qweight": [4, 8], "scales": [4], "zeros": [4], "bias": [4]}
    assert quantised.without_scales(linear) == [[4, 8], [4]]
    norm = {"scale": [8], "offset": [8]}
    assert quantised.without_scales(norm) == [[8], [8]]
