"""DeBERTa-v2 for one text, [time, channels]: one input projection, distances looked up at once.

The convolution beside the first layer is a sum of three shifted products.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def buckets(length: int, size: int, furthest: int):
    """Return the bucket of the distance of each query (row) from each key, [length, length]."""
    time = torch.arange(length)
    distance = time[:, None] - time[None, :]
    mid = size // 2
    far = distance.abs().clamp(min=mid)
    steps = torch.log(far / mid) / math.log((furthest - 1) / mid) * (mid - 1)
    logarithmic = distance.sign() * (torch.ceil(steps).long() + mid)
    return torch.where(distance.abs() <= mid, distance, logarithmic)


class DisentangledAttention(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.heads, self.dim = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * c.hidden_size, c.hidden_size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * c.hidden_size))
        self.out_proj = nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, x, rel, where):
        """rel: [distances, channels]; where: the row of each query and key, [time, time]."""
        width = x.shape[-1]
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).split(width, dim=-1)
        # distances share the projections of queries and keys
        both = F.linear(rel, self.in_proj_weight[: 2 * width], self.in_proj_bias[: 2 * width])
        rel_q, rel_k = both.split(width, dim=-1)
        q, k, v, rel_q, rel_k = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v, rel_q, rel_k))
        index = where.expand(self.heads, -1, -1)
        c2c = torch.einsum("qhd,khd->hqk", q, k)
        c2p = torch.einsum("qhd,rhd->hqr", q, rel_k).gather(2, index)
        p2c = torch.einsum("rhd,khd->hrk", rel_q, k).gather(1, index)
        p = torch.softmax((c2c + c2p + p2c) / math.sqrt(3 * self.dim), dim=-1)
        return self.out_proj(torch.einsum("hqk,khd->qhd", p, v).flatten(1))


class EncoderLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.attn = DisentangledAttention(c)
        self.attn_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.fc1 = nn.Linear(c.hidden_size, c.intermediate_size)
        self.fc2 = nn.Linear(c.intermediate_size, c.hidden_size)
        self.final_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)

    def forward(self, x, rel, where):
        x = self.attn_norm(x + self.attn(x, rel, where))
        return self.final_norm(x + self.fc2(F.gelu(self.fc1(x))))


class ShiftedConv(nn.Module):
    """A convolution of three steps over time, as a branch of its own."""

    def __init__(self, c) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(3, c.hidden_size, c.hidden_size))
        self.bias = nn.Parameter(torch.empty(c.hidden_size))
        self.norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)

    def forward(self, x, residual):
        padded = F.pad(x, (0, 0, 1, 1))
        shifted = padded.unfold(0, 3, 1)  # [time, channels, 3]
        y = torch.einsum("tis,sio->to", shifted, self.taps) + self.bias
        return self.norm(residual + F.gelu(y))


class Head(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)
        self.norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.out = nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, x):
        return self.out(self.norm(F.gelu(self.dense(x))))


class Disentangled(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.size, self.furthest = c.position_buckets, c.max_relative_positions
        self.words = nn.Embedding(c.vocab_size, c.hidden_size)
        self.words_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.distances = nn.Parameter(torch.empty(2 * self.size, c.hidden_size))
        self.distances_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(c) for _ in range(c.num_hidden_layers))
        self.conv = ShiftedConv(c)
        self.head = Head(c)

    def forward(self, ids):
        """ids: [time]"""
        where = buckets(len(ids), self.size, self.furthest) + self.size
        where = where.clamp(0, 2 * self.size - 1)
        rel = self.distances_norm(self.distances)
        x = embedded = self.words_norm(self.words(ids))
        for n, layer in enumerate(self.layers):
            x = layer(x, rel, where)
            if n == 0:
                x = self.conv(embedded, x)
        return self.head(x)


@torch.no_grad()
def run(model, ids, prompt: int):
    return [model(ids[0])]
