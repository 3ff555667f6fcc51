"""T5 (version 1.1) written anew: fused projections, the decoder's view of the source made once.

The relative bias is looked up for each distance and then laid out as [heads, queries, keys].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class ScaleNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean_square = x.float().square().mean(-1, keepdim=True)
        return (x.float() * (mean_square + self.eps).rsqrt()).to(x.dtype) * self.g


class DistanceBias(nn.Module):
    """A learned number for each head and bucket of distances."""

    def __init__(self, cfg, both_ways: bool) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.buckets = cfg.relative_attention_num_buckets
        self.furthest = cfg.relative_attention_max_distance
        self.table = nn.Parameter(torch.empty(cfg.num_heads, self.buckets))

    def bucket(self, distance: int) -> int:
        """distance: place of the key minus that of the query."""
        buckets, first = self.buckets, 0
        if self.both_ways:
            buckets //= 2
            first = buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = buckets // 2
        if distance < exact:
            return first + distance
        share = math.log(distance / exact) / math.log(self.furthest / exact)
        return first + min(exact + int(share * (buckets - exact)), buckets - 1)

    def forward(self, start: int, queries: int, keys: int):
        places = [[self.bucket(k - q) for k in range(keys)] for q in range(start, start + queries)]
        return self.table[:, torch.tensor(places)]


class SelfAttention(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.heads, self.inner = cfg.num_heads, cfg.num_heads * cfg.d_kv
        self.in_proj = nn.Linear(cfg.d_model, 3 * self.inner, bias=False)
        self.out_proj = nn.Linear(self.inner, cfg.d_model, bias=False)

    def forward(self, x, bias, past=None):
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        if past:
            k = torch.cat([past[-1][0], k], dim=1)
            v = torch.cat([past[-1][1], v], dim=1)
        if past is not None:
            past.append((k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores + bias
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.out_proj(out.flatten(2))


class CrossAttention(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.heads, inner = cfg.num_heads, cfg.num_heads * cfg.d_kv
        self.q_proj = nn.Linear(cfg.d_model, inner, bias=False)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=False)

    def forward(self, x, keys, values):
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
        return self.out_proj(out.flatten(2))


class GatedGelu(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.wi = nn.Linear(cfg.d_model, 2 * cfg.d_ff, bias=False)
        self.wo = nn.Linear(cfg.d_ff, cfg.d_model, bias=False)

    def forward(self, x):
        gate, linear = self.wi(x).chunk(2, dim=-1)
        return self.wo(F.gelu(gate, approximate="tanh") * linear)


class EncoderLayer(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.attn_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.attn = SelfAttention(cfg)
        self.ff_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.ff = GatedGelu(cfg)

    def forward(self, x, bias):
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.ff(self.ff_norm(x))


class DecoderLayer(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.attn_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.attn = SelfAttention(cfg)
        self.cross_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.cross = CrossAttention(cfg)
        self.ff_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.ff = GatedGelu(cfg)

    def forward(self, x, bias, past, keys, values):
        x = x + self.attn(self.attn_norm(x), bias, past)
        x = x + self.cross(self.cross_norm(x), keys, values)
        return x + self.ff(self.ff_norm(x))


class TextToText(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.layers, self.heads = cfg.num_decoder_layers, cfg.num_heads
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(self.layers))
        self.encoder_bias = DistanceBias(cfg, both_ways=True)
        self.decoder_bias = DistanceBias(cfg, both_ways=False)
        self.encoder_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        self.decoder_norm = ScaleNorm(cfg.d_model, cfg.layer_norm_epsilon)
        inner = cfg.num_heads * cfg.d_kv
        self.source_kv = nn.Linear(cfg.d_model, 2 * self.layers * inner, bias=False)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)

    def encode(self, source):
        x = self.tokens(source)
        bias = self.encoder_bias(0, source.shape[1], source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        x = self.encoder_norm(x)
        kv = self.source_kv(x).unflatten(-1, (self.layers, 2, self.heads, -1))
        return kv.permute(2, 3, 0, 1, 4, 5)

    def forward(self, target, state, source=None):
        """target: [batch, new tokens]; state: what earlier calls left, see `run`."""
        if source is not None:
            state["source"] = self.encode(source)
        x = self.tokens(target)
        start, new = state["length"], target.shape[1]
        end = start + new
        state["length"] = end
        bias = self.decoder_bias(start, new, end)
        ahead = torch.ones(new, end, dtype=torch.bool).triu(start + 1)
        bias = bias.masked_fill(ahead, float("-inf"))
        for n, layer in enumerate(self.decoder):
            keys, values = state["source"][n]
            x = layer(x, bias, state["past"][n], keys, values)
        x = self.decoder_norm(x)
        return self.head(x)


@torch.no_grad()
def run(model, source, target, prompt: int):
    """Encode, decode ``prompt`` tokens of the target at once and the others one by one."""
    state = {"length": 0, "past": [[] for _ in range(model.layers)]}
    logits = [model(target[:, :prompt], state, source)]
    rest = target[:, prompt:].split(1, dim=1)
    return logits + [model(token, state) for token in rest]
