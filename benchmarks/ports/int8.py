"""Llama with int8 weights, against the same function in floats and against what was quantised."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ports.code import int8
from ports.entry import Bug, Model, State
from ports.written import SMALL, each, swap, transpose, written

ATTENTION = ("blocks.*.attn", "model.layers.*.self_attn")
LINEAR = ("blocks.*.attn.?", "blocks.*.mlp.*")
GOLDEN = ("model.layers.*.self_attn.*_proj", "model.layers.*.mlp.*_proj")
LAYERS = range(SMALL["num_hidden_layers"])


def on_the_grid(model: Model) -> Model:
    """Replace the weights of the layers by what their int8 form stands for."""
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                qweight, scales, zeros = int8.quantize(module.weight)
                module.weight.copy_((qweight.float() - zeros[:, None]) * scales[:, None])
    return model


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norm before the head: the other norms' consumers are on the grid."""
    yield model.model.norm, [model.lm_head]


def one_doubled(scales: torch.Tensor) -> torch.Tensor:
    """Double the scale of one channel."""
    scales[11] *= 2
    return scales


def value_of_the_layer_before(state: State) -> None:
    state["blocks.2.attn.v.scales"] = state["blocks.1.attn.v.scales"].clone()


def unsigned(zeros: torch.Tensor) -> torch.Tensor:
    """Return the zeros as those of unsigned weights, wrapped into int8."""
    return (zeros.to(torch.int16) + 128).to(torch.int8)


BUGS = (
    Bug(
        "zeros_dropped",
        "weights are scaled without their zeros",
        old="self.qweight.to(torch.int16) - self.zeros[:, None]",
        new="self.qweight.to(torch.int16)",
        modules=(*LINEAR, *GOLDEN),
        also=("weight = steps * self.scales",),
    ),
    Bug(
        "difference_wraps",
        "zeros are subtracted in int8, which wraps around",
        old="self.qweight.to(torch.int16) - self.zeros[:, None]",
        new="self.qweight - self.zeros[:, None]",
        modules=(*LINEAR, *GOLDEN),
    ),
    Bug(
        "zeros_scaled_alone",
        "the zeros are taken for float ones: weight * scale - zero",
        old="weight = steps * self.scales[:, None]",
        new="weight = self.qweight * self.scales[:, None] - self.zeros[:, None]",
        modules=(*LINEAR, *GOLDEN),
    ),
    Bug(
        "always_causal",
        "a decode step is causal from the top left: it sees the first token",
        old="is_causal=not start",
        new="is_causal=True",
        modules=ATTENTION,
    ),
    Bug(
        "start_late",
        "decode steps stand one position too far",
        old='start = memory["k"].shape[2] if "k" in memory else 0',
        new='start = memory["k"].shape[2] + 1 if "k" in memory else 0',
        modules=(*ATTENTION, "model", "model.rotary_emb"),
        also=("angle = torch.arange(start,",),
    ),
    Bug(
        "sigmoid_alone",
        "the gate is the sigmoid, without its factor",
        old="gate * torch.sigmoid(gate) * self.up(x)",
        new="torch.sigmoid(gate) * self.up(x)",
        modules=("blocks.*.mlp", "model.layers.*.mlp", "model.layers.*.mlp.act_fn"),
        golden=("model.layers.*.mlp.act_fn/Functional.silu",),
    ),
    Bug(
        "channel_scale_doubled",
        "one output channel of layer 1 has twice its scale",
        convert=each(one_doubled, "blocks.1.mlp.down.scales"),
        modules=("blocks.1.mlp.down", "model.layers.1.mlp.down_proj"),
    ),
    Bug(
        "scales_swapped",
        "gate and up of layer 0 have each other's scales",
        convert=swap("blocks.0.mlp.gate.scales", "blocks.0.mlp.up.scales"),
        modules=("blocks.0.mlp.gate", "blocks.0.mlp.up", "model.layers.0.mlp.[gu]*_proj"),
    ),
    Bug(
        "scales_shifted",
        "the scales of a query projection are shifted by one channel",
        convert=each(lambda scales: scales.roll(1), "blocks.2.attn.q.scales"),
        modules=("blocks.2.attn.q", "model.layers.2.self_attn.q_proj"),
    ),
    Bug(
        "scales_of_the_layer_before",
        "the values of layer 2 have the scales of layer 1",
        convert=value_of_the_layer_before,
        modules=("blocks.2.attn.v", "model.layers.2.self_attn.v_proj"),
    ),
    Bug(
        "unsigned_zeros",
        "the zeros of layer 1's keys are those of unsigned weights",
        convert=each(unsigned, "blocks.1.attn.k.zeros"),
        modules=("blocks.1.attn.k", "model.layers.1.self_attn.k_proj"),
    ),
    Bug(
        "transposed",
        "the square output projection is transposed, its scales are not",
        convert=transpose(*(f"blocks.{n}.attn.o.qweight" for n in LAYERS)),
        modules=("blocks.*.attn.o", "model.layers.*.self_attn.o_proj"),
    ),
)
GIVEN = {"file": "int8", "keep": 1, "length": 16, "norms": norms}
PORTS = (
    written("int8", "Int8Llama", "Llama", SMALL, BUGS, change=on_the_grid, **GIVEN),
    # A step is about 7 / 255 standard deviations of a row: its rounding leaves 0.8 % (7 / 255 /
    # sqrt(12)) in what each of 21 projections gives, so up to 0.8 % * sqrt(21) = 4 % in the logits,
    # and a bit more as attention amplifies it.
    written("int8_of_float", "Int8Llama", "Llama", SMALL, BUGS, error=0.05, **GIVEN),
)
