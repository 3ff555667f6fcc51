"""An inference engine for gpt-oss, one request at a time: flat tokens, slots written in place.

Keys and values of all layers lie in two buffers. A layer with a window reads only the slots that
its window reaches. Tokens are sorted by expert, so that each expert's are neighbours. A norm takes
what the last part gave and the residual stream, and returns the normed sum and the sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

SLOTS = 64


class AddNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x, stream=None):
        stream = x if stream is None else stream + x
        wide = stream.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse * self.gain).to(x.dtype), stream


class YarnRope(nn.Module):
    """Cosines and sines of positions, by the "NTK by parts" rule."""

    def __init__(self, cfg) -> None:
        super().__init__()
        p, dim = cfg.rope_parameters, cfg.head_dim
        base, factor = p["rope_theta"], p["factor"]
        self.concentration = 0.1 * math.log(factor) + 1.0
        period = base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)

        def channel(turns: float) -> float:
            """Return the pair of channels that makes so many turns in the trained context."""
            trained = p["original_max_position_embeddings"]
            return dim / 2 * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

        low, high = channel(p["beta_fast"]), channel(p["beta_slow"])
        ramp = (torch.arange(dim // 2, dtype=torch.float) - low) / (high - low)
        kept = 1 - ramp.clamp(0, 1)
        inverse = (1 - kept) / (factor * period) + kept / period
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, places):
        angle = torch.outer(places.float(), self.inverse)
        return angle.cos() * self.concentration, angle.sin() * self.concentration


def turn(x, rope):
    """Rotate halves. x: [tokens, ..., channels]"""
    shape = (len(x),) + (1,) * (x.ndim - 2) + (-1,)
    c, s = (table.view(shape).to(x.dtype) for table in rope)
    a, b = x.tensor_split(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


class Slots:
    """Keys and values of all layers, [layers, slots, heads, channels]. The slot is the place."""

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(layers, SLOTS, heads, dim, dtype=dtype)
        self.values = torch.zeros(layers, SLOTS, heads, dim, dtype=dtype)
        self.used = 0


class SinkAttention(nn.Module):
    def __init__(self, cfg, n: int) -> None:
        super().__init__()
        self.n, self.dim = n, cfg.head_dim
        self.groups = cfg.num_key_value_heads
        self.members = cfg.num_attention_heads // self.groups
        local = cfg.layer_types[n] == "sliding_attention"
        self.window = cfg.sliding_window if local else SLOTS
        wide, narrow = cfg.num_attention_heads * self.dim, self.groups * self.dim
        self.parts = (wide, narrow, narrow)
        self.qkv = nn.Linear(cfg.hidden_size, sum(self.parts))
        self.out = nn.Linear(wide, cfg.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(cfg.num_attention_heads))

    def forward(self, x, rope, slots):
        start, end = slots.used, slots.used + len(x)
        q, k, v = self.qkv(x).split(self.parts, dim=-1)
        q = turn(q.unflatten(-1, (self.groups, self.members, self.dim)), rope)
        slots.keys[self.n, start:end] = turn(k.unflatten(-1, (self.groups, self.dim)), rope)
        slots.values[self.n, start:end] = v.unflatten(-1, (self.groups, self.dim))
        first = max(0, start + 1 - self.window)
        keys, values = slots.keys[self.n, first:end], slots.values[self.n, first:end]
        scores = torch.einsum("tgmd,sgd->gmts", q, keys) / math.sqrt(self.dim)
        if len(x) > 1:  # a single token sees all that was read
            ago = torch.arange(start, end)[:, None] - torch.arange(first, end)
            scores = scores.masked_fill((ago < 0) | (ago >= self.window), float("-inf"))
        sink = self.sinks.view(self.groups, self.members, 1, 1)
        top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
        mass = (scores - top).exp()
        total = mass.sum(dim=-1, keepdim=True) + (sink - top).exp()
        y = torch.einsum("gmts,sgd->tgmd", mass / total, values)
        return self.out(y.flatten(1))


class SortedExperts(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        e, h, i = cfg.num_local_experts, cfg.hidden_size, cfg.intermediate_size
        self.top, self.experts = cfg.num_experts_per_tok, e
        self.alpha, self.limit = cfg.swiglu_alpha, cfg.swiglu_limit
        self.router = nn.Linear(h, e)
        self.w13 = nn.Parameter(torch.zeros(e, 2 * i, h))
        self.b13 = nn.Parameter(torch.zeros(e, 2 * i))
        self.w2 = nn.Parameter(torch.zeros(e, h, i))
        self.b2 = nn.Parameter(torch.zeros(e, h))

    def activate(self, both):
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def forward(self, x):
        share, chosen = self.router(x).softmax(dim=-1).topk(self.top, dim=-1)
        share = share / share.sum(dim=-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat, minlength=self.experts).tolist()
        done = []
        for e, rows in enumerate(x[order // self.top].split(sizes)):
            if len(rows):
                inner = self.activate(F.linear(rows, self.w13[e], self.b13[e]))
                done.append(F.linear(inner, self.w2[e], self.b2[e]))
        y = torch.cat(done)[order.argsort()].unflatten(0, (-1, self.top))
        return (y * share.unsqueeze(-1)).sum(dim=1)


class Layer(nn.Module):
    def __init__(self, cfg, n: int) -> None:
        super().__init__()
        self.norm1 = AddNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = SinkAttention(cfg, n)
        self.norm2 = AddNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.moe = SortedExperts(cfg)

    def forward(self, x, stream, rope, slots):
        x, stream = self.norm1(x, stream)
        x = self.attn(x, rope, slots)
        x, stream = self.norm2(x, stream)
        return self.moe(x), stream


class Engine(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.rope = YarnRope(cfg)
        self.layers = nn.ModuleList(Layer(cfg, n) for n in range(cfg.num_hidden_layers))
        self.norm = AddNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def slots(self) -> Slots:
        cfg = self.cfg
        dtype = self.embed.weight.dtype
        return Slots(cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim, dtype)

    def forward(self, ids, slots):
        """ids: [tokens]"""
        rope = self.rope(torch.arange(slots.used, slots.used + len(ids)))
        x, stream = self.embed(ids), None
        for layer in self.layers:
            x, stream = layer(x, stream, rope, slots)
        slots.used += len(ids)
        return self.head(self.norm(x, stream)[0])


@torch.no_grad()
def run(model, ids, prompt: int):
    slots = model.slots()
    parts = ids[0].split([prompt] + [1] * (ids.shape[1] - prompt))
    return [model(part, slots) for part in parts]
