"""A decoder of x-transformers, set up to be Mistral, against that of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import SMALLER, ported
from ports.steps import spans
from ports.weights import Model, State, by_halves, hugging_face, interleaved

WIDTH, HEADS, GROUPS, HEAD, VOCABULARY, LAYERS = 64, 4, 2, 32, 512, 3
INNER, WINDOW = 160, 6
LAYER = "model.layers.*"
EVEN, ODD = "attn_layers.layers.[024]", "attn_layers.layers.[135]"  # attention, feed-forward
NEEDED = ("einops", "einx", "frozendict", "loguru", "torch_einops_utils")
SETTINGS = SMALLER | {
    "intermediate_size": INNER, "head_dim": HEAD, "sliding_window": WINDOW,
    "rms_norm_eps": 1e-12,  # the port has none
    "tie_word_embeddings": False,
}  # fmt: skip
original = hugging_face("MistralForCausalLM", SETTINGS)


def source() -> Path:
    packages.found(*NEEDED)
    return packages.file("x_transformers", "x_transformers.py")


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "dim": WIDTH, "depth": LAYERS, "heads": HEADS, "attn_dim_head": HEAD,
        "attn_kv_heads": GROUPS, "attn_flash": True, "attn_max_attend_past": WINDOW - 1,
        "rotary_pos_emb": True, "rotary_emb_dim": HEAD, "use_rmsnorm": True, "ff_glu": True,
        "ff_swish": True, "ff_no_bias": True, "ff_mult": INNER / WIDTH,
    }  # fmt: skip
    return code.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=128,
        use_abs_pos_emb=False,
        attn_layers=code.Decoder(**{**given, **settings}),
    )


def convert(hf: Model) -> State:
    """Return the weights under the names of x-transformers."""
    state = {
        "token_emb.emb.weight": hf.model.embed_tokens.weight,
        "to_logits.weight": hf.lm_head.weight,
        "attn_layers.final_norm.g": hf.model.norm.weight - 1,  # it adds the one
    }
    for n, layer in enumerate(hf.model.layers):
        own, mlp = layer.self_attn, layer.mlp
        a, f = f"attn_layers.layers.{2 * n}", f"attn_layers.layers.{2 * n + 1}"
        state[f"{a}.0.0.g"] = layer.input_layernorm.weight - 1
        state[f"{f}.0.0.g"] = layer.post_attention_layernorm.weight - 1
        state[f"{a}.1.to_q.weight"] = interleaved(own.q_proj.weight, HEADS)
        state[f"{a}.1.to_k.weight"] = interleaved(own.k_proj.weight, GROUPS)
        state[f"{a}.1.to_v.weight"] = own.v_proj.weight
        state[f"{a}.1.to_out.weight"] = own.o_proj.weight
        heads_in_turn(state, a)
        state[f"{f}.1.ff.0.proj.weight"] = torch.cat([mlp.up_proj.weight, mlp.gate_proj.weight])
        state[f"{f}.1.ff.0.proj.bias"] = torch.zeros(2 * INNER)
        state[f"{f}.1.ff.2.weight"] = mlp.down_proj.weight
    return state


# the query head of Mistral for each of x-transformers, whose key heads take turns
IN_TURN = torch.arange(HEADS).view(GROUPS, -1).T.flatten()


def heads_in_turn(state: State, attention: str, order: torch.Tensor = IN_TURN) -> None:
    """Put the query heads in another order, and what the output projection takes from them."""
    query, out = f"{attention}.1.to_q.weight", f"{attention}.1.to_out.weight"
    state[query] = state[query].view(HEADS, HEAD, WIDTH)[order].flatten(0, 1)
    state[out] = state[out].view(WIDTH, HEADS, HEAD)[:, order].flatten(1)


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then give all so far for each, as the package does.

    Its embedding sees all of them each time, and its layers the last one.
    """
    logits, cache = [], None
    for _, last in spans(ids):
        out, cache = model(ids[:, :last], cache=cache, return_intermediates=True)
        logits.append(out)
    return logits


# -- bugs ----------------------------------------------------------------------------------------


def keep_halves(state: State) -> None:
    for n in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", GROUPS)):
            name = f"attn_layers.layers.{2 * n}.1.to_{part}.weight"
            state[name] = by_halves(state[name], heads)


def heads_in_groups(state: State) -> None:
    for n in range(LAYERS):
        heads_in_turn(state, f"attn_layers.layers.{2 * n}", IN_TURN.argsort())


ATTENTION = (f"{EVEN}.1", f"{LAYER}.self_attn")
ATTEND = (f"{EVEN}.1.attend", *ATTENTION, "model")
NORMS = (
    "attn_layers.layers.*.0.0", "attn_layers.final_norm",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
BUGS = r"""
rope_layout: q and k keep the order of RoPE by halves
    weights keep_halves
    in $EVEN.1.to_[qk] $LAYER.self_attn.[qk]_proj
heads_in_groups: query heads keep their order, by key head
    weights heads_in_groups
    in $EVEN.1.to_q $EVEN.1.to_out $LAYER.self_attn.q_proj $LAYER.self_attn.o_proj
gate_first: gate and up are fused in the wrong order
    weights each(lambda w: w.roll(INNER, 0), "attn_layers.layers.*.1.ff.0.proj.weight")
    in $ODD.1.ff.0.proj $LAYER.mlp.gate_proj $LAYER.mlp.up_proj
v_heads: the value heads are in another order
    weights each(lambda w: w.roll(HEAD, 0), "attn_layers.layers.*.1.to_v.weight")
    in $EVEN.1.to_v $LAYER.self_attn.v_proj
one_twice: norm weights are stored with the one
    weights each(lambda w: w + 1, "attn_layers.final_norm.g attn_layers.layers.*.0.0.g")
    in $NORMS
last_norm_left: the last norm is not loaded
    weights each(torch.zeros_like, "attn_layers.final_norm.g")
    in attn_layers.final_norm model.norm
layer_off: an output projection is that of the layer before
    weights copy("attn_layers.layers.4.1.to_out", "attn_layers.layers.2.1.to_out")
    in attn_layers.layers.4.1.to_out model.layers.2.self_attn.o_proj
head_tied: the head has the embedding's weight
    weights copy("to_logits", "token_emb.emb")
    in to_logits lm_head
window_one_wider: the sliding window holds one token more
    settings {"attn_max_attend_past": 6}
    in $ATTEND
no_window: there is no sliding window
    settings {"attn_max_attend_past": None}
    in $ATTEND
rope_base: the base of RoPE is another one
    settings {"rotary_base_rescale_factor": 4.0}
    in attn_layers.rotary_pos_emb model.rotary_emb
heads_split: the heads of the keys are split the other way
    - self.split_k_heads = Rearrange('b n (h d) -> b h n d', d = dim_head)
    + self.split_k_heads = Rearrange('b n (d h) -> b h n d', d = dim_head)
    in $EVEN.1.split_k_heads $LAYER.self_attn
    early
rotate_sign: RoPE turns the other way
    - x = stack((-x2, x1), dim = -1)
    + x = stack((x2, -x1), dim = -1)
    in $ATTENTION
query_position: queries take the angles of the first positions
    - freqs = freqs[:, -seq_len:, :]
    + freqs = freqs[:, :seq_len, :]
    in $ATTENTION
cos_left: the part that is turned is not multiplied by the cosine
    - (t * freqs.cos() * scale) + (rotate_half(t) * freqs.sin() * scale)
    + (t * scale) + (rotate_half(t) * freqs.sin() * scale)
    in $ATTENTION
"""
PORTS = (ported(globals(), "x-transformers", "x_transformers", *NEEDED),)
