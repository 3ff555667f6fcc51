"""A decoder of x-transformers, set up to be Mistral, against that of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms, spread

WIDTH, HEADS, GROUPS, HEAD, VOCABULARY, LAYERS = 64, 4, 2, 32, 512, 3
INNER, WINDOW = 160, 6
LAYER = "model.layers.*"
EVEN, ODD = "attn_layers.layers.[024]", "attn_layers.layers.[135]"  # attention, feed-forward
NEEDED = ("einops", "einx", "frozendict", "loguru", "torch_einops_utils")


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        sliding_window=WINDOW,
        initializer_range=0.12,
        max_position_embeddings=128,
        rms_norm_eps=1e-12,  # the port has none
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return spread(transformers.MistralForCausalLM(config), seed)


# -- the port ------------------------------------------------------------------------------------


def source() -> Path:
    packages.found(*NEEDED)
    return packages.file("x_transformers", "x_transformers.py")


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "dim": WIDTH,
        "depth": LAYERS,
        "heads": HEADS,
        "attn_dim_head": HEAD,
        "attn_kv_heads": GROUPS,
        "attn_flash": True,
        "attn_max_attend_past": WINDOW - 1,
        "rotary_pos_emb": True,
        "rotary_emb_dim": HEAD,
        "use_rmsnorm": True,
        "ff_glu": True,
        "ff_swish": True,
        "ff_no_bias": True,
        "ff_mult": INNER / WIDTH,
    }
    return code.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=128,
        use_abs_pos_emb=False,
        attn_layers=code.Decoder(**{**given, **settings}),
    )


def convert(hf: Model) -> State:
    """Return the weights under the names of x-transformers."""
    given = hf.state_dict()
    state = {
        "token_emb.emb.weight": given["model.embed_tokens.weight"],
        "to_logits.weight": given["lm_head.weight"],
        "attn_layers.final_norm.g": given["model.norm.weight"] - 1,  # it adds the one
    }
    for n in range(LAYERS):
        old, a, f = f"model.layers.{n}", f"attn_layers.layers.{2 * n}", feed_forward(n)
        state[f"{a}.0.0.g"] = given[f"{old}.input_layernorm.weight"] - 1
        state[f"{f}.0.0.g"] = given[f"{old}.post_attention_layernorm.weight"] - 1
        for part, heads in (("q", HEADS), ("k", GROUPS)):
            weight = given[f"{old}.self_attn.{part}_proj.weight"]
            rows = torch.arange(len(weight)).view(heads, 2, -1).transpose(1, 2).flatten()
            state[f"{a}.1.to_{part}.weight"] = weight[rows]  # RoPE is interleaved
        state[f"{a}.1.to_v.weight"] = given[f"{old}.self_attn.v_proj.weight"]
        state[f"{a}.1.to_out.weight"] = given[f"{old}.self_attn.o_proj.weight"]
        heads_in_turn(state, a)
        up, gate = (given[f"{old}.mlp.{name}_proj.weight"] for name in ("up", "gate"))
        state[f"{f}.1.ff.0.proj.weight"] = torch.cat([up, gate])
        state[f"{f}.1.ff.0.proj.bias"] = torch.zeros(2 * INNER)
        state[f"{f}.1.ff.2.weight"] = given[f"{old}.mlp.down_proj.weight"]
    return state


def feed_forward(n: int) -> str:
    return f"attn_layers.layers.{2 * n + 1}"


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
    for last in range(ids.shape[1] - DECODE, ids.shape[1] + 1):
        out, cache = model(ids[:, :last], cache=cache, return_intermediates=True)
        logits.append(out)
    return logits


# -- changes of weights --------------------------------------------------------------------------


def each(change: Callable[[State, str, str], None]) -> Callable[[State], None]:
    """Return what changes each layer's weights. ``change(state, attention's, feed-forward's)``."""

    def apply(state: State) -> None:
        for n in range(LAYERS):
            change(state, f"attn_layers.layers.{2 * n}", feed_forward(n))

    return apply


def by_halves(state: State, attention: str, _: str) -> None:
    for part, heads in (("q", HEADS), ("k", GROUPS)):
        name = f"{attention}.1.to_{part}.weight"
        rows = torch.arange(len(state[name])).view(heads, -1, 2).transpose(1, 2).flatten()
        state[name] = state[name][rows]


def heads_in_groups(state: State, attention: str, _: str) -> None:
    heads_in_turn(state, attention, IN_TURN.argsort())


def gate_first(state: State, _: str, forward: str) -> None:
    name = f"{forward}.1.ff.0.proj.weight"
    state[name] = torch.cat(state[name].chunk(2)[::-1])


