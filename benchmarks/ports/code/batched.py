"""Qwen3 in the way of Flax: kernels with the inputs as first axis, and with an axis of heads.

A batch has a fixed number of rows, of which the last one is ours. Shorter requests are padded on
the left, so that all rows write to the same place of the cache.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

PAD = 3  # so much longer is the other request


class Kernel(nn.Module):
    """[..., *inputs] -> [..., *outputs]. ``axes``: how many inputs and outputs there are."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = len(inputs)
        self.kernel = nn.Parameter(torch.empty(*inputs, *outputs))

    def forward(self, x):
        return torch.tensordot(x, self.kernel, dims=self.axes)


class Scale(nn.Module):
    """Root mean square norm of the last axis."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean_square = torch.mean(torch.square(x.float()), dim=-1, keepdim=True)
        normed = x.float() * torch.reciprocal(torch.sqrt(mean_square + self.epsilon))
        return normed.to(x.dtype) * self.scale


def rotary(x, positions, base: float):
    """Turn x [rows, tokens, heads, channels]; positions are [rows, tokens]."""
    half = x.shape[-1] // 2
    timescale = base ** (2 * torch.arange(half).float() / x.shape[-1])
    radians = (positions[..., None].float() / timescale)[:, :, None, :]
    sin, cos = torch.sin(radians).to(x.dtype), torch.cos(radians).to(x.dtype)
    first, second = torch.split(x, half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, self.channels = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.base = config.rope_parameters["rope_theta"]
        self.query = Kernel((width,), (self.heads, self.channels))
        self.key = Kernel((width,), (self.kv_heads, self.channels))
        self.value = Kernel((width,), (self.kv_heads, self.channels))
        self.out = Kernel((self.heads, self.channels), (width,))
        self.query_norm = Scale(self.channels, config.rms_norm_eps)
        self.key_norm = Scale(self.channels, config.rms_norm_eps)

    def forward(self, x, positions, mask, cache, place: int):
        q = rotary(self.query_norm(self.query(x)), positions, self.base)
        k = rotary(self.key_norm(self.key(x)), positions, self.base)
        v = self.value(x)
        end = place + x.shape[1]
        cache[0][:, place:end] = k
        cache[1][:, place:end] = v
        keys, values = cache[0][:, :end], cache[1][:, :end]
        q = q.unflatten(2, (self.kv_heads, -1)) * self.channels**-0.5
        scores = torch.einsum("bqgrc,bkgc->bgrqk", q, keys).float()
        scores = torch.where(mask[:, None, None], scores, torch.finfo(torch.float32).min)
        shares = torch.softmax(scores, dim=-1).to(x.dtype)
        mixed = torch.einsum("bgrqk,bkgc->bqgrc", shares, values)
        return self.out(mixed.flatten(2, 3))


class GatedUnit(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.wi_0 = Kernel((config.hidden_size,), (config.intermediate_size,))
        self.wi_1 = Kernel((config.hidden_size,), (config.intermediate_size,))
        self.wo = Kernel((config.intermediate_size,), (config.hidden_size,))

    def forward(self, x):
        gate = self.wi_0(x)
        return self.wo(gate * torch.sigmoid(gate) * self.wi_1(x))


class DecoderLayer(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.pre_attention_norm = Scale(config.hidden_size, config.rms_norm_eps)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_norm = Scale(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedUnit(config)

    def forward(self, x, positions, mask, cache, place: int):
        normed = self.pre_attention_norm(x)
        x = x + self.self_attention(normed, positions, mask, cache, place)
        normed = self.pre_mlp_norm(x)
        return x + self.mlp(normed)


class BatchedDecoder(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.decoder_norm = Scale(config.hidden_size, config.rms_norm_eps)
        self.logits_dense = Kernel((config.hidden_size,), (config.vocab_size,))

    def new_caches(self, rows: int, length: int):
        shape = (2, rows, length, self.config.num_key_value_heads, self.config.head_dim)
        return [torch.zeros(shape, dtype=self.embedding.dtype) for _ in self.layers]

    def forward(self, tokens, padding, caches, place: int):
        """Return the logits [rows, tokens, vocabulary]. ``padding`` [rows]: tokens to ignore."""
        query = torch.arange(place, place + tokens.shape[1])
        key = torch.arange(place + tokens.shape[1])
        positions = torch.clamp(query - padding[:, None], min=0)
        mask = (key <= query[:, None]) & (key >= padding[:, None, None])
        x = self.embedding[tokens]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, positions, mask, cache, place)
        return self.logits_dense(self.decoder_norm(x))


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return our logits."""
    other = (7 * torch.cat((ids, ids[:, :PAD]), dim=1) + 5) % model.config.vocab_size
    ours = torch.cat((torch.zeros(1, PAD, dtype=ids.dtype), ids), dim=1)
    tokens = torch.cat((other, ours))
    padding = torch.tensor([0, PAD])
    caches = model.new_caches(*tokens.shape)
    places = [0, *range(PAD + prompt, tokens.shape[1] + 1)]
    logits = [
        model(tokens[:, start:end], padding, caches, start) for start, end in pairwise(places)
    ]
    return [logits[0][1:, PAD:], *(each[1:] for each in logits[1:])]
