"""Llama as Meta released it: complex rotary embeddings, a cache from ``start_pos`` on."""

from __future__ import annotations

from typing import Any

import torch

from ports.entry import Bug, State
from ports.written import SMALL, each, swap, written

# two queries share a key: the rows of the keys can be read as those of as many heads
SETTINGS: dict[str, Any] = {**SMALL, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
HEADS, KV_HEADS = SETTINGS["num_attention_heads"], SETTINGS["num_key_value_heads"]
LAYERS = range(SETTINGS["num_hidden_layers"])
ATTENTION = ("layers.*.attention", "model.layers.*.self_attn")


def halves(weight: torch.Tensor) -> torch.Tensor:
    """Undo the permutation: the two halves of each key head stand one after the other again."""
    return weight.unflatten(0, (KV_HEADS, -1, 2)).transpose(1, 2).flatten(0, 2)


def as_queries(weight: torch.Tensor) -> torch.Tensor:
    """Permute the keys as if they had as many heads as the queries."""
    return halves(weight).unflatten(0, (HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)


def heads_shifted(weight: torch.Tensor) -> torch.Tensor:
    """Give each head's columns to the next head."""
    return weight.unflatten(1, (HEADS, -1)).roll(1, dims=1).flatten(1)


def tied(state: State) -> None:
    state["output.weight"] = state["tok_embeddings.weight"].clone()


BUGS = (
    Bug(
        "rope_backwards",
        "keys turn the other way",
        old="torch.view_as_real(xk_ * turn)",
        new="torch.view_as_real(xk_ * turn.conj())",
        modules=ATTENTION,
    ),
    Bug(
        "heads_tiled",
        "key and value heads are tiled (0, 1, 0, 1), not repeated (0, 0, 1, 1)",
        old="x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)",
        new="x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim)",
        modules=ATTENTION,
        also=("return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)",),
    ),
    Bug(
        "no_scale",
        "scores are not divided by the root of the head's width",
        old="torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)",
        new="torch.matmul(xq, keys.transpose(2, 3))",
        modules=ATTENTION,
        golden=("model.layers.*.self_attn/Tensor.mul@eager_attention_forward",),
    ),
    Bug(
        "mask_ahead",
        "each token of the prompt sees the next one",
        old="mask = torch.triu(mask, diagonal=1)",
        new="mask = torch.triu(mask, diagonal=2)",
        modules=("", "model", *ATTENTION),
        also=("scores = scores + mask",),
    ),
    Bug(
        "keys_for_values",
        "the cache of the values is filled with keys",
        old="start_pos + seqlen] = xv",
        new="start_pos + seqlen] = xk",
        modules=ATTENTION,
        also=("values = repeat_kv(",),
    ),
    Bug(
        "positions_restart",
        "each decode step begins at position 0 again",
        old="freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]",
        new="freqs_cis = self.freqs_cis[:seqlen]",
        modules=("", "model", "model.rotary_emb", *ATTENTION),
        also=("torch.view_as_real(xq_ * turn)", "torch.view_as_real(xk_ * turn)"),
    ),
    Bug(
        "softmax_over_queries",
        "softmax runs along the queries",
        old="F.softmax(scores.float(), dim=-1)",
        new="F.softmax(scores.float(), dim=-2)",
        modules=ATTENTION,
    ),
    Bug(
        "residual_of_the_input",
        "the second residual connection adds the layer's input",
        old="return h + self.feed_forward(self.ffn_norm(h))",
        new="return x + self.feed_forward(self.ffn_norm(h))",
        modules=("layers.*", "model.layers.*"),
    ),
    Bug(
        "no_epsilon",
        "norms divide by the root mean square alone",
        old="x.pow(2).mean(-1, keepdim=True) + self.eps)",
        new="x.pow(2).mean(-1, keepdim=True))",
        modules=("layers.*.*_norm", "norm", "model.layers.*.*layernorm", "model.norm"),
        golden=("model.layers.*.*layernorm/Tensor.add", "model.norm/Tensor.add"),
    ),
    Bug(
        "keys_not_permuted",
        "the converter permutes the queries alone",
        convert=each(halves, *(f"layers.{n}.attention.wk.weight" for n in LAYERS)),
        modules=("layers.*.attention.wk", "model.layers.*.self_attn.k_proj"),
    ),
    Bug(
        "keys_permuted_as_queries",
        "the converter permutes the keys with the number of query heads",
        convert=each(as_queries, *(f"layers.{n}.attention.wk.weight" for n in LAYERS)),
        modules=("layers.*.attention.wk", "model.layers.*.self_attn.k_proj"),
    ),
    Bug(
        "heads_shifted",
        "in layer 1 the output projection takes the heads in another order",
        convert=each(heads_shifted, "layers.1.attention.wo.weight"),
        modules=("layers.1.attention.wo", "model.layers.1.self_attn.o_proj"),
    ),
    Bug(
        "gate_and_up_swapped",
        "the converter takes w3 for the gate, in the last layer",
        convert=swap("layers.2.feed_forward.w1.weight", "layers.2.feed_forward.w3.weight"),
        modules=("layers.2.feed_forward.w[13]", "model.layers.2.mlp.[gu]*_proj"),
    ),
    Bug(
        "norms_swapped",
        "layer 1 has its two norms swapped",
        convert=swap("layers.1.attention_norm.weight", "layers.1.ffn_norm.weight"),
        modules=(
            "layers.1.attention_norm",
            "layers.1.ffn_norm",
            "model.layers.1.input_layernorm",
            "model.layers.1.post_attention_layernorm",
        ),
    ),
    Bug(
        "head_tied",
        "the head has the weights of the embedding",
        convert=tied,
        modules=("output", "lm_head"),
    ),
)
# embeddings as small as trained ones, so that epsilon counts
PORTS = (
    written(
        "meta",
        "Transformer",
        "Llama",
        SETTINGS,
        BUGS,
        keep=1,
        length=73,
        embedding=1 / 6,
    ),
)
