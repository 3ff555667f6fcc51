"""OLMoE as one module with stacked weights and batched experts, against Hugging Face's."""

from __future__ import annotations

import torch

from ports.made import SMALL, written
from ports.weights import Model, State, fitting

SETTINGS = SMALL | {
    "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 3, "intermediate_size": 64,
    "norm_topk_prob": False, "rms_norm_eps": 1e-3,
}  # fmt: skip
LAYER = "model.layers.*"
ATTENTION, MIXTURE = f"{LAYER}.self_attn", f"{LAYER}.mlp"
EXPERTS = (MIXTURE, f"{MIXTURE}.experts")


def convert(hf: Model) -> State:
    """Stack the weights of all layers."""
    given = hf.state_dict()

    def stack(*names: str) -> torch.Tensor:
        wholes = [fitting(given, f"{LAYER}.{name}") for name in names]
        return torch.cat([torch.stack([given[found] for (found,) in each]) for each in wholes], 1)

    return {
        "tok": given["model.embed_tokens.weight"],
        "wqkv": stack(*(f"self_attn.{x}_proj.weight" for x in "qkv")),
        "q_gain": stack("self_attn.q_norm.weight"),
        "k_gain": stack("self_attn.k_norm.weight"),
        "wo": stack("self_attn.o_proj.weight"),
        "router": stack("mlp.gate.weight"),
        "w13": stack("mlp.experts.gate_up_proj").mT,
        "w2": stack("mlp.experts.down_proj").mT,
        "gain_1": stack("input_layernorm.weight"),
        "gain_2": stack("post_attention_layernorm.weight"),
        "gain": given["model.norm.weight"],
        "out": given["lm_head.weight"],
    }


# of each group its queries, its key, its value
BY_GROUP = (0, 1, 6, 9, 2, 3, 7, 10, 4, 5, 8, 11)
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
    weights each(lambda w: torch.stack([w[0], reordered(w[1], BY_GROUP), w[2]]), "wqkv")
    in model.layers.1.self_attn.[qkv]_proj
out_of_the_layer_before: layer 2 has the output projection of layer 1
    weights each(lambda wo: wo[[0, 1, 1]], "wo")
    in model.layers.2.self_attn.o_proj
norms_swapped: the two norms of each layer are swapped
    weights swap("gain_1", "gain_2")
    in $LAYER.input_layernorm $LAYER.post_attention_layernorm
"""
PORTS = (
    written(
        globals(),
        "flat-moe",
        "OlmoeInference",
        "OlmoeForCausalLM",
        file="flat_moe",
        length=18,
    ),
)
