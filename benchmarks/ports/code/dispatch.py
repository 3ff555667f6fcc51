"""Qwen 1.5 MoE in the manner of Mesh TensorFlow: tokens are sent to experts by einsum.

A dispatch tensor [tokens, experts, places] says where each token goes, a combine tensor with what
share it comes back. The cache is static: a step attends to all of its slots under a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMS(nn.Module):
    def __init__(self, dim, eps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        mean = norm * norm / x.shape[-1]
        return ((x / torch.sqrt(mean + self.eps)).type_as(x)) * self.weight


def rotary_table(dim, length, base):
    inverse = base ** -(torch.arange(dim // 2) * 2.0 / dim)
    angle = torch.outer(torch.arange(length).float(), inverse)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x, table):
    """x: [batch, heads, time, channels], table: [2, time, channels / 2]"""
    cos, sin = table.to(x.dtype)
    lo, hi = x.chunk(2, dim=-1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)


class StaticCache:
    def __init__(self, layers, heads, length, dim) -> None:
        self.data = torch.zeros(layers, 2, 1, heads, length, dim)
        self.length = length

    def put(self, n, k, v, start):
        """Write keys and values from a slot on; return those of all slots."""
        end = start + k.shape[2]
        self.data[n, 0, :, :, start:end] = k
        self.data[n, 1, :, :, start:end] = v
        return self.data[n, 0].to(k.dtype), self.data[n, 1].to(v.dtype)


class SelfAttention(nn.Module):
    def __init__(self, c, n) -> None:
        super().__init__()
        self.n, self.heads, self.kv_heads = n, c.num_attention_heads, c.num_key_value_heads
        self.dim = c.hidden_size // self.heads
        self.to_q = nn.Linear(c.hidden_size, self.heads * self.dim)
        self.to_kv = nn.Linear(c.hidden_size, 2 * self.kv_heads * self.dim)
        self.to_out = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x, table, mask, cache, start):
        q = self.to_q(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k, v = self.to_kv(x).unflatten(-1, (2, self.kv_heads, self.dim)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, table), rotate(k, table)
        k, v = cache.put(self.n, k, v, start)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, dim, hidden) -> None:
        super().__init__()
        self.fc_in = nn.Linear(dim, 2 * hidden, bias=False)
        self.fc_out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        gate, linear = self.fc_in(x).chunk(2, dim=-1)
        return self.fc_out(F.silu(gate) * linear)


class Experts(nn.Module):
    def __init__(self, number, dim, hidden) -> None:
        super().__init__()
        self.wi = nn.Parameter(torch.empty(number, dim, 2 * hidden))
        self.wo = nn.Parameter(torch.empty(number, hidden, dim))

    def forward(self, x):
        """x: [experts, places, channels]"""
        gate, linear = torch.bmm(x, self.wi).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * linear, self.wo)


class Mixture(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.number, self.k = c.num_experts, c.num_experts_per_tok
        self.router = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size)
        self.shared = GatedMLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_gate = nn.Linear(c.hidden_size, 1, bias=False)

    def route(self, x):
        """x: [tokens, channels] -> dispatch and combine, [tokens, experts, places]"""
        tokens = len(x)
        share, chosen = self.router(x).float().softmax(dim=-1).topk(self.k, dim=-1)
        to = F.one_hot(chosen, self.number)  # [tokens, k, experts]
        queue = to.flatten(0, 1).cumsum(0).view_as(to) - 1
        place = F.one_hot((queue * to).sum(-1), tokens)  # [tokens, k, places]
        to, place = to.type_as(x), place.type_as(x)
        dispatch = torch.einsum("tke,tkp->tep", to, place)
        combine = torch.einsum("tke,tkp->tep", to * share[..., None].type_as(x), place)
        return dispatch, combine

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, 1)
        dispatch, combine = self.route(x)
        sent = torch.einsum("tep,td->epd", dispatch, x)
        routed = torch.einsum("tep,epd->td", combine, self.experts(sent))
        shared = torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return (routed + shared).view(shape)


class DecoderLayer(nn.Module):
    def __init__(self, c, n) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (RMS(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.attn = SelfAttention(c, n)
        dense = n in c.mlp_only_layers
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size) if dense else Mixture(c)

    def forward(self, x, *step):
        x = x + self.attn(self.attn_norm(x), *step)
        return x + self.mlp(self.mlp_norm(x))


class Dispatch(nn.Module):
    def __init__(self, c, length: int = 40) -> None:
        super().__init__()
        self.length, self.kv_heads = length, c.num_key_value_heads
        dim = self.dim = c.hidden_size // c.num_attention_heads
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c, n) for n in range(c.num_hidden_layers))
        self.norm = RMS(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        table = rotary_table(dim, length, c.rope_parameters["rope_theta"])
        self.register_buffer("table", table, persistent=False)

    def cache(self):
        return StaticCache(len(self.layers), self.kv_heads, self.length, self.dim)

    def forward(self, ids, cache, start):
        new = ids.shape[1]
        at = torch.arange(start, start + new)
        slots = torch.arange(cache.length)
        mask = slots[None, :] <= at[:, None]
        table = self.table[:, at]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, table, mask, cache, start)
        return self.head(self.norm(x))


@torch.no_grad()
def run(model, ids, prompt: int):
    cache = model.cache()
    logits = [model(ids[:, :prompt], cache, 0)]
    for at in range(prompt, ids.shape[1]):
        logits.append(model(ids[:, at : at + 1], cache, at))
    return logits
