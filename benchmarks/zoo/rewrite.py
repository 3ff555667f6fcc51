"""Llama rewritten, as for a serving engine: other names and functions, the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.entry import Answer, Case, Zoo
from zoo.models import Model

PORTS = Zoo()
Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Attention(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.size, self.scale = theirs.head_dim, theirs.head_dim**-0.5
        self.wqkv = _linear(theirs.q_proj, theirs.k_proj, theirs.v_proj)
        self.wo = _linear(theirs.o_proj)
        self.interleaved = False

    def turn(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate x [batch, length, heads, size] by angles [length, size / 2]."""
        cos, sin = angles.cos()[None, :, None].to(x.dtype), angles.sin()[None, :, None].to(x.dtype)
        if self.interleaved:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: Cache, n: int) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.wqkv(x).view(batch, length, -1, self.size)
        q, k, v = heads.split(
            (width // self.size, *[(heads.shape[2] - width // self.size) // 2] * 2), dim=2
        )
        q, k, v = (part.transpose(1, 2) for part in (self.turn(q, angles), self.turn(k, angles), v))
        if n < len(cache):
            k, v = torch.cat((cache[n][0], k), dim=2), torch.cat((cache[n][1], v), dim=2)
            cache[n] = (k, v)
        else:
            cache.append((k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=length > 1, scale=self.scale, enable_gqa=True
        )
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.w13, self.w2 = _linear(theirs.gate_proj, theirs.up_proj), _linear(theirs.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Norm(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self.eps = (
            nn.Parameter(theirs.weight.detach().clone()),
            theirs.variance_epsilon,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(theirs.self_attn), FeedForward(theirs.mlp)
        self.attention_norm, self.ffn_norm = (
            Norm(theirs.input_layernorm),
            Norm(theirs.post_attention_layernorm),
        )

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: Cache, n: int) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles, cache, n)
        return x + self.feed_forward(self.ffn_norm(x))


class Port(nn.Module):
    """``forward``: token ids [batch, length] and the cache of earlier tokens -> logits, cache."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding.from_pretrained(
            theirs.model.embed_tokens.weight.detach().clone(), freeze=False
        )
        self.blocks = nn.ModuleList(Block(layer) for layer in theirs.model.layers)
        self.norm, self.output = Norm(theirs.model.norm), _linear(theirs.lm_head)
        self.register_buffer(
            "frequencies", theirs.model.rotary_emb.inv_freq.clone(), persistent=False
        )

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Cache | None = None, use_cache: bool = True
    ) -> Any:
        cache: Cache = [] if past_key_values is None else past_key_values
        seen = cache[0][0].shape[2] if cache else 0
        angles = torch.outer(
            torch.arange(seen, seen + input_ids.shape[1]).float(), self.frequencies
        )
        x = self.tok_embeddings(input_ids)
        for n, block in enumerate(self.blocks):
            x = block(x, angles, cache, n)
        return SimpleNamespace(logits=self.output(self.norm(x)), past_key_values=cache)


def _linear(*theirs: Any) -> nn.Linear:
    """Return one linear layer with the weights of several, one below the other."""
    weight = torch.cat([layer.weight.detach() for layer in theirs])
    ours = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    ours.weight = nn.Parameter(weight)
    return ours


def _both(case: Case, *pairs: tuple[str, str]) -> tuple[str, ...]:
    """Return the targets below the changed layer, by the original's names and by the port's."""
    layers = (f"model.layers.{case.n}", f"blocks.{case.n}")
    return tuple(
        f"{layer}.{name}" for pair in pairs for layer, name in zip(layers, pair, strict=True)
    )


@PORTS.add("P0", "port, renamed and fused", on="llama", benign=True)
def port(model: Model, case: Case) -> Answer:
    return Answer(model=Port(model))


@PORTS.add("P1", "port, RoPE interleaved", on="llama")
def port_interleaved(model: Model, case: Case) -> Answer:
    mine = Port(model)
    mine.blocks[case.n].attention.interleaved = True
    names = (
        ("self_attn/*@apply_rotary_pos_emb", "attention/*@turn"),
        ("self_attn/*@rotate_half", "attention/*@turn"),
    )
    return Answer.at(*_both(case, *names), model=mine)


@PORTS.add("P2", "port, eps ten times too large", on="llama")
def port_eps(model: Model, case: Case) -> Answer:
    mine = Port(model)
    mine.blocks[case.n].attention_norm.eps *= 10
    names = ("input_layernorm", "attention_norm"), ("input_layernorm/*", "attention_norm/*")
    return Answer.at(*_both(case, *names), model=mine)


@PORTS.add("P3", "port, gate and up swapped", on="llama")
def port_swapped(model: Model, case: Case) -> Answer:
    mine = Port(model)
    fused = mine.blocks[case.n].feed_forward.w13
    fused.weight.data = torch.cat(fused.weight.data.chunk(2)[::-1])
    names = (
        ("mlp.gate_proj", "feed_forward.w13"),
        ("mlp.up_proj", "feed_forward.w13"),
        ("mlp.*_proj/*", "feed_forward.w13/*"),
    )
    return Answer.at(*_both(case, *names), model=mine)


@PORTS.add("P4", "port, scale missing", on="llama")
def port_scale(model: Model, case: Case) -> Answer:
    mine = Port(model)
    mine.blocks[case.n].attention.scale = 1.0
    sdpa = "Functional.scaled_dot_product_attention"
    return Answer.at(
        *_both(case, (f"self_attn/Tensor.mul@{'eager_attention_forward'}", f"attention/{sdpa}")),
        model=mine,
    )
