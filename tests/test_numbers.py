"""A number that both programs have, and that different operators take."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.causes import causes
from llmdebug_nb.search import swap_numbers
from recordings import AGREED
from recordings import record as recorded


class Normed(nn.Module):
    """A norm between two layers."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.weight = (
            nn.Linear(16, 16),
            nn.Linear(16, 8),
            nn.Parameter(torch.rand(16)),
        )
        self.norm = norm

    def forward(self, x):
        return self.leave(self.norm(self.enter(x), self.weight))


def fused(eps):
    return lambda x, weight: F.rms_norm(x, (16,), weight, eps)  # a norm of torch


def fused_by_default(x, weight):
    return F.layer_norm(x, (16,), weight)


def formula(eps):
    def norm(x, weight):
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + eps))  # adds eps

    return norm


def centred(eps):
    def norm(x, weight):
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight  # adds it

    return norm


def compared(golden, mine):
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    runs = (
        recorded(model := Normed(norm), lambda m=model: m(x), name, mode="module+api")
        for name, norm in (("golden", golden), ("mine", mine))
    )
    return ld.compare(*runs)


def line_of(what, text):
    lines, start = inspect.getsourcelines(what)
    return start + next(at for at, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("golden", "mine", "where", "words"),
    [
        (
            formula(1e-6),
            fused(1e-2),
            (fused, "a norm of torch"),
            "Functional.rms_norm takes 0.01 in mine where Tensor.add takes 1e-06 in golden",
        ),
        (
            fused(1e-6),
            formula(1e-2),
            (formula, "adds eps"),
            "Tensor.add takes 0.01 in mine where Functional.rms_norm takes 1e-06 in golden",
        ),
        (
            centred(1e-2),
            fused_by_default,
            (fused_by_default, "layer_norm"),
            "Functional.layer_norm takes 1e-05 in mine where Tensor.add takes 0.01 in golden",
        ),
        (
            lambda x, w: F.layer_norm(x, (16,), w, None, 1e-6),
            centred(1e-2),
            (centred, "adds it"),
            "Tensor.add takes 0.01 in mine where Functional.layer_norm takes 1e-06 in golden",
        ),
    ],
)
def test_an_eps_of_a_norm_is_compared_with_one_of_a_formula(golden, mine, where, words):
    (finding,) = compared(golden, mine).findings
    assert finding.cause == causes.SCALAR
    assert words in finding.evidence
    assert "with golden's number it gives what golden computes" in finding.evidence
    assert finding.mine.line == line_of(*where)


@pytest.mark.parametrize(
    ("op", "given", "exchanged"),
    [
        # with 0 heads this one ends the process
        ("Torch._transformer_encoder_layer_fwd", {"1": 64, "2": 4, "9": 1e-12}, {"9"}),
        ("Functional.group_norm", {"1": 4, "kwargs.eps": 1e-5}, {"kwargs.eps"}),
        ("Torch.roll", {"1": 2, "2": 0}, set()),
        ("Tensor.__pow__", {"1": 2}, {"1"}),
        ("Tensor.__rsub__", {"1": 1}, {"1"}),
        ("Tensor.__getitem__", {"1.0": 3}, set()),
        ("Tensor.mul", {"1": 2}, {"1"}),
        ("Aten.add.Tensor", {"1": 1, "kwargs.alpha": 2}, {"1", "kwargs.alpha"}),
        ("Functional.softplus", {"kwargs.beta": 2, "1": 1}, {"1", "kwargs.beta"}),
    ],
)
def test_only_what_may_be_a_fraction_is_exchanged(op, given, exchanged):
    scalars = {slot: (type(x).__name__, repr(x)) for slot, x in given.items()}
    assert set(swap_numbers._exchanged(op, scalars)) == exchanged


def test_norms_of_one_eps_agree_however_they_are_written():
    assert compared(formula(1e-2), fused(1e-2)).verdict in AGREED


@pytest.mark.parametrize("scale", [0.25, 49.0])  # the inverse of that one's inverse is another
def test_a_scale_is_compared_with_a_division(scale):
    def scaled(x, weight):
        return torch.tanh(torch.mul(x, scale)) * weight

    def divided(x, weight):
        return F.hardtanh(torch.div(x, 8.0).tanh()) * weight

    (finding,) = compared(scaled, divided).findings
    words = f"Torch.div takes 8.0 in mine where Torch.mul takes {scale} in golden"
    assert words in finding.evidence
