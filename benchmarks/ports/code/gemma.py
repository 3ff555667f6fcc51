"""Gemma 2 on a stack of weights: one tensor per kind for all layers, functions for the rest.

The weights of all layers lie in one tensor with the layer as first axis, as in JAX programs. A
layer is a function; the cache is one tensor for all layers. Masks are tables of positions.
"""

from __future__ import annotations

import torch
from torch import nn


def rms(x, scale, eps: float):
    x32 = x.to(torch.float32)
    x32 = x32 / (x32.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (x32 * (1 + scale.to(torch.float32))).to(x.dtype)


def cap(x, limit: float):
    return limit * torch.tanh(x / limit)


def rope(x, positions, base: float):
    """Turn x [heads, tokens, channels]."""
    half = x.shape[-1] // 2
    period = base ** (torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None] / period
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def gelu(x):
    return x * 0.5 * (1 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))


class Gemma(nn.Module):
    SHAPES = ("pre_attention", "post_attention", "pre_mlp", "post_mlp")

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        layers, width, inner = (
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
        )
        queries, groups, d = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.table = nn.Parameter(torch.empty(config.vocab_size, width))
        self.final = nn.Parameter(torch.empty(width))
        for name in self.SHAPES:
            self.register_parameter(name, nn.Parameter(torch.empty(layers, width)))
        self.q = nn.Parameter(torch.empty(layers, queries, d, width))
        self.kv = nn.Parameter(torch.empty(layers, 2, groups, d, width))
        self.o = nn.Parameter(torch.empty(layers, queries, d, width))
        self.gating = nn.Parameter(torch.empty(layers, 2, inner, width))
        self.linear = nn.Parameter(torch.empty(layers, inner, width))

    def attention(self, n: int, x, positions, cache, mask):
        c = self.config
        q = torch.einsum("td,hkd->htk", x, self.q[n])
        k, v = torch.einsum("td,cgkd->cgtk", x, self.kv[n])
        q = rope(q, positions, c.rope_parameters["rope_theta"])
        k = rope(k, positions, c.rope_parameters["rope_theta"])
        q = q * c.query_pre_attn_scalar**-0.5
        cache[0][:, positions] = k
        cache[1][:, positions] = v
        groups = q.unflatten(0, (c.num_key_value_heads, -1))
        scores = cap(torch.einsum("grtk,gsk->grts", groups, cache[0]), c.attn_logit_softcapping)
        scores = scores.float().masked_fill(~mask, -torch.inf)
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp().to(x.dtype)
        mixed = torch.einsum("grts,gsk->grtk", weights, cache[1]).flatten(0, 1)
        return torch.einsum("htk,hkd->td", mixed, self.o[n])

    def mlp(self, n: int, x):
        gate, value = torch.einsum("td,cfd->ctf", x, self.gating[n])
        return torch.einsum("tf,fd->td", gelu(gate) * value, self.linear[n])

    def layer(self, n: int, x, positions, cache, masks):
        eps = self.config.rms_norm_eps
        local = self.config.layer_types[n] == "sliding_attention"
        y = rms(x, self.pre_attention[n], eps)
        y = self.attention(n, y, positions, cache, masks[int(local)])
        x = x + rms(y, self.post_attention[n], eps)
        y = self.mlp(n, rms(x, self.pre_mlp[n], eps))
        return x + rms(y, self.post_mlp[n], eps)

    def forward(self, tokens, positions, cache):
        c = self.config
        x = self.table[tokens] * torch.tensor(c.hidden_size**0.5, dtype=self.table.dtype)
        keys = torch.arange(cache.shape[3])
        distance = positions[:, None] - keys
        causal = distance >= 0
        masks = (causal, causal & (distance < c.sliding_window))
        for n in range(c.num_hidden_layers):
            x = self.layer(n, x, positions, cache[n], masks)
        x = rms(x, self.final, c.rms_norm_eps)
        return cap(x @ self.table.T, c.final_logit_softcapping)


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    c, length = model.config, ids.shape[1]
    shape = (c.num_hidden_layers, 2, c.num_key_value_heads, length, c.head_dim)
    cache = torch.zeros(shape, dtype=model.table.dtype)
    logits = [model(ids[0, :prompt], torch.arange(prompt), cache)]
    for place in range(prompt, length):
        logits.append(model(ids[0, place : place + 1], torch.tensor([place]), cache))
    return logits
