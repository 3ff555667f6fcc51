"""GPT-2 written from the formulas: functions over weights, einsum, nothing of nn.functional.

The model has no modules for norms, activations and attention. Weights of a `Conv1D` are stored the
way of a `Linear`, and the fused projection is split into heads at once.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def layer_norm(x, gain, bias, eps: float):
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return gain * (centred / torch.sqrt(variance + eps)) + bias


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    exponents = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return exponents / exponents.sum(dim=-1, keepdim=True)


class Block(nn.Module):
    """One layer: four weight matrices with their biases, and two norms."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        head = width // heads
        self.qkv = nn.Parameter(torch.empty(3, heads, head, width))
        self.qkv_bias = nn.Parameter(torch.empty(3, heads, head))
        self.out = nn.Parameter(torch.empty(width, heads, head))
        self.out_bias = nn.Parameter(torch.empty(width))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.gain_1, self.bias_1, self.gain_2, self.bias_2 = (
            nn.Parameter(torch.empty(width)) for _ in range(4)
        )

    def attend(self, x, past):
        q, k, v = torch.einsum("btw,chdw->cbhtd", x, self.qkv) + self.qkv_bias[:, None, :, None]
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        queries, keys = scores.shape[-2:]
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
        scores = torch.where(causal, scores, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", softmax(scores), v)
        return torch.einsum("bhqd,whd->bqw", mixed, self.out) + self.out_bias, (k, v)

    def forward(self, x, past):
        attended, present = self.attend(layer_norm(x, self.gain_1, self.bias_1, self.eps), past)
        x = x + attended
        x = x + self.down(gelu(self.up(layer_norm(x, self.gain_2, self.bias_2, self.eps))))
        return x, present


class GPT(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.eps = config.layer_norm_epsilon
        self.tokens = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.places = nn.Parameter(torch.empty(config.n_positions, config.n_embd))
        self.blocks = nn.ModuleList(
            Block(config.n_embd, config.n_head, self.eps) for _ in range(config.n_layer)
        )
        self.gain = nn.Parameter(torch.empty(config.n_embd))
        self.bias = nn.Parameter(torch.empty(config.n_embd))

    def forward(self, ids, pasts):
        start = 0 if pasts[0] is None else pasts[0][0].shape[2]
        x = self.tokens[ids] + self.places[start : start + ids.shape[1]]
        presents = []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, present = block(x, past)
            presents.append(present)
        x = layer_norm(x, self.gain, self.bias, self.eps)
        return torch.einsum("btw,vw->btv", x, self.tokens), presents


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    pasts, rows = [None] * len(model.blocks), []
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        logits, pasts = model(part, pasts)
        rows.append(logits)
    return rows
