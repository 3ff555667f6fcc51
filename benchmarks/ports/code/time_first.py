"""BART as toolkits for translation have it: time first, heads in the batch, incremental states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PAD = 1


class Attention(nn.Module):
    """Attention over [time, batch, channels] with what earlier steps left in a dictionary."""

    def __init__(self, dim: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim, self.cross = heads, dim // heads, cross
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.q_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def split(self, x):
        """[time, batch, channels] -> [batch * heads, time, channels of a head]"""
        time, batch, _ = x.shape
        return x.contiguous().view(time, batch * self.heads, self.head_dim).transpose(0, 1)

    def forward(self, query, source, padding=None, future=None, state=None):
        target, batch, dim = query.shape
        q = self.split(self.q_proj(query) * self.scaling)
        if self.cross and state:
            k, v = state["k"], state["v"]
        else:
            k, v = self.split(self.k_proj(source)), self.split(self.v_proj(source))
            if state:
                k = torch.cat([state["k"], k], dim=1)
                v = torch.cat([state["v"], v], dim=1)
            if state is not None:
                state.update(k=k, v=v)
        scores = torch.bmm(q, k.transpose(1, 2))
        if future is not None:
            scores = scores + future
        if padding is not None:
            scores = scores.view(batch, self.heads, target, -1)
            scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
            scores = scores.view(batch * self.heads, target, -1)
        out = torch.bmm(F.softmax(scores, dim=-1), v)
        out = out.transpose(0, 1).contiguous().view(target, batch, dim)
        return self.out_proj(out)


class EncoderLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn = Attention(c.d_model, c.encoder_attention_heads)
        self.attn_norm = nn.LayerNorm(c.d_model)
        self.fc1 = nn.Linear(c.d_model, c.encoder_ffn_dim)
        self.fc2 = nn.Linear(c.encoder_ffn_dim, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, x, padding):
        x = self.attn_norm(x + self.self_attn(x, x, padding))
        return self.norm(x + self.fc2(F.gelu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn = Attention(c.d_model, c.decoder_attention_heads)
        self.attn_norm = nn.LayerNorm(c.d_model)
        self.cross_attn = Attention(c.d_model, c.decoder_attention_heads, cross=True)
        self.cross_norm = nn.LayerNorm(c.d_model)
        self.fc1 = nn.Linear(c.d_model, c.decoder_ffn_dim)
        self.fc2 = nn.Linear(c.decoder_ffn_dim, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, x, encoded, padding, future, states):
        attended = self.self_attn(x, x, future=future, state=states["own"])
        x = self.attn_norm(x + attended)
        looked = self.cross_attn(x, encoded, padding=padding, state=states["cross"])
        x = self.cross_norm(x + looked)
        return self.norm(x + self.fc2(F.gelu(self.fc1(x))))


class Places(nn.Module):
    """Learned positions; the first stands behind that of padding."""

    def __init__(self, number: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number + PAD + 1, dim))

    def forward(self, start: int, length: int):
        first = start + PAD + 1
        return self.weight[first : first + length, None]


class TimeFirst(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder_places = Places(c.max_position_embeddings, c.d_model)
        self.decoder_places = Places(c.max_position_embeddings, c.d_model)
        self.encoder_norm = nn.LayerNorm(c.d_model)
        self.decoder_norm = nn.LayerNorm(c.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(c) for _ in range(c.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(c) for _ in range(c.decoder_layers))

    def encode(self, source):
        padding = source.eq(PAD)
        x = self.embed(source.T) + self.encoder_places(0, source.shape[1])
        x = self.encoder_norm(x)
        for layer in self.encoder:
            x = layer(x, padding)
        return x, padding

    def forward(self, target, steps, source=None):
        """target: [batch, new tokens]; steps: what earlier calls left, see `run`."""
        if source is not None:
            steps["encoded"] = self.encode(source)
        encoded, padding = steps["encoded"]
        start, new = steps["length"], target.shape[1]
        steps["length"] = start + new
        x = self.embed(target.T) + self.decoder_places(start, new)
        x = self.decoder_norm(x)
        future = None
        if new > 1:
            future = torch.full((new, new), float("-inf"), dtype=x.dtype).triu(1)
        for layer, states in zip(self.decoder, steps["states"], strict=True):
            x = layer(x, encoded, padding, future, states)
        return F.linear(x.transpose(0, 1), self.embed.weight)


@torch.no_grad()
def run(model, source, target, prompt: int):
    """Encode, decode ``prompt`` tokens of the target at once and the others one by one."""
    steps = {"length": 0, "states": [{"own": {}, "cross": {}} for _ in model.decoder]}
    logits = [model(target[:, :prompt], steps, source)]
    rest = target[:, prompt:].split(1, dim=1)
    return logits + [model(token, steps) for token in rest]
