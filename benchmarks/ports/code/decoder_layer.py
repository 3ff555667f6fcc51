"""A whole decoder layer of Qwen2 written freely: fused projections, einsum, softmax in parts."""

import torch
from torch import nn
from torch.nn import functional as F


def normalise(x, scale, eps):
    h = x.float()
    h = h / (h.square().mean(-1, keepdim=True) + eps).sqrt()
    return scale * h.to(x.dtype)


def turn(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // self.kv_heads
        self.index, self.eps = index, config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        self.sizes = [width, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        self.qkv = nn.Linear(width, sum(self.sizes))
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)
        self.attention_scale = nn.Parameter(torch.ones(width))
        self.mlp_scale = nn.Parameter(torch.ones(width))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        past_key_values=None,
        position_embeddings=None,
        **kwargs,
    ):
        b, t, _ = hidden_states.shape
        x = normalise(hidden_states, self.attention_scale, self.eps)
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = q.view(b, t, -1, self.head_dim)
        k = k.view(b, t, -1, self.head_dim)
        v = v.view(b, t, -1, self.head_dim)
        cos, sin = (each[:, :, None] for each in position_embeddings)
        q = turn(q, cos, sin)
        k = turn(k, cos, sin)
        k, v = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.index)
        q = q.view(b, t, self.kv_heads, self.groups, self.head_dim)
        scores = torch.einsum("btkgd,bksd->bkgts", q, k) * self.scale
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, None]
        scores = scores.float()
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        p = (e / e.sum(-1, keepdim=True)).to(q.dtype)
        out = torch.einsum("bkgts,bksd->btkgd", p, v).reshape(b, t, -1)
        h = hidden_states + self.out(out)
        x = normalise(h, self.mlp_scale, self.eps)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)
