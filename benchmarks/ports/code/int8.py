"""Llama with int8 weights: (qweight - zero) * scale, one scale and zero for each output channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def quantize(weight):
    """Return ``weight`` [out, in] as int8, with scales [out] float32 and zeros [out] int8."""
    low = weight.amin(dim=1).clamp(max=0)
    high = weight.amax(dim=1).clamp(min=0)
    scales = (high - low) / 255
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    qweight = (weight / scales[:, None] + zeros[:, None]).round().clamp(-128, 127)
    return qweight.to(torch.int8), scales, zeros.to(torch.int8)


class Int8Linear(nn.Module):
    """A linear layer without bias. The weight is made from its int8 form in each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(outputs))
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int8))

    def forward(self, x):
        steps = self.qweight.to(torch.int16) - self.zeros[:, None]
        weight = steps * self.scales[:, None]
        return F.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.square().mean(-1, True) + self.eps).sqrt()).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, self.head = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.base = config.rope_parameters["rope_theta"]
        self.q = Int8Linear(width, config.num_attention_heads * self.head)
        self.k = Int8Linear(width, config.num_key_value_heads * self.head)
        self.v = Int8Linear(width, config.num_key_value_heads * self.head)
        self.o = Int8Linear(config.num_attention_heads * self.head, width)

    def rotate(self, x, start: int):
        """Turn x [1, heads, tokens, channels], the first token of which stands at ``start``."""
        half = self.head // 2
        frequency = self.base ** -(torch.arange(half) / half)
        angle = torch.arange(start, start + x.shape[2])[:, None] * frequency
        cos, sin = angle.cos().repeat(1, 2).to(x.dtype), angle.sin().repeat(1, 2).to(x.dtype)
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)

    def forward(self, x, memory: dict):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        start = memory["k"].shape[2] if "k" in memory else 0
        q, k = self.rotate(q, start), self.rotate(k, start)
        if start:
            k = torch.cat((memory["k"], k), dim=2)
            v = torch.cat((memory["v"], v), dim=2)
        memory["k"], memory["v"] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not start, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.gate = Int8Linear(config.hidden_size, config.intermediate_size)
        self.up = Int8Linear(config.hidden_size, config.intermediate_size)
        self.down = Int8Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.norm_a = Norm(config.hidden_size, config.rms_norm_eps)
        self.attn = SelfAttention(config)
        self.norm_m = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x, memory: dict):
        x = x + self.attn(self.norm_a(x), memory)
        return x + self.mlp(self.norm_m(x))


class Int8Llama(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids, memories: list):
        x = self.embed(ids)
        for block, memory in zip(self.blocks, memories, strict=True):
            x = block(x, memory)
        return self.head(self.norm(x))


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    memories: list[dict] = [{} for _ in model.blocks]
    return [model(part, memories) for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1))]
