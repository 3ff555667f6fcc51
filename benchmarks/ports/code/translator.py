"""BART with time first: [time, batch, channels], and [batch * heads, time, channels] for heads.

Keys and values of the source are computed once for all decoder layers; those of the target grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

PAD = 1
OFFSET = 2  # the first rows of the table of places are not used


@dataclass
class Memory:
    """What the decoder keeps. ``padding``: [batch, 1, source], true where there is no token."""

    padding: torch.Tensor | None = None
    source: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    length: int = 0


def to_heads(x, heads: int):
    """[time, batch, channels] to [batch * heads, time, channels of a head]"""
    return x.reshape(len(x), x.shape[1] * heads, -1).transpose(0, 1)


def from_heads(x, batch: int):
    return x.transpose(0, 1).reshape(x.shape[1], batch, -1)


def attend(q, k, v, hidden=None):
    """``hidden``: what is not to be seen, or nothing. Queries are scaled already."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.bmm(scores.softmax(dim=-1), v)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, hidden=None, memory: Memory | None = None, n: int = 0):
        q, k, v = (to_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        if memory is not None:
            if n in memory.keys:
                k = torch.cat((memory.keys[n], k), dim=1)
                v = torch.cat((memory.values[n], v), dim=1)
            memory.keys[n], memory.values[n] = k, v
        return self.out(from_heads(attend(q * self.scale, k, v, hidden), x.shape[1]))


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def look(self, source):
        k, v = self.kv(source).chunk(2, dim=-1)
        return to_heads(k, self.heads), to_heads(v, self.heads)

    def forward(self, x, k, v, hidden):
        q = to_heads(self.q(x) * self.scale, self.heads)
        return self.out(from_heads(attend(q, k, v, hidden), x.shape[1]))


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, inner)
        self.down = nn.Linear(inner, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class EncoderLayer(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.attn = SelfAttention(cfg.d_model, cfg.encoder_attention_heads)
        self.attn_norm = nn.LayerNorm(cfg.d_model)
        self.ffn = FeedForward(cfg.d_model, cfg.encoder_ffn_dim)
        self.ffn_norm = nn.LayerNorm(cfg.d_model)

    def forward(self, x, hidden):
        x = self.attn_norm(x + self.attn(x, hidden))
        return self.ffn_norm(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.attn = SelfAttention(cfg.d_model, cfg.decoder_attention_heads)
        self.attn_norm = nn.LayerNorm(cfg.d_model)
        self.cross = CrossAttention(cfg.d_model, cfg.decoder_attention_heads)
        self.cross_norm = nn.LayerNorm(cfg.d_model)
        self.ffn = FeedForward(cfg.d_model, cfg.decoder_ffn_dim)
        self.ffn_norm = nn.LayerNorm(cfg.d_model)

    def forward(self, x, n: int, ahead, memory: Memory):
        x = self.attn_norm(x + self.attn(x, ahead, memory, n))
        k, v = memory.source[n]
        x = self.cross_norm(x + self.cross(x, k, v, memory.padding))
        return self.ffn_norm(x + self.ffn(x))


class Places(nn.Module):
    """Adds the embeddings of places, and norms the sum."""

    def __init__(self, cfg) -> None:
        super().__init__()
        self.table = nn.Embedding(cfg.max_position_embeddings + OFFSET, cfg.d_model)
        self.norm = nn.LayerNorm(cfg.d_model)

    def forward(self, x, start: int = 0):
        places = torch.arange(start, start + len(x))
        return self.norm(x + self.table(places + OFFSET).unsqueeze(1))


class Translator(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.heads = cfg.decoder_attention_heads
        self.scale = math.sqrt(cfg.d_model) if cfg.scale_embedding else 1.0
        self.words = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.source_places, self.target_places = Places(cfg), Places(cfg)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.bias = nn.Parameter(torch.zeros(cfg.vocab_size))

    def embed(self, ids):
        return self.words(ids) * self.scale

    def encode(self, ids, memory: Memory):
        """ids: [time, batch]"""
        memory.padding = (ids == PAD).T.repeat_interleave(self.heads, dim=0).unsqueeze(1)
        x = self.source_places(self.embed(ids))
        for layer in self.encoder:
            x = layer(x, memory.padding)
        memory.source = [layer.cross.look(x) for layer in self.decoder]

    def forward(self, ids, memory: Memory, source=None):
        """ids: the target's new tokens, [time, batch]. ``source``: with the first of them."""
        if source is not None:
            self.encode(source, memory)
        start, new = memory.length, len(ids)
        ahead = torch.ones(new, start + new, dtype=torch.bool).triu(start + 1)
        x = self.target_places(self.embed(ids), start)
        for n, layer in enumerate(self.decoder):
            x = layer(x, n, ahead, memory)
        memory.length += new
        return F.linear(x, self.words.weight, self.bias)


@torch.no_grad()
def run(model, source, target, prompt: int):
    """source, target: [batch, time]"""
    memory, target = Memory(), target.T
    logits = [model(target[:prompt], memory, source.T)]
    for token in target[prompt:].split(1):
        logits.append(model(token, memory))
    return [each[:, 0] for each in logits]
