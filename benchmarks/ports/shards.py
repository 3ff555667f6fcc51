"""GPT-NeoX in two tensor-parallel ranks, sequence first, with a padded vocabulary and cache."""

from __future__ import annotations

import torch

from ports.code.shards import weights
from ports.made import written
from ports.steps import last_token
from ports.weights import State, norms_of, turned

HEADS = 6
SETTINGS = {
    "vocab_size": 500, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 160, "max_position_embeddings": 256, "rotary_pct": 0.5,
    "initializer_range": 0.12, "attn_implementation": "eager",
}  # fmt: skip
norms = norms_of(
    "gpt_neox.layers",
    {
        "input_layernorm": "attention.query_key_value",
        "post_attention_layernorm": "mlp.dense_h_to_4h",
    },
    {"gpt_neox.final_layer_norm": "lm_head"},
)
LAYER = "gpt_neox.layers.*"
OWN = "transformer.*.attention.core.*"
CORE = (OWN, f"{LAYER}.attention")
ROTARY = (f"{OWN}.rotary", f"{LAYER}.attention")
SUMS = (
    "transformer.*.*.dense",
    "transformer.*.*.dense_4h_to_h",
    f"{LAYER}.*.dense",
    f"{LAYER}.*.dense_4h_to_h",
)


def by_kind(state: State) -> None:
    """Read layer 1's fused rows as all queries, all keys, all values; they stand head by head."""
    for kind in ("weight", "bias"):
        names = [f"transformer.1.attention.query_key_value.rank.{rank}.{kind}" for rank in (0, 1)]
        shards = turned(torch.cat([state[name] for name in names]), 3, HEADS).chunk(2)
        state.update({name: shard.clone() for name, shard in zip(names, shards, strict=True)})


def in_turns(state: State) -> None:
    """Deal layer 0's columns out to the ranks in turns."""
    names = [f"transformer.0.mlp.dense_4h_to_h.rank.{rank}.weight" for rank in (0, 1)]
    whole = torch.cat([state[name] for name in names], dim=1)
    state.update({name: whole[:, rank::2].clone() for rank, name in enumerate(names)})


BUGS = r"""
bias_on_each_rank: each rank adds the bias before the sum
    - torch.stack([linear(x) for linear,
    + torch.stack([linear(x) + self.bias for linear,
    in $SUMS
    also return partial.sum(dim=0) + self.bias
no_reduction: the sum over the ranks is forgotten: rank 0 goes on with its part
    - partial.sum(dim=0) + self.bias
    + partial[0] + self.bias
    in $SUMS
unpadded_shard: the second shard's first token is counted without the padding
    - local = ids - rank * self.rows
    + local = ids - rank * (self.vocabulary // RANKS)
    in word_embeddings gpt_neox.embed_in
last_channels_turn: the last channels of a head turn, and the first ones pass
    - turning, passing = x[
    + passing, turning = x[
    in $ROTARY
    also quarter = torch.cat(
    also turned = turning * angle.cos()
frequency_of_the_whole_head: frequencies fall as if all channels turned
    - steps / channels)
    + steps / (2 * channels))
    in $ROTARY gpt_neox.rotary_emb
    also angle = torch.einsum("t,f->tf"
residual_in_turn: the feed-forward part takes the attention's result, as in sequential layers
    - self.mlp(self.norm_2(x))
    + self.mlp(self.norm_2(x + attended))
    in transformer.* $LAYER
unseen_scores_zero: scores of unseen places become zero, not very small
    - masked_fill(unseen, -10000.0)
    + masked_fill(unseen, 0.0)
    in $CORE
    golden $LAYER.attention/Tensor.add@eager_attention_forward
empty_places_seen: the mask covers the tokens of this step alone, not the empty places behind them
    - unseen = places > positions[:, None]
    + unseen = (places > positions[:, None]) & (places <= positions[-1])
    in $CORE
    also scores = scores.float().masked_fill(
cache_from_the_start: decode steps write their values to the start of the cache
    - cache[1, positions] = v
    + cache[1, positions - positions[0]] = v
    in $CORE
scaled_twice: scores are divided by the number of channels, not its root
    - alpha=1 / math.sqrt(self.channels)
    + alpha=1 / self.channels
    in $CORE
quick_gelu: the activation is the sigmoid form of GELU
    - return 0.5 * x * (1 + torch.erf(x * 0.70710678))
    + return x * torch.sigmoid(1.702 * x)
    in transformer.*.mlp $LAYER.mlp $LAYER.mlp.act
    golden $LAYER.mlp.act/Functional.gelu
fused_by_kind: layer 1's fused projection is read as all queries, all keys, all values
    weights by_kind
    in transformer.1.attention.query_key_value.rank.* gpt_neox.layers.1.attention.query_key_value
ranks_swapped: the two shards of layer 2's output projection are swapped
    weights swap(*(f"transformer.2.attention.dense.rank.{rank}.weight" for rank in (0, 1)))
    in transformer.2.attention.dense.rank.* gpt_neox.layers.2.attention.dense
columns_in_turns: layer 0's columns are dealt out to the ranks in turns
    weights in_turns
    in transformer.0.mlp.dense_4h_to_h.rank.* gpt_neox.layers.0.mlp.dense_4h_to_h
bias_of_rank_0: rank 1 has rank 0's bias in layer 2
    weights copy(*(f"transformer.2.mlp.dense_h_to_4h.rank.{rank}.bias" for rank in (1, 0)))
    in transformer.2.mlp.dense_h_to_4h.rank.1 gpt_neox.layers.2.mlp.dense_h_to_4h
norms_swapped: layer 1's two norms have each other's weight
    weights swap("transformer.1.norm_1.weight", "transformer.1.norm_2.weight")
    in transformer.1.norm_[12] gpt_neox.layers.1.input_layernorm
    in gpt_neox.layers.1.post_attention_layernorm
output_bias_halved: a merge of two ranks halved the bias of the output projections
    weights each(lambda bias: bias / 2, "transformer.*.attention.dense.bias")
    in transformer.*.attention.dense $LAYER.attention.dense
"""
PORTS = (
    written(
        globals(),
        "shards",
        "ParallelNeoX",
        "GPTNeoXForCausalLM",
        convert=weights,
        golden_work=last_token,
        length=18,
    ),
)
