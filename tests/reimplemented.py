"""Ports of GPT-2 and Llama, with other names, another module tree and other projections."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """``fused``: q, k and v share a projection. ``interleaved``: it groups them by head."""

    def __init__(self, size, heads, kv_heads, bias, fused=False, interleaved=False):
        super().__init__()
        self.heads, self.kv_heads, self.fused, self.interleaved = (
            heads,
            kv_heads,
            fused,
            interleaved,
        )
        self.width = width = size // heads
        if fused:
            self.wqkv = nn.Linear(size, (heads + 2 * kv_heads) * width, bias=bias)
        else:
            self.wq = nn.Linear(size, heads * width, bias=bias)
            self.wk = nn.Linear(size, kv_heads * width, bias=bias)
            self.wv = nn.Linear(size, kv_heads * width, bias=bias)
        self.wo = nn.Linear(size, size, bias=bias)

    def forward(self, x, rope=None):
        b, t, _ = x.shape
        if not self.fused:
            q, k, v = self.wq(x), self.wk(x), self.wv(x)
        elif self.interleaved:
            q, k, v = self.wqkv(x).view(b, t, self.heads, 3, self.width).unbind(3)
        else:
            q, k, v = self.wqkv(x).split(
                [n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)], -1
            )
        q, k, v = (y.reshape(b, t, -1, self.width).transpose(1, 2) for y in (q, k, v))
        if rope is not None:
            q, k = (
                y * rope[0]
                + torch.cat((-y[..., self.width // 2 :], y[..., : self.width // 2]), -1) * rope[1]
                for y in (q, k)
            )
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class GPTBlock(nn.Module):
    def __init__(self, size, heads, **attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(size)
        self.attention = Attention(size, heads, heads, True, **attention)
        self.norm2 = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * size, size)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The computation of `transformers.GPT2LMHeadModel`, whose Conv1D weights are transposed."""

    def __init__(self, theirs, **attention):
        super().__init__()
        c = theirs.config
        self.tokens, self.positions = (
            nn.Embedding(c.vocab_size, c.n_embd),
            nn.Embedding(c.n_positions, c.n_embd),
        )
        self.blocks = nn.ModuleList(
            GPTBlock(c.n_embd, c.n_head, **attention) for _ in range(c.n_layer)
        )
        self.final = nn.LayerNorm(c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.load(theirs.transformer)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))

    @torch.no_grad()
    def load(self, theirs):
        _copy(self.tokens, theirs.wte)
        _copy(self.positions, theirs.wpe)
        _copy(self.head, theirs.wte)
        _copy(self.final, theirs.ln_f)
        for block, layer in zip(self.blocks, theirs.h, strict=True):
            attention = block.attention
            for ours, other in ((block.norm1, layer.ln_1), (block.norm2, layer.ln_2)):
                _copy(ours, other)
            for ours, other in (
                (attention.wo, layer.attn.c_proj),
                (block.up, layer.mlp.c_fc),
                (block.down, layer.mlp.c_proj),
            ):
                ours.weight.copy_(other.weight.t())
                ours.bias.copy_(other.bias)
            weight, bias = layer.attn.c_attn.weight.t(), layer.attn.c_attn.bias
            if attention.interleaved:
                heads, width = attention.heads, attention.width
                weight = weight.reshape(3, heads, width, -1).transpose(0, 1).reshape(weight.shape)
                bias = bias.reshape(3, heads, width).transpose(0, 1).reshape(bias.shape)
            if attention.fused:
                attention.wqkv.weight.copy_(weight)
                attention.wqkv.bias.copy_(bias)
                continue
            for ours, w, b in zip(
                (attention.wq, attention.wk, attention.wv),
                weight.chunk(3),
                bias.chunk(3),
                strict=True,
            ):
                ours.weight.copy_(w)
                ours.bias.copy_(b)


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class FeedForward(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.w13 = nn.Linear(size, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(
            c.hidden_size, c.num_attention_heads, c.num_key_value_heads, False, fused=True
        )
        self.ffn_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.feed_forward = FeedForward(c.hidden_size, c.intermediate_size)

    def forward(self, x, rope):
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The computation of `transformers.LlamaForCausalLM`, with q, k, v fused, and gate, up."""

    def __init__(self, theirs):
        super().__init__()
        c = self.config = theirs.config
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.output = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.load(theirs)

    def forward(self, ids):
        width = self.config.hidden_size // self.config.num_attention_heads
        angles = torch.arange(ids.shape[1])[:, None] / 10000.0 ** (
            torch.arange(0, width, 2) / width
        )
        angles = torch.cat((angles, angles), -1)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()))
        return self.output(self.norm(x))

    @torch.no_grad()
    def load(self, theirs):
        _copy(self.tok_embeddings, theirs.model.embed_tokens)
        _copy(self.output, theirs.lm_head)
        self.norm.scale.copy_(theirs.model.norm.weight)
        for block, layer in zip(self.layers, theirs.model.layers, strict=True):
            block.attention_norm.scale.copy_(layer.input_layernorm.weight)
            block.ffn_norm.scale.copy_(layer.post_attention_layernorm.weight)
            a, m = layer.self_attn, layer.mlp
            block.attention.wqkv.weight.copy_(
                torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            )
            _copy(block.attention.wo, a.o_proj)
            block.feed_forward.w13.weight.copy_(torch.cat([m.gate_proj.weight, m.up_proj.weight]))
            _copy(block.feed_forward.w2, m.down_proj)


def _copy(ours, theirs):
    ours.load_state_dict(theirs.state_dict())
