"""Qwen3 in a batch: our request is the padded row beside another one; kernels as Flax has them."""

from __future__ import annotations

from typing import Any

import torch

from ports.entry import Bug, State
from ports.written import SMALL, each, swap, written

SETTINGS: dict[str, Any] = {**SMALL, "head_dim": 16}
ATTENTION = ("layers.*.self_attention", "model.layers.*.self_attn")
LAYERS = range(SETTINGS["num_hidden_layers"])


def channels_first(kernel: torch.Tensor) -> torch.Tensor:
    """Return rows [heads, channels] of outputs as if they were [channels, heads]."""
    return kernel.flatten(1).unflatten(1, kernel.shape[:0:-1]).transpose(1, 2)


def transposed(kernel: torch.Tensor) -> torch.Tensor:
    return kernel.flatten(0, 1).T.reshape(kernel.shape)


def norm_of_layer_0(state: State) -> None:
    name = "layers.{}.pre_attention_norm.scale"
    state[name.format(2)] = state[name.format(0)].clone()


BUGS = (
    Bug(
        "padding_seen",
        "the mask forgets that a row is padded",
        old="mask = (key <= query[:, None]) & (key >= padding[:, None, None])",
        new="mask = (key <= query[:, None]).expand(len(tokens), -1, -1)",
        modules=("", "model", *ATTENTION),
        also=("scores = torch.where(",),
    ),
    Bug(
        "decode_counts_padding",
        "positions of decode steps count the padding",
        old="positions = torch.clamp(query - padding[:, None], min=0)",
        new="positions = torch.clamp(query - (place == 0) * padding[:, None], min=0)",
        modules=("", "model", "model.rotary_emb"),
        also=("radians = (positions[..., None].float() / timescale)",),
    ),
    Bug(
        "norm_after_rotary",
        "keys are normed after they are turned",
        old="k = rotary(self.key_norm(self.key(x)), positions, self.base)",
        new="k = self.key_norm(rotary(self.key(x), positions, self.base))",
        modules=ATTENTION,
    ),
    Bug(
        "keys_with_the_query_norm",
        "keys take the norm of the queries",
        old="self.key_norm(self.key(x))",
        new="self.query_norm(self.key(x))",
        modules=(*ATTENTION, "layers.*.self_attention.*_norm", "model.layers.*.self_attn.k_norm"),
        golden=("model.layers.*.self_attn.k_norm", "model.layers.*.self_attn.k_norm/T*.*"),
    ),
    Bug(
        "place_before",
        "decode steps overwrite the values of the token before",
        old="cache[1][:, place:end] = v",
        new="cache[1][:, max(place - 1, 0) : max(place - 1, 0) + v.shape[1]] = v",
        modules=ATTENTION,
    ),
    Bug(
        "rows_in_turns",
        "our row reads the other row's values from the cache",
        old="keys, values = cache[0][:, :end], cache[1][:, :end]",
        new="keys, values = cache[0][:, :end], cache[1].flip(0)[:, :end]",
        modules=ATTENTION,
        also=('mixed = torch.einsum("bgrqk,bkgc->bqgrc"',),
    ),
    Bug(
        "scaled_by_all_heads",
        "queries are scaled by the width of all heads",
        old="* self.channels**-0.5",
        new="* (self.heads * self.channels) ** -0.5",
        modules=ATTENTION,
    ),
    Bug(
        "heads_by_turns",
        "query heads go to the groups in turns",
        old="q.unflatten(2, (self.kv_heads, -1))",
        new="q.unflatten(2, (-1, self.kv_heads)).transpose(2, 3)",
        modules=ATTENTION,
    ),
    Bug(
        "timescale_base",
        "the frequencies are those of half as many channels",
        old="2 * torch.arange(half).float() / x.shape[-1]",
        new="torch.arange(half).float() / x.shape[-1]",
        modules=(*ATTENTION, "model.rotary_emb"),
    ),
    Bug(
        "residual_normed",
        "the first residual connection adds the normed input",
        old="x = x + self.self_attention(",
        new="x = normed + self.self_attention(",
        modules=("layers.*", "model.layers.*"),
    ),
    Bug(
        "second_norm_left_out",
        "the feed-forward part takes its input without the norm",
        old="normed = self.pre_mlp_norm(x)",
        new="normed = x",
        modules=("layers.*", "layers.*.pre_mlp_norm", "model.layers.*"),
        golden=(
            "model.layers.*.post_attention_layernorm",
            "model.layers.*.post_attention_layernorm/T*.*",
        ),
        also=("return x + self.mlp(normed)", "gate = self.wi_0(x)", "return self.wo(gate *"),
    ),
    Bug(
        "relu",
        "the gate is a ReLU",
        old="gate * torch.sigmoid(gate) * self.wi_1(x)",
        new="torch.relu(gate) * self.wi_1(x)",
        modules=("layers.*.mlp", "model.layers.*.mlp", "model.layers.*.mlp.act_fn"),
        golden=("model.layers.*.mlp.act_fn/Functional.silu",),
    ),
    Bug(
        "channels_before_heads",
        "layer 1's values are read with the channels before the heads",
        convert=each(channels_first, "layers.1.self_attention.value.kernel"),
        modules=("layers.1.self_attention.value", "model.layers.1.self_attn.v_proj"),
    ),
    Bug(
        "output_not_transposed",
        "the square output kernels are not transposed",
        convert=each(transposed, *(f"layers.{n}.self_attention.out.kernel" for n in LAYERS)),
        modules=("layers.*.self_attention.out", "model.layers.*.self_attn.o_proj"),
    ),
    Bug(
        "key_heads_swapped",
        "layer 2's two key heads are swapped",
        convert=each(lambda kernel: kernel.flip(1), "layers.2.self_attention.key.kernel"),
        modules=("layers.2.self_attention.key", "model.layers.2.self_attn.k_proj"),
    ),
    Bug(
        "head_norms_swapped",
        "layer 0's norms of queries and keys are swapped",
        convert=swap(
            "layers.0.self_attention.query_norm.scale", "layers.0.self_attention.key_norm.scale"
        ),
        modules=("layers.0.self_attention.*_norm", "model.layers.0.self_attn.[qk]_norm"),
    ),
    Bug(
        "norm_of_layer_0",
        "layer 2 has the first norm of layer 0",
        convert=norm_of_layer_0,
        modules=("layers.2.pre_attention_norm", "model.layers.2.input_layernorm"),
    ),
)
PORTS = (written("batched", "BatchedDecoder", "Qwen3", SETTINGS, BUGS, length=16),)
