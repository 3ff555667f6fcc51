"""Qwen2 as a serving engine runs it.

Tokens are flat ([T, hidden], no batch axis), the projections are fused, the residual travels beside
the hidden state, keys and values lie in blocks of a preallocated cache, and logits are computed for
the last token alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BLOCK_SIZE = 8


@dataclass
class ForwardBatch:
    """What one step needs beside the tokens: places in the cache, and the rows to sample from."""

    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] where the new keys go
    context_slots: torch.Tensor  # [S] where the keys of the whole sequence lie, oldest first
    sample_rows: torch.Tensor  # [1]


class RMSNorm(nn.Module):
    """Root mean square norm; adds the residual first if there is one."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        residual = x
        xf = x.float()
        xf = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + self.eps)
        return xf.to(x.dtype) * self.weight, residual


class RotaryEmbedding(nn.Module):
    """Looks cosines and sines up in a table by position."""

    def __init__(self, head_dim: int, max_position: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), base**-exponent)
        self.register_buffer("table", torch.cat((angles.cos(), angles.sin()), -1), persistent=False)

    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, positions, q, k):
        cos, sin = self.table[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


class PagedAttention(nn.Module):
    """Writes the new keys and values into their slots and attends to the sequence's slots."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.queries_per_kv = num_heads // num_kv_heads
        self.scale = head_dim**-0.5
        self.k_cache = self.v_cache = torch.empty(0)

    def bind_cache(self, num_slots: int, dtype: torch.dtype) -> None:
        shape = (num_slots, self.num_kv_heads, self.head_dim)
        self.k_cache = torch.zeros(shape, dtype=dtype)
        self.v_cache = torch.zeros(shape, dtype=dtype)

    def forward(self, q, k, v, batch: ForwardBatch):
        self.k_cache[batch.slot_mapping] = k
        self.v_cache[batch.slot_mapping] = v
        keys = self.k_cache[batch.context_slots]
        values = self.v_cache[batch.context_slots]
        keys = keys.repeat_interleave(self.queries_per_kv, dim=1)
        values = values.repeat_interleave(self.queries_per_kv, dim=1)
        seen = torch.arange(keys.shape[0], device=q.device)
        mask = seen[None, :] <= batch.positions[:, None]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=self.scale,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)


class QwenAttention(nn.Module):
    def __init__(self, config, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_size + 2 * self.kv_size)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False)
        self.rotary_emb = rotary
        self.attn = PagedAttention(self.num_heads, self.num_kv_heads, self.head_dim)

    def forward(self, hidden, batch: ForwardBatch):
        qkv = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = q.view(-1, self.num_heads, self.head_dim)
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        q, k = self.rotary_emb(batch.positions, q, k)
        return self.o_proj(self.attn(q, k, v, batch))


class SiluAndMul(nn.Module):
    """[T, 2 * width] -> [T, width]."""

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class QwenMLP(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act_fn = SiluAndMul()
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class QwenBlock(nn.Module):
    def __init__(self, config, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attention = QwenAttention(config, rotary)
        self.mlp = QwenMLP(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden, residual, batch: ForwardBatch):
        hidden, residual = self.attention_norm(hidden, residual)
        hidden = self.attention(hidden, batch)
        hidden, residual = self.mlp_norm(hidden, residual)
        return self.mlp(hidden), residual


class QwenEngineModel(nn.Module):
    def __init__(self, config, max_tokens: int = 128) -> None:
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = RotaryEmbedding(head_dim, max_tokens, config.rope_parameters["rope_theta"])
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            QwenBlock(config, rotary) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, batch: ForwardBatch):
        hidden, residual = self.embed(tokens), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual, batch)
        hidden, _ = self.norm(hidden, residual)
        return self.lm_head(hidden[batch.sample_rows])


class Sequence:
    """One request: its tokens, and the blocks of the cache that it owns."""

    def __init__(self, tokens, total: int) -> None:
        self.tokens = list(tokens)
        blocks = range(-(-total // BLOCK_SIZE))
        self.block_table = [*blocks[1::2], *blocks[::2]]  # as the allocator had them free

    @property
    def num_slots(self) -> int:
        return len(self.block_table) * BLOCK_SIZE

    def slots(self, start: int, end: int):
        places = range(start, end)
        return torch.tensor(
            [self.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
        )

    def batch(self, start: int) -> ForwardBatch:
        end = len(self.tokens)
        return ForwardBatch(
            positions=torch.arange(start, end),
            slot_mapping=self.slots(start, end),
            context_slots=self.slots(0, end),
            sample_rows=torch.tensor([end - start - 1]),
        )


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    sequence = Sequence(ids[0, :prompt].tolist(), ids.shape[1])
    for block in model.blocks:
        block.attention.attn.bind_cache(sequence.num_slots, model.embed.weight.dtype)
    logits = [model(ids[0, :prompt], sequence.batch(0))]
    for place in range(prompt, ids.shape[1]):
        sequence.tokens.append(int(ids[0, place]))
        logits.append(model(ids[0, place : place + 1], sequence.batch(place)))
    return logits
