"""GLM-4 as functions over a table of tensors: no module but the one that holds the table.

Tensors are named as in a GGUF file, with underscores. A cache has keys as [head, place, channel]
and values as [head, channel, place], so that both products read rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Params:
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_rot: int
    n_ff: int
    n_vocab: int
    rope_base: float
    eps: float


def params(cfg) -> Params:
    return Params(
        n_layer=cfg.num_hidden_layers,
        n_embd=cfg.hidden_size,
        n_head=cfg.num_attention_heads,
        n_head_kv=cfg.num_key_value_heads,
        n_head_dim=cfg.head_dim,
        n_rot=int(cfg.head_dim * cfg.rope_parameters["partial_rotary_factor"]),
        n_ff=cfg.intermediate_size,
        n_vocab=cfg.vocab_size,
        rope_base=cfg.rope_parameters["rope_theta"],
        eps=cfg.rms_norm_eps,
    )


def shapes(hp: Params) -> dict[str, tuple[int, ...]]:
    q, kv = hp.n_head * hp.n_head_dim, hp.n_head_kv * hp.n_head_dim
    table: dict[str, tuple[int, ...]] = {
        "token_embd": (hp.n_vocab, hp.n_embd),
        "output_norm": (hp.n_embd,),
        "output": (hp.n_vocab, hp.n_embd),
    }
    for n in range(hp.n_layer):
        for norm in ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm"):
            table[f"blk_{n}_{norm}"] = (hp.n_embd,)
        table[f"blk_{n}_attn_qkv"] = (q + 2 * kv, hp.n_embd)
        table[f"blk_{n}_attn_qkv_bias"] = (q + 2 * kv,)
        table[f"blk_{n}_attn_output"] = (hp.n_embd, q)
        table[f"blk_{n}_ffn_up"] = (2 * hp.n_ff, hp.n_embd)
        table[f"blk_{n}_ffn_down"] = (hp.n_embd, hp.n_ff)
    return table


class Cache:
    def __init__(self, hp: Params, dtype: torch.dtype, n_ctx: int = 40) -> None:
        heads, dim = hp.n_head_kv, hp.n_head_dim
        self.k = [torch.zeros(heads, n_ctx, dim, dtype=dtype) for _ in range(hp.n_layer)]
        self.v = [torch.zeros(heads, dim, n_ctx, dtype=dtype) for _ in range(hp.n_layer)]
        self.n_past = 0


def norm(x, gain, eps: float):
    wide = x.float()
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def tables(hp: Params, pos):
    """Return cosines and sines, [tokens, 1, pairs]."""
    freq = 1.0 / hp.rope_base ** (torch.arange(0, hp.n_rot, 2).float() / hp.n_rot)
    angle = pos[:, None, None].float() * freq
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    """Rotate the first channels of each head, neighbours with each other."""
    n_rot = 2 * cos.shape[-1]
    x0, x1 = x[..., :n_rot].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., n_rot:]), dim=-1)


def for_each_query_head(x, times: int):
    return x.repeat_interleave(times, dim=0)


def attention(w, hp: Params, n: int, x, cos, sin, mask, cache: Cache):
    t, d = len(x), hp.n_head_dim
    qkv = F.linear(x, w[f"blk_{n}_attn_qkv"], w[f"blk_{n}_attn_qkv_bias"]).view(t, -1, d)
    q = rope(qkv[:, : hp.n_head], cos, sin)
    k = rope(qkv[:, hp.n_head : -hp.n_head_kv], cos, sin)
    v = qkv[:, -hp.n_head_kv :]
    here = slice(cache.n_past, cache.n_past + t)
    cache.k[n][:, here] = k.transpose(0, 1)
    cache.v[n][:, :, here] = v.permute(1, 2, 0)
    times = hp.n_head // hp.n_head_kv
    k = for_each_query_head(cache.k[n][:, : here.stop], times)
    v = for_each_query_head(cache.v[n][:, :, : here.stop], times)
    kq = torch.matmul(k, q.permute(1, 2, 0)).transpose(1, 2).float() * d**-0.5
    if mask is not None:
        kq = kq + mask
    p = torch.softmax(kq, dim=-1).to(x.dtype)
    kqv = torch.matmul(p, v.transpose(1, 2))
    return F.linear(kqv.transpose(0, 1).reshape(t, -1), w[f"blk_{n}_attn_output"])


def feed_forward(w, n: int, x):
    both = F.linear(x, w[f"blk_{n}_ffn_up"])
    gate, up = both.split(both.shape[-1] // 2, dim=-1)
    return F.linear(F.silu(gate) * up, w[f"blk_{n}_ffn_down"])


def graph(w, hp: Params, ids, cache: Cache):
    t = len(ids)
    if t > 1:  # a prompt
        pos = torch.arange(t)
        mask = torch.full((t, t), float("-inf")).triu(1)
    else:
        pos = torch.tensor([cache.n_past])
        mask = None
    cos, sin = tables(hp, pos)
    x = w["token_embd"][ids]
    for n in range(hp.n_layer):
        a = attention(w, hp, n, norm(x, w[f"blk_{n}_attn_norm"], hp.eps), cos, sin, mask, cache)
        x = x + norm(a, w[f"blk_{n}_post_attn_norm"], hp.eps)
        m = feed_forward(w, n, norm(x, w[f"blk_{n}_ffn_norm"], hp.eps))
        x = x + norm(m, w[f"blk_{n}_post_ffn_norm"], hp.eps)
    cache.n_past += t
    return F.linear(norm(x, w["output_norm"], hp.eps), w["output"])


class Glm(nn.Module):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.hp = params(cfg)
        self.w = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes(self.hp).items()}
        )

    def forward(self, ids, cache):
        return graph(self.w, self.hp, ids, cache)


@torch.no_grad()
def run(model, ids, prompt: int):
    cache = Cache(model.hp, model.w["token_embd"].dtype)
    logits = [model(ids[0, :prompt], cache)]
    while cache.n_past < ids.shape[1]:
        logits.append(model(ids[0, cache.n_past : cache.n_past + 1], cache))
    return logits
