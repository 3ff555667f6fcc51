"""Llama with int8 weights, against the same function in floats and against what was quantised."""

from __future__ import annotations

from functools import partial

import torch

from ports.code.int8 import quantize
from ports.made import SMALL, written
from ports.steps import last_token
from ports.weights import Model, State, hugging_face, norms_of, renamed

LAYER = "model.layers.*"
ATTENTION = ("blocks.*.attn", f"{LAYER}.self_attn")
LINEAR = ("blocks.*.attn.?", "blocks.*.mlp.*", f"{LAYER}.self_attn.*_proj", f"{LAYER}.mlp.*_proj")
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks.*.norm_{a,m}": "model.layers.*.{input,post_attention}_layernorm",
}
PROJECTIONS = {
    "blocks.*.attn.{q,k,v,o}": "model.layers.*.self_attn.{q,k,v,o}_proj.weight",
    "blocks.*.mlp.{gate,up,down}": "model.layers.*.mlp.{gate,up,down}_proj.weight",
}
norms = norms_of(last={"model.norm": "lm_head"})  # the other norms' consumers are on the grid


def convert(hf: Model) -> State:
    """Return the weights, those of the layers' linear parts as int8."""
    state = renamed(hf.state_dict(), NAMES)
    for name, weight in renamed(hf.state_dict(), PROJECTIONS).items():
        parts = zip(("qweight", "scales", "zeros"), quantize(weight), strict=True)
        state |= {f"{name}.{part}": tensor for part, tensor in parts}
    return state


def on_the_grid(model: Model) -> None:
    """Replace the weights of the layers by what their int8 form stands for."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            qweight, scales, zeros = quantize(module.weight)
            module.weight.copy_((qweight.float() - zeros[:, None]) * scales[:, None])


def one_doubled(scales: torch.Tensor) -> torch.Tensor:
    """Double the scale of one channel."""
    scales[11] *= 2
    return scales


def unsigned(zeros: torch.Tensor) -> torch.Tensor:
    """Return the zeros as those of unsigned weights, wrapped into int8."""
    return (zeros.to(torch.int16) + 128).to(torch.int8)


BUGS = r"""
zeros_dropped: weights are scaled without their zeros
    - self.qweight.to(torch.int16) - self.zeros[:, None]
    + self.qweight.to(torch.int16)
    in $LINEAR
    also weight = steps * self.scales
difference_wraps: zeros are subtracted in int8, which wraps around
    - self.qweight.to(torch.int16) - self.zeros[:, None]
    + self.qweight - self.zeros[:, None]
    in $LINEAR
zeros_scaled_alone: the zeros are taken for float ones: weight * scale - zero
    - weight = steps * self.scales[:, None]
    + weight = self.qweight * self.scales[:, None] - self.zeros[:, None]
    in $LINEAR
always_causal: a decode step is causal from the top left: it sees the first token
    - is_causal=not start
    + is_causal=True
    in $ATTENTION
start_late: decode steps stand one position too far
    - start = memory["k"].shape[2] if "k" in memory else 0
    + start = memory["k"].shape[2] + 1 if "k" in memory else 0
    in $ATTENTION model model.rotary_emb
    also angle = torch.arange(start,
sigmoid_alone: the gate is the sigmoid, without its factor
    - gate * torch.sigmoid(gate) * self.up(x)
    + torch.sigmoid(gate) * self.up(x)
    in blocks.*.mlp $LAYER.mlp $LAYER.mlp.act_fn
    golden $LAYER.mlp.act_fn/Functional.silu
channel_scale_doubled: one output channel of layer 1 has twice its scale
    weights each(one_doubled, "blocks.1.mlp.down.scales")
    in blocks.1.mlp.down model.layers.1.mlp.down_proj
scales_swapped: gate and up of layer 0 have each other's scales
    weights swap("blocks.0.mlp.gate.scales", "blocks.0.mlp.up.scales")
    in blocks.0.mlp.gate blocks.0.mlp.up model.layers.0.mlp.[gu]*_proj
scales_shifted: the scales of a query projection are shifted by one channel
    weights each(lambda scales: scales.roll(1), "blocks.2.attn.q.scales")
    in blocks.2.attn.q model.layers.2.self_attn.q_proj
scales_of_the_layer_before: the values of layer 2 have the scales of layer 1
    weights copy("blocks.2.attn.v.scales", "blocks.1.attn.v.scales")
    in blocks.2.attn.v model.layers.2.self_attn.v_proj
unsigned_zeros: the zeros of layer 1's keys are those of unsigned weights
    weights each(unsigned, "blocks.1.attn.k.zeros")
    in blocks.1.attn.k model.layers.1.self_attn.k_proj
transposed: the square output projection is transposed, its scales are not
    weights transpose("blocks.*.attn.o.qweight")
    in blocks.*.attn.o $LAYER.self_attn.o_proj
"""
port = partial(
    written, globals(), model="Int8Llama", file="int8", golden_work=last_token, length=16
)
PORTS = (
    port("int8", original=hugging_face("LlamaForCausalLM", SMALL, change=on_the_grid)),
    # A step is about 7 / 255 standard deviations of a row: its rounding leaves 0.8 % (7 / 255 /
    # sqrt(12)) in what each of 21 projections gives, so up to 0.8 % * sqrt(21) = 4 % in the logits,
    # and a bit more as attention amplifies it.
    port("int8_of_float", original=hugging_face("LlamaForCausalLM", SMALL), error=0.05),
)
