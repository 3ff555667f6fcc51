"""Mistakes in how a model was converted to a GGUF file.

`UNSEEN` is not to be looked at while the comparison is changed: it says how that does on bugs that
it has not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ports.entry import Bug

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import llamacpp_model as made
from llamacpp_model import Settings, Weights

Change = Callable[[Weights, Settings], None]
NORMS = ("*norm", "self_attn.[qk]_norm")


@dataclass(frozen=True)
class Planted:
    """A bug. ``needs``: weights and settings without which a model can't have it.

    ``golden``: settings of golden's config; the file stays right for the others.
    """

    bug: Bug
    change: Change = field(default=lambda weights, settings: None)
    needs: tuple[str, ...] = ()
    golden: dict[str, Any] = field(default_factory=dict)

    def fits(self, weights: Weights, settings: Settings) -> bool:
        return all(name in weights or name in settings for name in self.needs)


def planted(
    what: str, change: Change | None, modules: tuple[str, ...], *needs: str, **golden: Any
) -> Planted:
    bug = Bug(what, what, modules=modules)
    return Planted(bug, change or (lambda weights, settings: None), needs, golden)


def at(layer: int | str, *modules: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{path}" for path in modules)


def blk(layer: int, name: str) -> str:
    return f"blk.{layer}.{name}.weight"


def changed(how: Callable[[np.ndarray], np.ndarray], *names: str) -> Change:
    def change(weights: Weights, _: Settings) -> None:
        for name in names:
            weights[name] = how(weights[name])

    return change


def swapped(first: str, second: str) -> Change:
    """Swap all weights whose names begin so."""

    def change(weights: Weights, _: Settings) -> None:
        for name in [name for name in weights if name.startswith(first)]:
            other = second + name[len(first) :]
            weights[name], weights[other] = weights[other], weights[name]

    return change


def copied(source: str, target: str) -> Change:
    def change(weights: Weights, _: Settings) -> None:
        weights[target] = weights[source]

    return change


def setting(name: str, value: float | str) -> Change:
    def change(_: Weights, settings: Settings) -> None:
        settings[name] = value

    return change


def linear_scaling(_: Weights, settings: Settings) -> None:
    settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}


def base_times_50(_: Weights, settings: Settings) -> None:
    settings["rope.freq_base"] = float(settings["rope.freq_base"]) * 50


def rows_in_pairs(weights: Weights, _: Settings) -> None:
    """Reorder q and k once more: wrong for either kind of rope."""
    for name in weights:
        if made.heads_of(name):
            weights[name] = made.permuted(weights[name], made.heads_of(name))


def norms_less_one(weights: Weights, _: Settings) -> None:
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = weights[name] - 1


def experts_swapped(weights: Weights, _: Settings) -> None:
    for part in ("gate", "up", "down"):
        name = blk(1, f"ffn_{part}_exps")
        weights[name] = weights[name][[1, 0, 2, 3]]


def halves_swapped(values: np.ndarray) -> np.ndarray:
    return np.roll(values, len(values) // 2, 0)


def heads_in_order(order: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    def reorder(values: np.ndarray) -> np.ndarray:
        return values.reshape(made.HEADS, -1, values.shape[-1])[order].reshape(values.shape)

    return reorder


def second_half_zero(values: np.ndarray) -> np.ndarray:
    return values * (np.arange(len(values)) < len(values) // 2)[:, None]


def expert_twice(values: np.ndarray) -> np.ndarray:
    return values[[0, 1, 3, 3]]


KNOWN = (
    planted(
        "rows of q and k in another order",
        rows_in_pairs,
        at(0, "self_attn", "self_attn.[qk]_proj"),
    ),
    planted("rope base times 50", base_times_50, at(0, "self_attn")),
    planted("positions divided by 2", linear_scaling, at(0, "self_attn")),
    planted(
        "epsilon 1e-2",
        setting("attention.layer_norm_rms_epsilon", 1e-2),
        (*at("*", *NORMS), "model.norm"),
    ),
    planted(
        "head tied to the embedding",
        copied("token_embd.weight", "output.weight"),
        ("lm_head",),
        "output.weight",
    ),
    planted("layers 1 and 2 swapped", swapped("blk.1.", "blk.2."), at(1, "input_layernorm")),
    planted(
        "gate and up of layer 2 swapped",
        swapped("blk.2.ffn_gate.", "blk.2.ffn_up."),
        at(2, "mlp", "mlp.gate_proj", "mlp.up_proj"),
        blk(2, "ffn_gate"),
    ),
    planted(
        "values of layer 1 scaled by 1.5",
        changed(lambda values: values * 1.5, blk(1, "attn_v")),
        at(1, "self_attn", "self_attn.v_proj"),
    ),
    planted(
        "norm of layer 2 less one",
        changed(lambda values: values - 1, blk(2, "attn_norm")),
        at(2, "input_layernorm"),
    ),
    planted(
        "no weight in the last norm",
        changed(np.ones_like, "output_norm.weight"),
        ("model.norm",),
    ),
    planted(
        "key heads of layer 3 swapped",
        changed(halves_swapped, blk(3, "attn_k")),
        at(3, "self_attn", "self_attn.k_proj"),
    ),
    planted(
        "inputs of a down projection reversed",
        changed(lambda values: values[:, ::-1], blk(1, "ffn_down")),
        at(1, "mlp", "mlp.down_proj"),
        blk(1, "ffn_down"),
    ),
    planted(
        "query norm of layer 1 left out",
        changed(np.ones_like, blk(1, "attn_q_norm")),
        at(1, "self_attn.q_norm"),
        blk(1, "attn_q_norm"),
    ),
    planted(
        "one forgotten in all norms",
        norms_less_one,
        at(0, "input_layernorm"),
        "attn_logit_softcapping",
    ),
    planted(
        "embedding scaled by the file, too",
        changed(lambda values: values * made.HIDDEN**0.5, "token_embd.weight"),
        ("model.embed_tokens", ""),  # its values are right; the graph's own scale is one too many
        "attn_logit_softcapping",
    ),
    planted(
        "cap of the logits left out",
        setting("final_logit_softcapping", 30.0),
        ("",),
        "final_logit_softcapping",
    ),
    planted(
        "experts 0 and 1 of layer 1 swapped",
        experts_swapped,
        at(1, "mlp", "mlp.experts"),
        blk(1, "ffn_gate_exps"),
    ),
    planted(
        "rows of the router of layer 2 in another order",
        changed(lambda values: values[[2, 0, 3, 1]], blk(2, "ffn_gate_inp")),
        at(2, "mlp.gate"),
        blk(2, "ffn_gate_inp"),
    ),
    planted(
        "gate and up of the experts of layer 2 swapped",
        swapped("blk.2.ffn_gate_exps.", "blk.2.ffn_up_exps."),
        at(2, "mlp", "mlp.experts"),
        blk(2, "ffn_gate_exps"),
    ),
    planted(
        "gate of the shared expert of layer 1 negated",
        changed(lambda values: -values, blk(1, "ffn_gate_inp_shexp")),
        at(1, "mlp.shared_expert_gate"),
        blk(1, "ffn_gate_inp_shexp"),
    ),
)
UNSEEN = (
    planted(
        "bias of the queries of layer 1 left out",
        changed(np.zeros_like, "blk.1.attn_q.bias"),
        at(1, "self_attn", "self_attn.q_proj"),
        "blk.1.attn_q.bias",
    ),
    planted(
        "output projection of layer 2 transposed",
        changed(lambda values: values.T, blk(2, "attn_output")),
        at(2, "self_attn", "self_attn.o_proj"),
    ),
    planted(
        "norm before the MLP of layer 1 not loaded",
        changed(np.ones_like, blk(1, "ffn_norm")),
        at(1, "post_attention_layernorm", "pre_feedforward_layernorm"),
    ),
    planted(
        "output projection of layer 2 is that of layer 1",
        copied(blk(1, "attn_output"), blk(2, "attn_output")),
        at(2, "self_attn", "self_attn.o_proj"),
    ),
    planted(
        "keys and values of layer 1 swapped",
        swapped("blk.1.attn_k.", "blk.1.attn_v."),
        at(1, "self_attn", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    planted(
        "half of an up projection zero",
        changed(second_half_zero, blk(3, "ffn_up")),
        at(3, "mlp", "mlp.up_proj"),
        blk(3, "ffn_up"),
    ),
    planted(
        "rows of the embedding moved by one",
        changed(lambda values: np.roll(values, 1, 0), "token_embd.weight"),
        ("model.embed_tokens",),
    ),
    planted(
        "rows of the head moved by one",
        changed(lambda values: np.roll(values, 1, 0), "output.weight"),
        ("lm_head",),
        "output.weight",
    ),
    planted(
        "query heads of layer 2 in another order",
        changed(heads_in_order([0, 2, 1, 3]), blk(2, "attn_q")),
        at(2, "self_attn", "self_attn.q_proj"),
    ),
    planted(
        "value heads of layer 3 swapped",
        changed(halves_swapped, blk(3, "attn_v")),
        at(3, "self_attn", "self_attn.v_proj"),
    ),
    planted(
        "norms of q and k of layer 2 swapped",
        swapped("blk.2.attn_q_norm.", "blk.2.attn_k_norm."),
        at(2, "self_attn.q_norm", "self_attn.k_norm"),
        blk(2, "attn_q_norm"),
    ),
    planted(
        "key norm of layer 3 plus one",
        changed(lambda values: values + 1, blk(3, "attn_k_norm")),
        at(3, "self_attn.k_norm"),
        blk(3, "attn_k_norm"),
    ),
    planted(
        "cap of the scores left out",
        setting("attn_logit_softcapping", 50.0),
        at(0, "self_attn"),
        "attn_logit_softcapping",
    ),
    planted(
        "window of 4 tokens for 16",
        setting("attention.sliding_window", 4),
        at(0, "self_attn"),
        "attention.sliding_window",
    ),
    planted(
        "norms before and after the MLP of layer 1 swapped",
        swapped("blk.1.ffn_norm.", "blk.1.post_ffw_norm."),
        at(1, "pre_feedforward_layernorm"),
        blk(1, "post_ffw_norm"),
    ),
    planted(
        "expert 2 of layer 1 has the down projection of another",
        changed(expert_twice, blk(1, "ffn_down_exps")),
        at(1, "mlp", "mlp.experts"),
        blk(1, "ffn_down_exps"),
    ),
    planted(
        "one expert a token for two",
        setting("expert_used_count", 1),
        at(0, "mlp", "mlp.gate", "mlp.experts"),
        "expert_used_count",
    ),
    planted(
        "inputs of the router of layer 1 reversed",
        changed(lambda values: values[:, ::-1], blk(1, "ffn_gate_inp")),
        at(1, "mlp.gate"),
        blk(1, "ffn_gate_inp"),
    ),
    planted(
        "gate and up of the shared expert of layer 2 swapped",
        swapped("blk.2.ffn_gate_shexp.", "blk.2.ffn_up_shexp."),
        at(2, "mlp.shared_expert", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        blk(2, "ffn_gate_shexp"),
    ),
    planted(
        "weights of the experts are not normalised",
        None,
        at(0, "mlp", "mlp.gate", "mlp.experts"),
        blk(0, "ffn_gate_shexp"),
        norm_topk_prob=True,
    ),
)  # fmt: skip
SETS = {"known": KNOWN, "unseen": UNSEEN, "all": KNOWN + UNSEEN}
