"""A choice among experts that rounding decides is told, and blamed on no call."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.explain import causes
from recordings import record

WIDTH, EXPERTS, TOKENS = 16, 4, 12


class Router(nn.Module):
    """Gives the scores of all experts, and the places of the two best."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        scores = F.linear(x, self.weight)
        return scores, scores.topk(2).indices


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def mixed(self, x, chosen):
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(-1, chosen, 1.0)
        every = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (every * shares[:, None]).sum(-1)

    def forward(self, x):
        return self.mixed(x, self.router(x)[1])


class Scores(nn.Module):
    """Gives the scores alone, added up by another operator."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x[:, None] * self.weight).sum(-1)


class Written(Mixture):
    """Chooses by itself. ``factor``: of what it gives."""

    def __init__(self, golden, factor):
        super().__init__()
        self.router, self.experts, self.factor = (
            Scores(golden.router.weight),
            golden.experts,
            factor,
        )

    def forward(self, x):
        return self.mixed(x, self.router(x).topk(2).indices) * self.factor


def with_a_near_tie():
    """Return a model and an input for which the two sums choose other experts for some tokens."""
    for seed in range(200):
        torch.manual_seed(seed)
        golden, x = Mixture().bfloat16(), torch.randn(TOKENS, WIDTH).bfloat16()
        sides = [golden.router(x)[1], Scores(golden.router.weight)(x).topk(2).indices]
        same = (sides[0].sort().values == sides[1].sort().values).all(-1)
        if 0 < int((~same).sum()) < TOKENS // 2:
            return golden, x
    raise AssertionError("no seed makes a near tie")


def compared(factor):
    golden, x = with_a_near_tie()
    mine = Written(golden, factor)
    with torch.no_grad():
        runs = [
            record(golden, lambda: golden(x), "golden", mode="module"),
            record(mine, lambda: mine(x), "mine", mode="module"),
        ]
        return ld.compare(*runs)


def test_another_expert_at_a_near_tie_is_no_error():
    report = compared(factor=1.0)
    assert report.verdict == "nondeterministic"
    (finding,) = report.findings
    assert finding.cause == causes.NEAR_TIE
    assert "golden chooses 2 of 4, by" in finding.evidence
    assert "rounding decides" in report.summary()


def test_a_near_tie_hides_no_error_of_the_other_tokens():
    report = compared(factor=1.5)
    assert report.verdict == "diverged"
    assert causes.NEAR_TIE not in {finding.cause for finding in report.findings}
