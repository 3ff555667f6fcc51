"""Mixtral with the tokens of each expert side by side.

The pairs of token and expert are sorted by expert, so that each expert takes one slice; results are
added to their tokens at once. Router weights are the softmax of the chosen scores. Queries of a
group share their key by broadcasting.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.scale


class Rope:
    """Angles of positions; turns the halves of a head as one complex plane each."""

    def __init__(self, channels: int, base: float) -> None:
        self.frequency = 1.0 / base ** (torch.arange(0, channels, 2).float() / channels)

    def table(self, positions, dtype):
        angle = positions.float()[:, None] * self.frequency[None, :]
        return torch.stack((angle.cos(), angle.sin())).to(dtype)

    @staticmethod
    def turn(x, table):
        cos, sin = table
        real, imaginary = x.unflatten(-1, (2, -1)).unbind(-2)
        turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
        return torch.stack(turned, dim=-2).flatten(-2)


class GroupedAttention(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.groups = config.num_key_value_heads
        self.shared = config.num_attention_heads // self.groups
        self.channels = config.hidden_size // config.num_attention_heads
        inner = config.num_attention_heads * self.channels
        self.query = nn.Linear(config.hidden_size, inner, bias=False)
        self.key_value = nn.Linear(config.hidden_size, 2 * self.groups * self.channels, bias=False)
        self.project = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x, table, cache):
        q = self.query(x).unflatten(-1, (self.groups, self.shared, self.channels))
        kv = self.key_value(x).unflatten(-1, (2, self.groups, 1, self.channels))
        q = q.permute(0, 2, 3, 1, 4)  # [batch, groups, shared, tokens, channels]
        k, v = kv.permute(2, 0, 3, 4, 1, 5)
        q, k = Rope.turn(q, table), Rope.turn(k, table)
        k = torch.cat((cache[0], k), dim=-2)
        v = torch.cat((cache[1], v), dim=-2)
        scores = (q * self.channels**-0.5) @ k.mT
        tokens, known = scores.shape[-2:]
        hidden = torch.ones(tokens, known, dtype=torch.bool).triu(known - tokens + 1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        return self.project(mixed.permute(0, 3, 1, 2, 4).flatten(2)), (k, v)


class SortedExperts(nn.Module):
    """``w13``: gate and up of each expert [experts, 2 * inner, width]; ``w2``: down."""

    def __init__(self, config) -> None:
        super().__init__()
        experts, width = config.num_local_experts, config.hidden_size
        self.top = config.num_experts_per_tok
        self.router = nn.Linear(width, experts, bias=False)
        self.w13 = nn.Parameter(torch.empty(experts, 2 * config.intermediate_size, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, config.intermediate_size))

    def expert(self, n: int, x):
        gate, up = F.linear(x, self.w13[n]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w2[n])

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, chosen = self.router(flat).float().topk(self.top, dim=-1)
        share = best.softmax(dim=-1).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.w13)).tolist()
        tokens = order // self.top
        parts = flat[tokens].split(counts)
        results = torch.cat([self.expert(n, part) for n, part in enumerate(parts) if len(part)])
        results = results * share.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, tokens, results).view_as(x)


class Layer(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.norm_1 = Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = GroupedAttention(config)
        self.norm_2 = Norm(config.hidden_size, config.rms_norm_eps)
        self.experts = SortedExperts(config)

    def forward(self, x, table, cache):
        y, cache = self.attention(self.norm_1(x), table, cache)
        x = x + y
        return x + self.experts(self.norm_2(x)), cache


class SparseDecoder(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        channels = config.hidden_size // config.num_attention_heads
        self.empty = (1, config.num_key_value_heads, 1, 0, channels)
        self.rope = Rope(channels, config.rope_parameters["rope_theta"])
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.unembed = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self):
        empty = torch.empty(self.empty, dtype=self.wte.weight.dtype)
        return [(empty, empty) for _ in self.layer]

    def forward(self, ids, caches):
        x = self.wte(ids)
        known = caches[0][0].shape[-2]
        table = self.rope.table(known + torch.arange(ids.shape[1]), x.dtype)
        for n, layer in enumerate(self.layer):
            x, caches[n] = layer(x, table, caches[n])
        return self.unembed(self.norm(x))


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    caches = model.new_cache()
    logits = [model(ids[:, :prompt], caches)]
    for place in range(prompt, ids.shape[1]):
        logits.append(model(ids[:, place : place + 1], caches))
    return logits
