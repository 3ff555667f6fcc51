"""GPT-NeoX in two tensor-parallel ranks, in one process, with the sequence as first axis.

Column-parallel layers give each rank its part of the output; row-parallel layers add up what the
ranks give. The vocabulary is padded to whole shards. The cache has room for the longest sequence,
and attention runs over all of it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

RANKS = 2
ROWS = 64  # a shard of the vocabulary has a multiple of so many rows


def shard_rows(vocabulary: int) -> int:
    return math.ceil(vocabulary / (RANKS * ROWS)) * ROWS


class ColumnParallel(nn.Module):
    """[T, B, in] -> for each rank [T, B, out / ranks]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        shards = [nn.Linear(inputs, outputs // RANKS, bias=bias) for _ in range(RANKS)]
        self.rank = nn.ModuleList(shards)

    def forward(self, x):
        return [linear(x) for linear in self.rank]


class RowParallel(nn.Module):
    """For each rank [T, B, in / ranks] -> [T, B, out]; the bias is added once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        shards = [nn.Linear(inputs // RANKS, outputs, bias=False) for _ in range(RANKS)]
        self.rank = nn.ModuleList(shards)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, parts):
        partial = torch.stack([linear(x) for linear, x in zip(self.rank, parts, strict=True)])
        return partial.sum(dim=0) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the tokens that it holds; the others are zero."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, shard_rows(vocabulary)
        self.rank = nn.ParameterList(torch.empty(self.rows, width) for _ in range(RANKS))

    def forward(self, ids):
        total = 0
        for rank, table in enumerate(self.rank):
            local = ids - rank * self.rows
            foreign = (local < 0) | (local >= self.rows)
            rows = F.embedding(local.clamp(0, self.rows - 1), table)
            total = total + rows.masked_fill(foreign.unsqueeze(-1), 0.0)
        return total


class Rotary(nn.Module):
    """Turns the first channels of each head; the others pass."""

    def __init__(self, channels: int, base: float) -> None:
        super().__init__()
        self.channels = channels
        steps = torch.arange(0, channels, 2).float()
        self.frequency = torch.exp(-math.log(base) * steps / channels)

    def forward(self, x, positions):
        angle = torch.einsum("t,f->tf", positions.float(), self.frequency)
        angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
        turning, passing = x[..., : self.channels], x[..., self.channels :]
        first, second = turning.chunk(2, dim=-1)
        quarter = torch.cat((-second, first), dim=-1)
        turned = turning * angle.cos().to(x.dtype) + quarter * angle.sin().to(x.dtype)
        return torch.cat((turned, passing), dim=-1)


class CoreAttention(nn.Module):
    """The heads of one rank. Tensors are [T, B, heads, channels]."""

    def __init__(self, heads: int, channels: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.channels, self.rotary = heads, channels, rotary

    def forward(self, qkv, positions, cache):
        tokens, batch, _ = qkv.shape
        q, k, v = qkv.view(tokens, batch, self.heads, 3, self.channels).unbind(dim=3)
        cache[0, positions] = self.rotary(k, positions)
        cache[1, positions] = v
        q, (k, v) = self.rotary(q, positions), cache
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in (q, k, v))  # [B * heads, T, channels]
        scores = q.new_empty(q.shape[0], tokens, k.shape[1])
        scores = torch.baddbmm(scores, q, k.mT, beta=0.0, alpha=1 / math.sqrt(self.channels))
        places = torch.arange(k.shape[1])
        unseen = places > positions[:, None]
        scores = scores.float().masked_fill(unseen, -10000.0)
        mixed = torch.bmm(scores.softmax(dim=-1).to(v.dtype), v)
        return mixed.transpose(0, 1).reshape(tokens, batch, -1)


class ParallelAttention(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        rope = config.rope_parameters
        rotary = Rotary(int(width // heads * rope["partial_rotary_factor"]), rope["rope_theta"])
        self.query_key_value = ColumnParallel(width, 3 * width)
        cores = [CoreAttention(heads // RANKS, width // heads, rotary) for _ in range(RANKS)]
        self.core = nn.ModuleList(cores)
        self.dense = RowParallel(width, width)

    def forward(self, x, positions, caches):
        mixed = [
            core(qkv, positions, cache)
            for core, qkv, cache in zip(self.core, self.query_key_value(x), caches, strict=True)
        ]
        return self.dense(mixed)


def bias_gelu(x):
    return 0.5 * x * (1 + torch.erf(x * 0.70710678))


class ParallelMLP(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallel(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = RowParallel(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h([bias_gelu(part) for part in self.dense_h_to_4h(x)])


class ParallelLayer(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = ParallelAttention(config)
        self.norm_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ParallelMLP(config)

    def forward(self, x, positions, caches):
        attended = self.attention(self.norm_1(x), positions, caches)
        return x + (attended + self.mlp(self.norm_2(x)))


class ParallelNeoX(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        layers = [ParallelLayer(config) for _ in range(config.num_hidden_layers)]
        self.transformer = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        padded = RANKS * shard_rows(config.vocab_size)
        self.output_layer = ColumnParallel(config.hidden_size, padded, bias=False)

    def new_caches(self, length: int):
        heads = self.config.num_attention_heads
        shape = (2, length, 1, heads // RANKS, self.config.hidden_size // heads)
        return [
            [torch.zeros(shape, dtype=self.final_norm.weight.dtype) for _ in range(RANKS)]
            for _ in self.transformer
        ]

    def forward(self, ids, positions, caches):
        x = self.word_embeddings(ids.T)
        for layer, cache in zip(self.transformer, caches, strict=True):
            x = layer(x, positions, cache)
        logits = torch.cat(self.output_layer(self.final_norm(x)), dim=-1)
        return logits[..., : self.config.vocab_size].transpose(0, 1)


SPLIT = {  # the axis of the weight that is split
    "attention.query_key_value": 0,
    "attention.dense": 1,
    "mlp.dense_h_to_4h": 0,
    "mlp.dense_4h_to_h": 1,
}


def weights(hf):
    """Return the weights of a `GPTNeoXForCausalLM` in shards."""
    state = {
        "final_norm.weight": hf.gpt_neox.final_layer_norm.weight,
        "final_norm.bias": hf.gpt_neox.final_layer_norm.bias,
    }
    padding = RANKS * shard_rows(hf.config.vocab_size) - hf.config.vocab_size
    for name, weight in (
        ("word_embeddings.rank.{}", hf.gpt_neox.embed_in.weight),
        ("output_layer.rank.{}.weight", hf.get_output_embeddings().weight),
    ):
        for rank, shard in enumerate(F.pad(weight, (0, 0, 0, padding)).chunk(RANKS)):
            state[name.format(rank)] = shard
    for n, layer in enumerate(hf.gpt_neox.layers):
        for new, old in (
            ("norm_1", layer.input_layernorm),
            ("norm_2", layer.post_attention_layernorm),
        ):
            state[f"transformer.{n}.{new}.weight"] = old.weight
            state[f"transformer.{n}.{new}.bias"] = old.bias
        for name, axis in SPLIT.items():
            linear, new = layer.get_submodule(name), f"transformer.{n}.{name}"
            for rank, shard in enumerate(linear.weight.chunk(RANKS, dim=axis)):
                state[f"{new}.rank.{rank}.weight"] = shard
            if axis == 0:
                for rank, shard in enumerate(linear.bias.chunk(RANKS)):
                    state[f"{new}.rank.{rank}.bias"] = shard
            else:
                state[f"{new}.bias"] = linear.bias
    return state


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    caches = model.new_caches(32)
    logits = [model(ids[:, :prompt], torch.arange(prompt), caches)]
    for place in range(prompt, ids.shape[1]):
        logits.append(model(ids[:, place : place + 1], torch.tensor([place]), caches))
    return logits
