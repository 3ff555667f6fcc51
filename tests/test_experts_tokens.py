"""Each expert is given tokens of its own: a right port that gives them alone agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import llmdebug_nb as ld

WIDTH, EXPERTS, CHOSEN, TOKENS = 16, 4, 2, 6


class Experts(nn.Module):
    """Golden: each expert computes all tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        shares, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        every = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, shares)
        return x + sum(every[..., n, None] * one(x) for n, one in enumerate(self.experts))


class Dispatching(Experts):
    """Mine: each expert computes the tokens that chose it."""

    renormalised = True

    def forward(self, x):
        flat = x.flatten(0, 1)
        shares, chosen = self.gate(flat).softmax(-1).topk(CHOSEN, -1)
        if self.renormalised:
            shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for n, one in enumerate(self.experts):
            token, place = (chosen == n).nonzero(as_tuple=True)
            if len(token):
                total.index_add_(0, token, one(flat[token]) * shares[token, place, None])
        return x + total.view_as(x)


class Raw(Dispatching):
    renormalised = False


class Net(nn.Module):
    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def recorded(kind, seed, mode):
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    with ld.dump(model := Net(kind, seed), name=kind.__name__, mode=mode) as run, torch.no_grad():
        model(x)
    return run


@pytest.mark.parametrize("mode", ["module", "module+api"])
@pytest.mark.parametrize("seed", range(4))
def test_a_right_dispatch_agrees(seed, mode):
    report = ld.compare(recorded(Experts, seed, mode), recorded(Dispatching, seed, mode))
    assert report.verdict == "within_noise"
    assert not report.findings


@pytest.mark.parametrize("mode", ["module", "module+api"])
def test_shares_that_are_not_renormalised_are_found_in_their_layer(mode):
    report = ld.compare(recorded(Experts, 0, mode), recorded(Raw, 0, mode))
    assert report.findings[0].path.startswith("layers.0")
