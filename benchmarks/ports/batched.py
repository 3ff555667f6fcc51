"""Qwen3 in a batch: our request is the padded row beside another one; kernels as Flax has them."""

from __future__ import annotations

import torch

from ports.made import SMALL, written
from ports.weights import Model, State, each, renamed, transpose

CHANNELS = 16
SETTINGS = SMALL | {"head_dim": CHANNELS}
LAYER, OWN = "model.layers.*", "layers.*.self_attention"
ATTENTION = (OWN, f"{LAYER}.self_attn")
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "decoder_norm.scale": "model.norm.weight",
    "logits_dense.kernel": "lm_head.weight",
    "layers.*.pre_attention_norm.scale": "model.layers.*.input_layernorm.weight",
    "layers.*.pre_mlp_norm.scale": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.self_attention.{query,key,value,out}.kernel": "model.layers.*"
    ".self_attn.{q,k,v,o}_proj.weight",
    "layers.*.self_attention.{query,key}_norm.scale": "model.layers.*.self_attn.{q,k}_norm.weight",
    "layers.*.mlp.{wi_0,wi_1,wo}.kernel": "model.layers.*.mlp.{gate,up,down}_proj.weight",
}


def convert(hf: Model) -> State:
    """Return the weights as kernels."""
    state = renamed(hf.state_dict(), NAMES)
    transpose("logits_dense", "layers.*.mlp", f"{OWN}.{{query,key,value,out}}")(state)
    each(lambda w: w.unflatten(1, (-1, CHANNELS)), f"{OWN}.{{query,key,value}}")(state)
    each(lambda w: w.unflatten(0, (-1, CHANNELS)), f"{OWN}.out")(state)
    return state


def channels_first(kernel: torch.Tensor) -> torch.Tensor:
    """Return rows [heads, channels] of outputs as if they were [channels, heads]."""
    return kernel.flatten(1).unflatten(1, kernel.shape[:0:-1]).transpose(1, 2)


def transposed(kernel: torch.Tensor) -> torch.Tensor:
    return kernel.flatten(0, 1).T.reshape(kernel.shape)


BUGS = r"""
padding_seen: the mask forgets that a row is padded
    - mask = (key <= query[:, None]) & (key >= padding[:, None, None])
    + mask = (key <= query[:, None]).expand(len(tokens), -1, -1)
    in (root) model $ATTENTION
    also scores = torch.where(
decode_counts_padding: positions of decode steps count the padding
    - positions = torch.clamp(query - padding[:, None], min=0)
    + positions = torch.clamp(query - (place == 0) * padding[:, None], min=0)
    in (root) model model.rotary_emb
    also radians = (positions[..., None].float() / timescale)
norm_after_rotary: keys are normed after they are turned
    - k = rotary(self.key_norm(self.key(x)), positions, self.base)
    + k = self.key_norm(rotary(self.key(x), positions, self.base))
    in $ATTENTION
keys_with_the_query_norm: keys take the norm of the queries
    - self.key_norm(self.key(x))
    + self.query_norm(self.key(x))
    in $ATTENTION $OWN.*_norm $LAYER.self_attn.k_norm
    golden $LAYER.self_attn.k_norm $LAYER.self_attn.k_norm/T*.*
place_before: decode steps overwrite the values of the token before
    - cache[1][:, place:end] = v
    + cache[1][:, max(place - 1, 0) : max(place - 1, 0) + v.shape[1]] = v
    in $ATTENTION
rows_in_turns: our row reads the other row's values from the cache
    - keys, values = cache[0][:, :end], cache[1][:, :end]
    + keys, values = cache[0][:, :end], cache[1].flip(0)[:, :end]
    in $ATTENTION
    also mixed = torch.einsum("bgrqk,bkgc->bqgrc"
scaled_by_all_heads: queries are scaled by the width of all heads
    - * self.channels**-0.5
    + * (self.heads * self.channels) ** -0.5
    in $ATTENTION
heads_by_turns: query heads go to the groups in turns
    - q.unflatten(2, (self.kv_heads, -1))
    + q.unflatten(2, (-1, self.kv_heads)).transpose(2, 3)
    in $ATTENTION
timescale_base: the frequencies are those of half as many channels
    - 2 * torch.arange(half).float() / x.shape[-1]
    + torch.arange(half).float() / x.shape[-1]
    in $ATTENTION model.rotary_emb
residual_normed: the first residual connection adds the normed input
    - x = x + self.self_attention(
    + x = normed + self.self_attention(
    in layers.* $LAYER
second_norm_left_out: the feed-forward part takes its input without the norm
    - normed = self.pre_mlp_norm(x)
    + normed = x
    in layers.* layers.*.pre_mlp_norm $LAYER
    golden $LAYER.post_attention_layernorm $LAYER.post_attention_layernorm/T*.*
    also return x + self.mlp(normed)
    also gate = self.wi_0(x)
    also return self.wo(gate *
relu: the gate is a ReLU
    - gate * torch.sigmoid(gate) * self.wi_1(x)
    + torch.relu(gate) * self.wi_1(x)
    in layers.*.mlp $LAYER.mlp $LAYER.mlp.act_fn
    golden $LAYER.mlp.act_fn/Functional.silu
channels_before_heads: layer 1's values are read with the channels before the heads
    weights each(channels_first, "layers.1.self_attention.value.kernel")
    in layers.1.self_attention.value model.layers.1.self_attn.v_proj
output_not_transposed: the square output kernels are not transposed
    weights each(transposed, "layers.*.self_attention.out.kernel")
    in $OWN.out $LAYER.self_attn.o_proj
key_heads_swapped: layer 2's two key heads are swapped
    weights each(lambda kernel: kernel.flip(1), "layers.2.self_attention.key.kernel")
    in layers.2.self_attention.key model.layers.2.self_attn.k_proj
head_norms_swapped: layer 0's norms of queries and keys are swapped
    weights swap(*(f"layers.0.self_attention.{x}_norm" for x in ("query", "key")))
    in layers.0.self_attention.*_norm model.layers.0.self_attn.[qk]_norm
norm_of_layer_0: layer 2 has the first norm of layer 0
    weights copy("layers.2.pre_attention_norm", "layers.0.pre_attention_norm")
    in layers.2.pre_attention_norm model.layers.2.input_layernorm
"""
PORTS = (written(globals(), "batched", "BatchedDecoder", "Qwen3ForCausalLM", length=16),)
