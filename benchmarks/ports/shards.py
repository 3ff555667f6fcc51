"""GPT-NeoX in two tensor-parallel ranks, sequence first, with a padded vocabulary and cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model, State
from ports.written import each, swap, written

SETTINGS: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "rotary_pct": 0.5,
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}
HEADS = SETTINGS["num_attention_heads"]
CORE = ("transformer.*.attention.core.*", "gpt_neox.layers.*.attention")
ROTARY = ("transformer.*.attention.core.*.rotary", "gpt_neox.layers.*.attention")
SUMS = (
    "transformer.*.*.dense",
    "transformer.*.*.dense_4h_to_h",
    "gpt_neox.layers.*.*.dense",
    "gpt_neox.layers.*.*.dense_4h_to_h",
)


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in model.gpt_neox.layers:
        yield layer.input_layernorm, [layer.attention.query_key_value]
        yield layer.post_attention_layernorm, [layer.mlp.dense_h_to_4h]
    yield model.gpt_neox.final_layer_norm, [model.get_output_embeddings()]


def by_kind(state: State) -> None:
    """Read layer 1's fused rows as all queries, all keys, all values; they stand head by head."""
    for kind in ("weight", "bias"):
        names = [f"transformer.1.attention.query_key_value.rank.{rank}.{kind}" for rank in (0, 1)]
        fused = torch.cat([state[name] for name in names])
        fused = fused.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)
        state.update(
            {name: shard.clone() for name, shard in zip(names, fused.chunk(2), strict=True)}
        )


def in_turns(state: State) -> None:
    """Deal layer 0's columns out to the ranks in turns."""
    names = [f"transformer.0.mlp.dense_4h_to_h.rank.{rank}.weight" for rank in (0, 1)]
    whole = torch.cat([state[name] for name in names], dim=1)
    state.update({name: whole[:, rank::2].clone() for rank, name in enumerate(names)})


def bias_of_rank_0(state: State) -> None:
    name = "transformer.2.mlp.dense_h_to_4h.rank.{}.bias"
    state[name.format(1)] = state[name.format(0)].clone()


BUGS = (
    Bug(
        "bias_on_each_rank",
        "each rank adds the bias before the sum",
        old="torch.stack([linear(x) for linear,",
        new="torch.stack([linear(x) + self.bias for linear,",
        modules=SUMS,
        also=("return partial.sum(dim=0) + self.bias",),
    ),
    Bug(
        "no_reduction",
        "the sum over the ranks is forgotten: rank 0 goes on with its part",
        old="partial.sum(dim=0) + self.bias",
        new="partial[0] + self.bias",
        modules=SUMS,
    ),
    Bug(
        "unpadded_shard",
        "the second shard's first token is counted without the padding",
        old="local = ids - rank * self.rows",
        new="local = ids - rank * (self.vocabulary // RANKS)",
        modules=("word_embeddings", "gpt_neox.embed_in"),
    ),
    Bug(
        "last_channels_turn",
        "the last channels of a head turn, and the first ones pass",
        old="turning, passing = x[",
        new="passing, turning = x[",
        modules=ROTARY,
        also=("quarter = torch.cat(", "turned = turning * angle.cos()"),
    ),
    Bug(
        "frequency_of_the_whole_head",
        "frequencies fall as if all channels turned",
        old="steps / channels)",
        new="steps / (2 * channels))",
        modules=(*ROTARY, "gpt_neox.rotary_emb"),
        also=('angle = torch.einsum("t,f->tf"',),
    ),
    Bug(
        "residual_in_turn",
        "the feed-forward part takes the attention's result, as in sequential layers",
        old="self.mlp(self.norm_2(x))",
        new="self.mlp(self.norm_2(x + attended))",
        modules=("transformer.*", "gpt_neox.layers.*"),
    ),
    Bug(
        "unseen_scores_zero",
        "scores of unseen places become zero, not very small",
        old="masked_fill(unseen, -10000.0)",
        new="masked_fill(unseen, 0.0)",
        modules=CORE,
        golden=("gpt_neox.layers.*.attention/Tensor.add@eager_attention_forward",),
    ),
    Bug(
        "empty_places_seen",
        "the mask covers the tokens of this step alone, not the empty places behind them",
        old="unseen = places > positions[:, None]",
        new="unseen = (places > positions[:, None]) & (places <= positions[-1])",
        modules=CORE,
        also=("scores = scores.float().masked_fill(",),
    ),
    Bug(
        "cache_from_the_start",
        "decode steps write their values to the start of the cache",
        old="cache[1, positions] = v",
        new="cache[1, positions - positions[0]] = v",
        modules=CORE,
    ),
    Bug(
        "scaled_twice",
        "scores are divided by the number of channels, not its root",
        old="alpha=1 / math.sqrt(self.channels)",
        new="alpha=1 / self.channels",
        modules=CORE,
    ),
    Bug(
        "quick_gelu",
        "the activation is the sigmoid form of GELU",
        old="return 0.5 * x * (1 + torch.erf(x * 0.70710678))",
        new="return x * torch.sigmoid(1.702 * x)",
        modules=("transformer.*.mlp", "gpt_neox.layers.*.mlp", "gpt_neox.layers.*.mlp.act"),
        golden=("gpt_neox.layers.*.mlp.act/Functional.gelu",),
    ),
    Bug(
        "fused_by_kind",
        "layer 1's fused projection is read as all queries, all keys, all values",
        convert=by_kind,
        modules=(
            "transformer.1.attention.query_key_value.rank.*",
            "gpt_neox.layers.1.attention.query_key_value",
        ),
    ),
    Bug(
        "ranks_swapped",
        "the two shards of layer 2's output projection are swapped",
        convert=swap(
            "transformer.2.attention.dense.rank.0.weight",
            "transformer.2.attention.dense.rank.1.weight",
        ),
        modules=("transformer.2.attention.dense.rank.*", "gpt_neox.layers.2.attention.dense"),
    ),
    Bug(
        "columns_in_turns",
        "layer 0's columns are dealt out to the ranks in turns",
        convert=in_turns,
        modules=("transformer.0.mlp.dense_4h_to_h.rank.*", "gpt_neox.layers.0.mlp.dense_4h_to_h"),
    ),
    Bug(
        "bias_of_rank_0",
        "rank 1 has rank 0's bias in layer 2",
        convert=bias_of_rank_0,
        modules=("transformer.2.mlp.dense_h_to_4h.rank.1", "gpt_neox.layers.2.mlp.dense_h_to_4h"),
    ),
    Bug(
        "norms_swapped",
        "layer 1's two norms have each other's weight",
        convert=swap("transformer.1.norm_1.weight", "transformer.1.norm_2.weight"),
        modules=(
            "transformer.1.norm_[12]",
            "gpt_neox.layers.1.input_layernorm",
            "gpt_neox.layers.1.post_attention_layernorm",
        ),
    ),
    Bug(
        "output_bias_halved",
        "a merge of two ranks halved the bias of the output projections",
        convert=each(
            lambda bias: bias / 2, *(f"transformer.{n}.attention.dense.bias" for n in range(3))
        ),
        modules=("transformer.*.attention.dense", "gpt_neox.layers.*.attention.dense"),
    ),
)
PORTS = (
    written("shards", "ParallelNeoX", "GPTNeoX", SETTINGS, BUGS, keep=1, length=18, norms=norms),
)
