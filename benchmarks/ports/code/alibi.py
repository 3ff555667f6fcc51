"""MPT for a server: the tokens of a step are flat, keys and values lie in pages of four.

A step has the prompts of some sequences, or one new token of each. Prompts are attended from what
was just computed, new tokens from the pages. The rows of the fused projection are sorted by head,
so that it can be cut into shards of whole heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

PAGE = 4


@dataclass
class Step:
    """``starts``: where each sequence starts in the flat tokens, and where the last one ends.

    ``lengths``: of each sequence, with its new tokens. ``tables``: each sequence's pages.
    """

    starts: list[int]
    lengths: list[int]
    tables: torch.Tensor

    @property
    def decoding(self) -> bool:
        return self.starts[-1] == len(self.lengths)

    def slots(self):
        """Return the page of each token, and its place in the page."""
        pages, places = [], []
        for n, length in enumerate(self.lengths):
            new = self.starts[n + 1] - self.starts[n]
            at = torch.arange(length - new, length)
            pages.append(self.tables[n, at // PAGE])
            places.append(at % PAGE)
        return torch.cat(pages), torch.cat(places)


class Pages:
    """A layer's keys, [pages, heads, channels, places], and values, [pages, places, heads, ..]"""

    def __init__(self, pages: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(pages, heads, dim, PAGE, dtype=dtype)
        self.values = torch.zeros(pages, PAGE, heads, dim, dtype=dtype)

    def write(self, k, v, page, place):
        self.keys[page, :, :, place] = k
        self.values[page, place] = v

    def read(self, table, length: int):
        """Return a sequence's keys, [heads, channels, places], and values, [heads, places, ..]"""
        some = table[: math.ceil(length / PAGE)]
        k = self.keys[some].permute(1, 2, 0, 3).flatten(2)
        v = self.values[some].flatten(0, 1).transpose(0, 1)
        return k[..., :length], v[:, :length]


def slopes_of(heads: int, most: float):
    """Return the slopes of ALiBi: where heads are no power of two, every other one comes first."""
    power = 1 << (heads - 1).bit_length()
    ladder = torch.pow(2.0, -torch.arange(1, power + 1) * most / power)
    if power != heads:
        ladder = torch.cat((ladder[1::2], ladder[0::2]))
    return ladder[:heads]


class Gain(nn.Module):
    """Layer norm without a bias."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, eps=self.eps)


class PagedAttention(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.heads, self.dim = cfg.n_heads, cfg.d_model // cfg.n_heads
        self.clip = cfg.attn_config.clip_qkv
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=False)
        self.proj = nn.Linear(cfg.d_model, cfg.d_model, bias=False)
        slopes = slopes_of(self.heads, cfg.attn_config.alibi_bias_max)
        self.register_buffer("slopes", slopes.view(-1, 1, 1), persistent=False)

    def forward(self, x, step: Step, slots, pages: Pages):
        fused = self.qkv(x)
        fused = fused.clamp(-self.clip, self.clip)
        q, k, v = fused.view(len(x), self.heads, 3, self.dim).unbind(2)
        pages.write(k, v, *slots)
        q = q * self.dim**-0.5
        y = self.decode(q, step, pages) if step.decoding else self.prefill(q, k, v, step)
        return self.proj(y.flatten(1))

    def prefill(self, q, k, v, step: Step):
        parts = []
        for start, end in zip(step.starts, step.starts[1:], strict=False):
            a, b, c = (each[start:end].transpose(0, 1) for each in (q, k, v))
            place = torch.arange(end - start)
            ago = place[:, None] - place
            scores = (a @ b.mT).float() - self.slopes * ago
            p = scores.masked_fill(ago < 0, float("-inf")).softmax(dim=-1)
            parts.append((p.to(c.dtype) @ c).transpose(0, 1))
        return torch.cat(parts)

    def decode(self, q, step: Step, pages: Pages):
        parts = []
        for n, length in enumerate(step.lengths):
            k, v = pages.read(step.tables[n], length)
            scores = (q[n, :, None] @ k).float()
            scores = scores - self.slopes * torch.arange(length - 1, -1, -1)
            parts.append(scores.softmax(dim=-1).to(v.dtype) @ v)
        return torch.stack([part.squeeze(1) for part in parts])


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim, bias=False)
        self.fc2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.ln1 = Gain(cfg.d_model, cfg.layer_norm_epsilon)
        self.attn = PagedAttention(cfg)
        self.ln2 = Gain(cfg.d_model, cfg.layer_norm_epsilon)
        self.mlp = Mlp(cfg.d_model)

    def forward(self, x, step: Step, slots, pages: Pages):
        x = x + self.attn(self.ln1(x), step, slots, pages)
        h = self.ln2(x)
        return x + self.mlp(h)


class Server(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.ln = Gain(cfg.d_model, cfg.layer_norm_epsilon)

    def pages(self, count: int) -> list[Pages]:
        heads, dtype = self.cfg.n_heads, self.embed.weight.dtype
        return [Pages(count, heads, self.cfg.d_model // heads, dtype) for _ in self.blocks]

    def forward(self, ids, step: Step, pages: list[Pages]):
        """ids: [tokens of all sequences]"""
        slots = step.slots()
        x = self.embed(ids)
        for block, own in zip(self.blocks, pages, strict=True):
            x = block(x, step, slots, own)
        return self.ln(x) @ self.embed.weight.T


@torch.no_grad()
def run(model, ids, prompt: int):
    """Serve one sequence, whose pages are not in order."""
    ids, total = ids[0], ids.shape[1]
    count = total // PAGE + 2
    order = [*range(1, count, 2), *range(0, count, 2)]
    pages, tables = model.pages(count), torch.tensor([order])
    logits = [model(ids[:prompt], Step([0, prompt], [prompt], tables), pages)]
    for t in range(prompt, total):
        logits.append(model(ids[t : t + 1], Step([0, 1], [t + 1], tables), pages))
    return logits
