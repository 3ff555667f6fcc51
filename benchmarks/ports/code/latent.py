"""DeepSeek-V3 as it is served: latents alone are cached, up-projections are absorbed.

Tokens are flat. The keys' up-projection is applied to the queries, the values' to what attention
returns, so that attention is over the latents. Every expert computes every token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import einsum, nn


class Norm(nn.Module):
    def __init__(self, width, eps) -> None:
        super().__init__()
        self.eps, self.gain = eps, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.gain


def turn(x, phases):
    """Turn neighbouring channels. x: [T, heads, channels], phases: complex [T, channels / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * phases[:, None]).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    def __init__(self, c, places) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
        )
        self.rank, self.scale = c.kv_lora_rank, (self.nope + self.rope) ** -0.5
        self.wq_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = Norm(c.q_lora_rank, 1e-6)
        self.wq_b = nn.Linear(c.q_lora_rank, self.heads * (self.nope + self.rope), bias=False)
        self.wkv_a = nn.Linear(c.hidden_size, self.rank + self.rope, bias=False)
        self.kv_norm = Norm(self.rank, 1e-6)
        self.wkv_b = nn.Parameter(torch.empty(self.heads, self.nope + c.v_head_dim, self.rank))
        self.wo = nn.Linear(self.heads * c.v_head_dim, c.hidden_size, bias=False)
        self.latents = torch.zeros(places, self.rank)
        self.turned = torch.zeros(places, self.rope)

    def forward(self, x, start, phases):
        end = start + len(x)
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.heads, -1))
        q, q_turned = q.split([self.nope, self.rope], dim=-1)
        q_turned = turn(q_turned, phases)
        latent, key = self.wkv_a(x).split([self.rank, self.rope], dim=-1)
        latent = self.kv_norm(latent)
        key = turn(key[:, None], phases)[:, 0]
        self.latents[start:end] = latent
        self.turned[start:end] = key
        latents, keys = self.latents[:end], self.turned[:end]

        up_k, up_v = self.wkv_b[:, : self.nope], self.wkv_b[:, self.nope :]
        absorbed = einsum("thd,hdc->thc", q, up_k)
        scores = einsum("thc,sc->hts", absorbed, latents)
        scores = scores + einsum("thr,sr->hts", q_turned, keys)
        scores = scores * self.scale
        past = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        scores = scores.masked_fill(~past, float("-inf"))
        shares = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        mixed = einsum("hts,sc->thc", shares, latents)
        out = einsum("thc,hdc->thd", mixed, up_v)
        return self.wo(out.flatten(1))


class FeedForward(nn.Module):
    def __init__(self, width, inner) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Gate(nn.Module):
    """Choose experts in the best groups; return [T, experts] shares, zero for those not chosen."""

    def __init__(self, c) -> None:
        super().__init__()
        self.groups, self.best, self.chosen = c.n_group, c.topk_group, c.num_experts_per_tok
        self.factor = c.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.bias = nn.Parameter(torch.zeros(c.n_routed_experts))

    def forward(self, x):
        affinity = (x.float() @ self.weight.float().T).sigmoid()
        ranked = affinity + self.bias.float()
        grouped = ranked.unflatten(-1, (self.groups, -1))
        group = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group).scatter_(1, group.topk(self.best, dim=-1).indices, 1)
        ranked = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
        chosen = ranked.topk(self.chosen, dim=-1).indices
        share = affinity.gather(1, chosen)
        share = share / share.sum(-1, keepdim=True)
        share = share * self.factor
        return torch.zeros_like(affinity).scatter_(1, chosen, share).to(x.dtype)


class Mixture(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        experts, inner, width = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate = Gate(c)
        self.w1 = nn.Parameter(torch.empty(experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner))
        self.w3 = nn.Parameter(torch.empty(experts, inner, width))
        self.shared = FeedForward(width, inner * c.n_shared_experts)

    def forward(self, x):
        share = self.gate(x)
        inner = F.silu(einsum("td,efd->etf", x, self.w1)) * einsum("td,efd->etf", x, self.w3)
        routed = einsum("etf,edf,te->td", inner, self.w2, share)
        return routed + self.shared(x)


class Block(nn.Module):
    def __init__(self, c, n, places) -> None:
        super().__init__()
        self.attn = LatentAttention(c, places)
        dense = n < c.first_k_dense_replace
        self.ffn = FeedForward(c.hidden_size, c.intermediate_size) if dense else Mixture(c)
        self.attn_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, start, phases):
        x = x + self.attn(self.attn_norm(x), start, phases)
        return x + self.ffn(self.ffn_norm(x))


class LatentModel(nn.Module):
    def __init__(self, c, places=64) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c, n, places) for n in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        half, base = c.qk_rope_head_dim // 2, c.rope_parameters["rope_theta"]
        angles = torch.outer(torch.arange(places).float(), base ** -(torch.arange(half) / half))
        self.phases = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens, start):
        x = self.embed(tokens)
        phases = self.phases[start : start + len(tokens)]
        for block in self.blocks:
            x = block(x, start, phases)
        return self.head(self.norm(x))


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    for block in model.blocks:
        for name in ("latents", "turned"):
            cache = getattr(block.attn, name)
            setattr(block.attn, name, torch.zeros_like(cache, dtype=model.embed.weight.dtype))
    logits = [model(ids[0, :prompt], 0)]
    return logits + [model(ids[0, n : n + 1], n) for n in range(prompt, ids.shape[1])]
