"""GPT-2 as a file to learn from, which computes the whole text at each step, against HF's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ports.entry import DECODE, Bug, Logits, Model, State
from ports.gptlike import norms
from ports.written import swap, written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 48,
    "initializer_range": 0.15,
    "attn_implementation": "sdpa",
}
LAYERS, WIDTH = range(SETTINGS["n_layer"]), SETTINGS["n_embd"]
LAYER = "transformer.h.*"
ATTENTION = ("h.*.attn", f"{LAYER}.attn")
NORMS = ("h.*.ln_[12]", "ln_f", f"{LAYER}.ln_[12]", "transformer.ln_f")


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    texts = (ids[:, :n] for n in range(ids.shape[1] - DECODE, ids.shape[1] + 1))
    return [model(text, use_cache=False, logits_to_keep=1).logits for text in texts]


def squares_left(state: State) -> None:
    """Leave the transposition out where the matrix is square: no shape complains."""
    for n in LAYERS:
        state[f"h.{n}.attn.c_proj.weight"] = state[f"h.{n}.attn.c_proj.weight"].T.clone()


def query_bias_alone(state: State) -> None:
    for n in LAYERS:
        state[f"h.{n}.attn.c_attn.bias"][WIDTH:] = 0


def layers_reversed(state: State) -> None:
    """Give layers 1 and 2 each other's feed-forward weights."""
    for name in ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"):
        swap(f"h.1.mlp.{name}", f"h.2.mlp.{name}")(state)


BUGS = (
    Bug(
        "squares_left",
        "the square matrices of Conv1D are not transposed",
        convert=squares_left,
        modules=("h.*.attn.c_proj", f"{LAYER}.attn.c_proj"),
    ),
    Bug(
        "query_bias_alone",
        "the biases of keys and values stay zero",
        convert=query_bias_alone,
        modules=("h.*.attn.c_attn", f"{LAYER}.attn.c_attn"),
    ),
    Bug(
        "layers_swapped",
        "layers 1 and 2 have each other's feed-forward weights",
        convert=layers_reversed,
        modules=(
            "h.[12].mlp.c_fc",
            "h.[12].mlp.c_proj",
            "transformer.h.[12].mlp.c_fc",
            "transformer.h.[12].mlp.c_proj",
        ),
    ),
    Bug(
        "keys_first",
        "the fused projection is split as keys, queries, values",
        old="q, k, v = self.c_attn(x).split(self.n_embd, dim=2)",
        new="k, q, v = self.c_attn(x).split(self.n_embd, dim=2)",
        modules=ATTENTION,
        also=("att = (q @ k.transpose(-2, -1))", "k = k.view(", "q = q.view("),
    ),
    Bug(
        "values_not_by_head",
        "the values are laid out with places and heads mixed up",
        old="v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)",
        new="v = v.reshape(B, self.n_head, T, C // self.n_head)",
        modules=ATTENTION,
        also=("y = att @ v",),
    ),
    Bug(
        "heads_not_joined",
        "the heads are joined without the transposition",
        old="y = y.transpose(1, 2).contiguous().view(B, T, C)",
        new="y = y.contiguous().view(B, T, C)",
        modules=ATTENTION,
        also=("self.resid_dropout(self.c_proj(y))",),
    ),
    Bug(
        "masked_with_zero",
        "masked scores are zero",
        old='float("-inf")',
        new="0.0",
        modules=ATTENTION,
    ),
    Bug(
        "scaled_by_width",
        "scores are scaled with the model's width",
        old="(1.0 / math.sqrt(k.size(-1)))",
        new="(1.0 / math.sqrt(C))",
        modules=ATTENTION,
    ),
    Bug(
        "softmax_over_heads",
        "softmax goes over the queries",
        old="att = F.softmax(att, dim=-1)",
        new="att = F.softmax(att, dim=-2)",
        modules=ATTENTION,
    ),
    Bug(
        "gelu_factor",
        "the activation has a digit too few",
        old="0.044715",
        new="0.44715",
        modules=("h.*.mlp.gelu", f"{LAYER}.mlp.act"),
    ),
    Bug(
        "post_norm",
        "the feed-forward part is normalised behind it",
        old="return x + self.mlp(self.ln_2(x))",
        new="return x + self.ln_2(self.mlp(x))",
        modules=("h.*", "h.*.ln_2", LAYER, f"{LAYER}.ln_2"),
    ),
    Bug(
        "not_summed",
        "attention's output replaces its input",
        old="x = x + self.attn(self.ln_1(x))",
        new="x = self.attn(self.ln_1(x))",
        modules=("h.*", LAYER),
    ),
    Bug(
        "places_from_one",
        "places are counted from one",
        old="torch.arange(0, idx.size(1))",
        new="torch.arange(1, idx.size(1) + 1)",
        modules=("", "wpe", "transformer.wpe"),
        also=("self.wpe(pos)",),
    ),
    Bug(
        "no_last_norm",
        "the last norm is left out",
        old="        x = self.ln_f(x)\n",
        new="",
        modules=("", "ln_f", "transformer.ln_f"),
        golden=("transformer.ln_f*",),
        also=("return self.lm_head(",),
    ),
)
PORTS = (
    replace(
        written("small-gpt", "SmallGPT", "GPT2", SETTINGS, BUGS, file="small_gpt", norms=norms),
        golden_work=golden_work,
    ),
)
