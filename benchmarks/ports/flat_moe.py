"""OLMoE as one module with stacked weights and batched experts, against Hugging Face's."""

from __future__ import annotations

import torch

from ports.bugs import bugs
from ports.weights import State, hugging_face
from ports.written import SMALL, written

SETTINGS = SMALL | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 64,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-3,
}
LAYER = "model.layers.*"
ATTENTION, MIXTURE = f"{LAYER}.self_attn", f"{LAYER}.mlp"
EXPERTS = (MIXTURE, f"{MIXTURE}.experts")


def keys_grouped(state: State) -> None:
    """Order the fused rows of layer 1 by group: its queries, its key, its value."""
    heads = state["wqkv"][1].unflatten(
        0, (-1, SMALL["hidden_size"] // SMALL["num_attention_heads"])
    )
    q, k, v = heads.split([6, 3, 3])
    state["wqkv"][1] = torch.cat((q.unflatten(0, (3, 2)), k[:, None], v[:, None]), 1).flatten(0, 2)


def out_of_the_layer_before(state: State) -> None:
    state["wo"][2] = state["wo"][1]


BUGS = r"""
norm_by_head: queries are normalised head by head
    - q = rms(q, self.q_gain[n], self.eps)
    + q = (rms(q.unflatten(-1, (self.n_q, -1)), 1, self.eps)).flatten(1) * self.q_gain[n]
    in $ATTENTION $ATTENTION.q_norm
eps_of_llama: norms use the epsilon of Llama
    - self.eps, self.top_k = c.rms_norm_eps, c.num_experts_per_tok
    + self.eps, self.top_k = 1e-6, c.num_experts_per_tok
    in $LAYER.input_layernorm $LAYER.post_attention_layernorm $ATTENTION.[qk]_norm model.norm
    early
shares_normed: the shares of the chosen experts are made to sum to one
    - shares = shares.to(x.dtype)
    + shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
    in $MIXTURE.gate
shares_not_sorted: the shares keep the order of the tokens, the outputs that of the experts
    - shares.flatten()[order, None]
    + shares.flatten()[:, None]
    in $EXPERTS
token_wrong: places in the sorted list are taken for tokens in another layout
    - token = order // self.top_k
    + token = order % len(x)
    in $EXPERTS
    also padded[expert, place] = x[token]
cache_of_the_layer_before: values are read from the cache of the layer before
    - keys, values = self.kv[n, 0, :end], self.kv[n, 1, :end]
    + keys, values = self.kv[n, 0, :end], self.kv[n - 1, 1, :end]
    in $ATTENTION
    also o = torch.einsum("gqts,sgd->tgqd", p, values)
groups_inside: queries are grouped with the key heads inside
    - q = q.view(-1, self.n_kv, self.n_q // self.n_kv, self.d)
    + q = q.view(-1, self.n_q // self.n_kv, self.n_kv, self.d).transpose(1, 2)
    in $ATTENTION
    also scores = torch.einsum("tgqd,sgd->gqts", q, keys)
without_the_newest: while decoding, the cache is read without the newest token
    - end = int(at[-1]) + 1
    + end = int(at[-1]) + (len(at) > 1)
    in $ATTENTION
    also keys, values = self.kv[n, 0, :end]
sine_sign: RoPE turns the second half the other way
    - a * sin + b * cos
    + b * cos - a * sin
    in $ATTENTION
one_residual: the experts take the input of attention
    - x = x + self.attend(n, rms(x, self.gain_1[n], self.eps), at)
    -             x = x + self.experts(n, rms(x, self.gain_2[n], self.eps))
    + a = self.attend(n, rms(x, self.gain_1[n], self.eps), at)
    +             x = x + a + self.experts(n, rms(x, self.gain_2[n], self.eps))
    in $LAYER $LAYER.post_attention_layernorm
gate_for_up: the converter puts the linear part before the gate
    weights each(lambda w13: w13.roll(64, dims=-1), "w13")
    in $EXPERTS
keys_grouped: the fused rows of layer 1 are ordered by group
    weights keys_grouped
    in model.layers.1.self_attn.[qkv]_proj
out_of_the_layer_before: layer 2 has the output projection of layer 1
    weights out_of_the_layer_before
    in model.layers.2.self_attn.o_proj
norms_swapped: the two norms of each layer are swapped
    weights swap("gain_1", "gain_2")
    in $LAYER.input_layernorm $LAYER.post_attention_layernorm
"""
PORTS = (
    written(
        "flat-moe",
        "OlmoeInference",
        hugging_face("OlmoeForCausalLM", SETTINGS),
        bugs(BUGS, globals()),
        file="flat_moe",
        length=18,
    ),
)
