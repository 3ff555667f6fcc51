"""Qwen2's attention written anew: other operators, the same function."""

import math

import torch
from torch import nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class FastAttention(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = old.q_proj, old.k_proj, old.v_proj
        self.o_proj = old.o_proj
        self.head_dim, self.layer_idx = old.head_dim, old.layer_idx
        self.groups = old.num_key_value_groups

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        past_key_values=None,
        **kwargs,
    ):
        b, t, _ = hidden_states.shape
        shape = (b, t, -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k = k.repeat_interleave(self.groups, dim=1)
        v = v.repeat_interleave(self.groups, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            scores = scores + attention_mask[..., : k.shape[-2]]
        p = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        out = (p @ v).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out), p