def v_heads(state: State, attention: str, _: str) -> None:
    name = f"{attention}.1.to_v.weight"
    state[name] = torch.cat(state[name].chunk(GROUPS)[::-1])


def one_twice(state: State) -> None:
    for name in state:
        if name.endswith(".g"):
            state[name] += 1


def last_norm_left(state: State) -> None:
    state["attn_layers.final_norm.g"].zero_()


def layer_before(state: State) -> None:
    name = "attn_layers.layers.{}.1.to_out.weight"
    state[name.format(4)] = state[name.format(2)].clone()


def head_tied(state: State) -> None:
    state["to_logits.weight"] = state["token_emb.emb.weight"].clone()


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (f"{EVEN}.1", f"{LAYER}.self_attn")
ATTEND = (f"{EVEN}.1.attend", *ATTENTION, "model")
NORMS = (
    "attn_layers.layers.*.0.0", "attn_layers.final_norm",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
ROTATED = "(t * freqs.cos() * scale) + (rotate_half(t) * freqs.sin() * scale)"
BUGS = (
    Bug(
        "rope_layout",
        "q and k keep the order of RoPE by halves",
        convert=each(by_halves),
        modules=(f"{EVEN}.1.to_[qk]", f"{LAYER}.self_attn.[qk]_proj"),
    ),
    Bug(
        "heads_in_groups",
        "query heads keep their order, by key head",
        convert=each(heads_in_groups),
        modules=(
            f"{EVEN}.1.to_q",
            f"{EVEN}.1.to_out",
            f"{LAYER}.self_attn.q_proj",
            f"{LAYER}.self_attn.o_proj",
        ),
    ),
    Bug(
        "gate_first",
        "gate and up are fused in the wrong order",
        convert=each(gate_first),
        modules=(f"{ODD}.1.ff.0.proj", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    ),
    Bug(
        "v_heads",
        "the value heads are in another order",
        convert=each(v_heads),
        modules=(f"{EVEN}.1.to_v", f"{LAYER}.self_attn.v_proj"),
    ),
    Bug("one_twice", "norm weights are stored with the one", convert=one_twice, modules=NORMS),
    Bug(
        "last_norm_left",
        "the last norm is not loaded",
        convert=last_norm_left,
        modules=("attn_layers.final_norm", "model.norm"),
    ),
    Bug(
        "layer_off",
        "an output projection is that of the layer before",
        convert=layer_before,
        modules=("attn_layers.layers.4.1.to_out", "model.layers.2.self_attn.o_proj"),
    ),
    Bug(
        "head_tied",
        "the head has the embedding's weight",
        convert=head_tied,
        modules=("to_logits", "lm_head"),
    ),
    Bug(
        "window_one_wider",
        "the sliding window holds one token more",
        settings={"attn_max_attend_past": WINDOW},
        modules=ATTEND,
    ),
    Bug(
        "no_window",
        "there is no sliding window",
        settings={"attn_max_attend_past": None},
        modules=ATTEND,
    ),
    Bug(
        "rope_base",
        "the base of RoPE is another one",
        settings={"rotary_base_rescale_factor": 4.0},
        modules=("attn_layers.rotary_pos_emb", "model.rotary_emb"),
    ),
    Bug(
        "heads_split",
        "the heads of the keys are split the other way",
        "self.split_k_heads = Rearrange('b n (h d) -> b h n d', d = dim_head)",
        "self.split_k_heads = Rearrange('b n (d h) -> b h n d', d = dim_head)",
        modules=(f"{EVEN}.1.split_k_heads", f"{LAYER}.self_attn"),
        early=True,
    ),
    Bug(
        "rotate_sign",
        "RoPE turns the other way",
        "x = stack((-x2, x1), dim = -1)",
        "x = stack((x2, -x1), dim = -1)",
        modules=ATTENTION,
    ),
    Bug(
        "query_position",
        "queries take the angles of the first positions",
        "freqs = freqs[:, -seq_len:, :]",
        "freqs = freqs[:, :seq_len, :]",
        modules=ATTENTION,
    ),
    Bug(
        "cos_left",
        "the part that is turned is not multiplied by the cosine",
        ROTATED,
        ROTATED.replace("(t * freqs.cos() * scale)", "(t * scale)"),
        modules=ATTENTION,
    ),
)

PORTS = (
    Port(
        "x-transformers",
        source,
        original,
        make,
        convert,
        decode,
        work,
        llama_norms,
        BUGS,
        package="x_transformers",
        missing=partial(packages.missing, "x_transformers", *NEEDED),
    ),
)
