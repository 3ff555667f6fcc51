"""Llama as Meta released it: complex rotary embeddings, a cache from ``start_pos`` on."""

from __future__ import annotations

import torch

from ports.made import SMALL, written
from ports.steps import last_token
from ports.weights import Model, State, each, hugging_face, interleaved, renamed

# two queries share a key: the rows of the keys can be read as those of as many heads
SETTINGS = SMALL | {"num_key_value_heads": 3, "rms_norm_eps": 1e-5}
HEADS, KV_HEADS = 6, 3
LAYER = "model.layers.*"
ATTENTION = ("layers.*.attention", f"{LAYER}.self_attn")
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.*.attention.w{q,k,v,o}": "model.layers.*.self_attn.{q,k,v,o}_proj",
    "layers.*.feed_forward.{w1,w2,w3}": "model.layers.*.mlp.{gate,down,up}_proj",
    "layers.*.{attention,ffn}_norm": "model.layers.*.{input,post_attention}_layernorm",
}


def convert(hf: Model) -> State:
    """Return the weights under Meta's names, queries and keys permuted."""
    state = renamed(hf.state_dict(), NAMES)
    each(lambda rows: interleaved(rows, HEADS), "layers.*.attention.wq")(state)
    each(lambda rows: interleaved(rows, KV_HEADS), "layers.*.attention.wk")(state)
    return state


def heads_shifted(weight: torch.Tensor) -> torch.Tensor:
    """Give each head's columns to the next head."""
    return weight.unflatten(1, (HEADS, -1)).roll(1, dims=1).flatten(1)


def small_embeddings(model: Model) -> None:
    """Make the embeddings as small as trained ones, so that epsilon counts."""
    model.get_input_embeddings().weight.mul_(1 / 6)


original = hugging_face("LlamaForCausalLM", SETTINGS, change=small_embeddings)
BUGS = r"""
rope_backwards: keys turn the other way
    - torch.view_as_real(xk_ * turn)
    + torch.view_as_real(xk_ * turn.conj())
    in $ATTENTION
heads_tiled: key and value heads are tiled (0, 1, 0, 1), not repeated (0, 0, 1, 1)
    - x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
    + x[:, :, None, :, :].expand(bs, slen, n_rep, n_kv_heads, head_dim)
    in $ATTENTION
    also return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)
no_scale: scores are not divided by the root of the head's width
    - torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
    + torch.matmul(xq, keys.transpose(2, 3))
    in $ATTENTION
    golden $LAYER.self_attn/Tensor.mul@eager_attention_forward
mask_ahead: each token of the prompt sees the next one
    - mask = torch.triu(mask, diagonal=1)
    + mask = torch.triu(mask, diagonal=2)
    in (root) model $ATTENTION
    also scores = scores + mask
keys_for_values: the cache of the values is filled with keys
    - start_pos + seqlen] = xv
    + start_pos + seqlen] = xk
    in $ATTENTION
    also values = repeat_kv(
positions_restart: each decode step begins at position 0 again
    - freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
    + freqs_cis = self.freqs_cis[:seqlen]
    in (root) model model.rotary_emb $ATTENTION
    also torch.view_as_real(xq_ * turn)
    also torch.view_as_real(xk_ * turn)
softmax_over_queries: softmax runs along the queries
    - F.softmax(scores.float(), dim=-1)
    + F.softmax(scores.float(), dim=-2)
    in $ATTENTION
residual_of_the_input: the second residual connection adds the layer's input
    - return h + self.feed_forward(self.ffn_norm(h))
    + return x + self.feed_forward(self.ffn_norm(h))
    in layers.* $LAYER
no_epsilon: norms divide by the root mean square alone
    - x.pow(2).mean(-1, keepdim=True) + self.eps)
    + x.pow(2).mean(-1, keepdim=True))
    in layers.*.*_norm norm $LAYER.*layernorm model.norm
    golden $LAYER.*layernorm/Tensor.add model.norm/Tensor.add
keys_not_permuted: the converter permutes the queries alone
    weights each(lambda w: by_halves(w, KV_HEADS), "layers.*.attention.wk")
    in layers.*.attention.wk $LAYER.self_attn.k_proj
keys_permuted_as_queries: the converter permutes the keys with the number of query heads
    weights each(lambda w: interleaved(by_halves(w, KV_HEADS), HEADS), "layers.*.attention.wk")
    in layers.*.attention.wk $LAYER.self_attn.k_proj
heads_shifted: in layer 1 the output projection takes the heads in another order
    weights each(heads_shifted, "layers.1.attention.wo.weight")
    in layers.1.attention.wo model.layers.1.self_attn.o_proj
gate_and_up_swapped: the converter takes w3 for the gate, in the last layer
    weights swap("layers.2.feed_forward.w1", "layers.2.feed_forward.w3")
    in layers.2.feed_forward.w[13] model.layers.2.mlp.[gu]*_proj
norms_swapped: layer 1 has its two norms swapped
    weights swap("layers.1.attention_norm", "layers.1.ffn_norm")
    in layers.1.attention_norm layers.1.ffn_norm model.layers.1.input_layernorm
    in model.layers.1.post_attention_layernorm
head_tied: the head has the weights of the embedding
    weights copy("output", "tok_embeddings")
    in output lm_head
"""
PORTS = (written(globals(), "meta", "Transformer", golden_work=last_token, length=73),)
