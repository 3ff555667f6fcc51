"""What a finding says of masks is about mine's scores behind its own mask, not before it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recordings import compared

SIZE, LENGTH = 32, 9


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) * SIZE**-0.5
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        scores = torch.where(allowed, scores, torch.finfo(x.dtype).min)
        return torch.matmul(torch.softmax(scores, -1), self.v(x))


class Golden(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.out(self.attention(x))


class Port(nn.Module):
    def __init__(self, golden, shift, fill):
        super().__init__()
        parts = golden.attention.q, golden.attention.k, golden.attention.v
        self.qkv = nn.Linear(SIZE, 3 * SIZE)
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.qkv.bias.data = torch.cat([part.bias.data for part in parts])
        self.o = golden.out
        self.shift, self.fill = shift, fill

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) / SIZE**0.5
        scores = scores + torch.full((LENGTH, LENGTH), self.fill).triu(self.shift)
        return torch.add(self.o(torch.bmm(F.softmax(scores, 2), v)), x)


@pytest.mark.parametrize(
    ("shift", "fill", "keeps"),
    [
        (2, float("-inf"), "j <= i+1"), (2, -1e9, "j <= i+1"), (0, -1e9, "j <= i-1"),
        (1, float("-inf"), None), (1, -1e9, None),
    ],
)  # fmt: skip
def test_the_mask_of_mine_is_told_where_it_masks(shift, fill, keeps):
    torch.manual_seed(0)
    golden, x = Golden(), torch.randn(2, LENGTH, SIZE)
    report = compared(golden, Port(golden, shift, fill), x, mode=("module", "api"))
    if keeps is None:
        assert report.verdict in ("match", "within_noise")
        return
    relations = [finding.relation for finding in report.findings]
    assert any(keeps in each for each in relations), relations
    assert not any("every position" in each for each in relations)
