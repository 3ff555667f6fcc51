"""Command R7B (Cohere 2) for one request: flat tokens, ring buffers for the local layers.

Queries, keys and values come of one product, the gate and the linear part of the MLP of another. A
layer's memory is a ring of slots that remembers which position each slot holds, -1 for none.
"""

from __future__ import annotations

import torch
from torch import nn

EVER = 1 << 30  # the window of a layer that sees everything


class PlainLayerNorm(nn.Module):
    """Layer norm with a gain and no bias."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) / torch.sqrt(var + self.eps) * self.gain


class Ring:
    """Keys and values of the last positions of a layer."""

    def __init__(self, slots: int, heads: int, dim: int) -> None:
        self.slots = slots
        self.k = torch.zeros(slots, heads, dim)
        self.v = torch.zeros(slots, heads, dim)
        self.held = torch.full((slots,), -1)

    def with_new(self, k, v, pos):
        """Return what is remembered followed by what is new."""
        keys = torch.cat((self.k.to(k.dtype), k))
        values = torch.cat((self.v.to(v.dtype), v))
        return keys, values, torch.cat((self.held, pos))

    def remember(self, k, v, pos):
        k, v, pos = k[-self.slots :], v[-self.slots :], pos[-self.slots :]
        slot = pos % self.slots
        self.k[slot] = k.float()
        self.v[slot] = v.float()
        self.held[slot] = pos


def swirl(x, pos, theta: float):
    """Rotary embedding of neighbouring channels. x: [tokens, heads, channels]."""
    d = x.shape[-1]
    angle = pos[:, None, None].float() * theta ** (-torch.arange(0, d, 2).float() / d)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, cfg, n: int) -> None:
        super().__init__()
        self.hq, self.hk = cfg.num_attention_heads, cfg.num_key_value_heads
        self.d = cfg.hidden_size // self.hq
        self.theta = cfg.rope_parameters["rope_theta"]
        self.local = cfg.layer_types[n] == "sliding_attention"
        self.window = cfg.sliding_window if self.local else EVER
        self.wqkv = nn.Linear(cfg.hidden_size, (self.hq + 2 * self.hk) * self.d, bias=False)
        self.wo = nn.Linear(self.hq * self.d, cfg.hidden_size, bias=False)

    def forward(self, x, pos, ring):
        qkv = self.wqkv(x).unflatten(-1, (-1, self.d))
        q, k, v = qkv.split((self.hq, self.hk, self.hk), dim=1)
        if self.local:
            q, k = swirl(q, pos, self.theta), swirl(k, pos, self.theta)
        keys, values, held = ring.with_new(k, v, pos)
        ring.remember(k, v, pos)
        q = q.unflatten(1, (self.hk, -1)) * self.d**-0.5
        scores = torch.einsum("tgmd,sgd->gmts", q, keys)
        ago = pos[:, None] - held[None, :]
        seen = (ago >= 0) & (ago < self.window) & (held >= 0)
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self.wo(torch.einsum("gmts,sgd->tgmd", p, values).flatten(1))


class FeedForward(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.w13 = nn.Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=False)
        self.w2 = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.w13(x).tensor_split(2, dim=-1)
        return self.w2(gate * gate.sigmoid() * up)


class ParallelBlock(nn.Module):
    def __init__(self, cfg, n: int) -> None:
        super().__init__()
        self.norm = PlainLayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.attn = Attention(cfg, n)
        self.ffn = FeedForward(cfg)

    def forward(self, x, pos, ring):
        h = self.norm(x)
        a = self.attn(h, pos, ring)
        return x + (a + self.ffn(h))


class Command(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.blocks = nn.ModuleList(ParallelBlock(cfg, n) for n in range(cfg.num_hidden_layers))
        self.norm = PlainLayerNorm(cfg.hidden_size, cfg.layer_norm_eps)

    def rings(self, longest: int = 48):
        attns = [block.attn for block in self.blocks]
        return [Ring(min(a.window, longest), a.hk, a.d) for a in attns]

    def forward(self, ids, pos, rings):
        """ids, pos: [tokens]"""
        x = self.tok(ids)
        for block, ring in zip(self.blocks, rings, strict=True):
            x = block(x, pos, ring)
        x = self.norm(x) * self.cfg.logit_scale
        return x @ self.tok.weight.T


@torch.no_grad()
def run(model, ids, prompt: int):
    ids, rings = ids[0], model.rings()
    pos = torch.arange(len(ids))
    logits = [model(ids[:prompt], pos[:prompt], rings)]
    for t in range(prompt, len(ids)):
        logits.append(model(ids[t : t + 1], pos[t : t + 1], rings))
    return logits
