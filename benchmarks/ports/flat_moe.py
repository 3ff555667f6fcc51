"""OLMoE as one module with stacked weights and batched experts, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model, State
from ports.written import SMALL, written

SETTINGS: dict[str, Any] = SMALL | {
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


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.post_attention_layernorm, [m.gate, m.experts.gate_up_proj]
    yield model.model.norm, [model.lm_head]


def gate_for_up(state: State) -> None:
    state["w13"] = state["w13"].roll(SETTINGS["intermediate_size"], dims=-1)


def keys_grouped(state: State) -> None:
    """Order the fused rows of layer 1 by group: its queries, its key, its value."""
    heads = state["wqkv"][1].unflatten(
        0, (-1, SMALL["hidden_size"] // SMALL["num_attention_heads"])
    )
    q, k, v = heads.split([6, 3, 3])
    state["wqkv"][1] = torch.cat((q.unflatten(0, (3, 2)), k[:, None], v[:, None]), 1).flatten(0, 2)


def out_of_the_layer_before(state: State) -> None:
    state["wo"][2] = state["wo"][1]


def second_norm_first(state: State) -> None:
    state["gain_1"], state["gain_2"] = state["gain_2"], state["gain_1"]


BUGS = (
    Bug(
        "norm_by_head",
        "queries are normalised head by head",
        old="q = rms(q, self.q_gain[n], self.eps)",
        new="q = (rms(q.unflatten(-1, (self.n_q, -1)), 1, self.eps)).flatten(1) * self.q_gain[n]",
        modules=(ATTENTION, f"{ATTENTION}.q_norm"),
    ),
    Bug(
        "eps_of_llama",
        "norms use the epsilon of Llama",
        old="self.eps, self.top_k = c.rms_norm_eps, c.num_experts_per_tok",
        new="self.eps, self.top_k = 1e-6, c.num_experts_per_tok",
        modules=(
            f"{LAYER}.input_layernorm",
            f"{LAYER}.post_attention_layernorm",
            f"{ATTENTION}.[qk]_norm",
            "model.norm",
        ),
        early=True,
    ),
    Bug(
        "shares_normed",
        "the shares of the chosen experts are made to sum to one",
        old="shares = shares.to(x.dtype)",
        new="shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)",
        modules=(f"{MIXTURE}.gate",),
    ),
    Bug(
        "shares_not_sorted",
        "the shares keep the order of the tokens, the outputs that of the experts",
        old="shares.flatten()[order, None]",
        new="shares.flatten()[:, None]",
        modules=EXPERTS,
    ),
    Bug(
        "token_wrong",
        "places in the sorted list are taken for tokens in another layout",
        old="token = order // self.top_k",
        new="token = order % len(x)",
        modules=EXPERTS,
        also=("padded[expert, place] = x[token]",),
    ),
    Bug(
        "cache_of_the_layer_before",
        "values are read from the cache of the layer before",
        old="keys, values = self.kv[n, 0, :end], self.kv[n, 1, :end]",
        new="keys, values = self.kv[n, 0, :end], self.kv[n - 1, 1, :end]",
        modules=(ATTENTION,),
        also=('o = torch.einsum("gqts,sgd->tgqd", p, values)',),
    ),
    Bug(
        "groups_inside",
        "queries are grouped with the key heads inside",
        old="q = q.view(-1, self.n_kv, self.n_q // self.n_kv, self.d)",
        new="q = q.view(-1, self.n_q // self.n_kv, self.n_kv, self.d).transpose(1, 2)",
        modules=(ATTENTION,),
        also=('scores = torch.einsum("tgqd,sgd->gqts", q, keys)',),
    ),
    Bug(
        "without_the_newest",
        "while decoding, the cache is read without the newest token",
        old="end = int(at[-1]) + 1",
        new="end = int(at[-1]) + (len(at) > 1)",
        modules=(ATTENTION,),
        also=("keys, values = self.kv[n, 0, :end]",),
    ),
    Bug(
        "sine_sign",
        "RoPE turns the second half the other way",
        old="a * sin + b * cos",
        new="b * cos - a * sin",
        modules=(ATTENTION,),
    ),
    Bug(
        "one_residual",
        "the experts take the input of attention",
        old="x = x + self.attend(n, rms(x, self.gain_1[n], self.eps), at)\n"
        "            x = x + self.experts(n, rms(x, self.gain_2[n], self.eps))",
        new="a = self.attend(n, rms(x, self.gain_1[n], self.eps), at)\n"
        "            x = x + a + self.experts(n, rms(x, self.gain_2[n], self.eps))",
        modules=(LAYER, f"{LAYER}.post_attention_layernorm"),
    ),
    Bug(
        "gate_for_up",
        "the converter puts the linear part before the gate",
        convert=gate_for_up,
        modules=EXPERTS,
    ),
    Bug(
        "keys_grouped",
        "the fused rows of layer 1 are ordered by group",
        convert=keys_grouped,
        modules=("model.layers.1.self_attn.[qkv]_proj",),
    ),
    Bug(
        "out_of_the_layer_before",
        "layer 2 has the output projection of layer 1",
        convert=out_of_the_layer_before,
        modules=("model.layers.2.self_attn.o_proj",),
    ),
    Bug(
        "norms_swapped",
        "the two norms of each layer are swapped",
        convert=second_norm_first,
        modules=(f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"),
    ),
)
PORTS = (
    written(
        "flat-moe",
        "OlmoeInference",
        "Olmoe",
        SETTINGS,
        BUGS,
        file="flat_moe",
        norms=norms,
        length=18,
    ),
)
