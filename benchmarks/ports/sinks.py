"""gpt-oss as an engine with slots written in place and sorted experts, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model, State
from ports.written import written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,  # a window, everything, a window
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 1.25,  # some gates and many linear parts are beyond it
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}
LAYERS = range(SETTINGS["num_hidden_layers"])


def with_biases(hf: Model) -> Model:
    """Give the experts the biases of trained ones: they are zero at first."""
    generator = torch.Generator().manual_seed(3000)
    with torch.no_grad():
        for layer in hf.model.layers:
            experts = layer.mlp.experts
            for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
                bias.add_(0.2 * torch.randn(bias.shape, generator=generator))
    return hf


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms; the experts' weights have the input channels on axis 1."""
    for layer in hf.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        experts = m.experts.gate_up_proj.detach().transpose(1, 2)
        yield layer.post_attention_layernorm, [m.router, experts]
    yield hf.model.norm, [hf.lm_head]


def left_interleaved(state: State) -> None:
    """Leave gates and linear parts in turns, as the checkpoint has them."""
    for n in LAYERS:
        for name in (f"layers.{n}.moe.w13", f"layers.{n}.moe.b13"):
            gates, linear = state[name].chunk(2, dim=1)
            state[name] = torch.stack((gates, linear), dim=2).flatten(1, 2)


LAYER = "model.layers.*"
ATTENTION = ("layers.*.attn", f"{LAYER}.self_attn")
BUGS = (
    Bug(
        "sinks_forgotten",
        "the sinks take no part of the probability",
        old=" + (sink - top).exp()",
        new="",
        modules=ATTENTION,
        golden=(f"{LAYER}.self_attn/Torch.cat*@eager_attention_forward",),
    ),
    Bug(
        "window_one_wide",
        "while decoding, a layer with a window reads one slot too many",
        old="first = max(0, start + 1 - self.window)",
        new="first = max(0, start - self.window)",
        modules=ATTENTION,
        also=("keys, values = slots.keys", "scores = torch.einsum("),
    ),
    Bug(
        "shares_not_summed_to_one",
        "the shares of the chosen experts are those among all experts",
        old="        share = share / share.sum(dim=-1, keepdim=True)\n",
        new="",
        modules=("layers.*.moe", f"{LAYER}.mlp.router"),
        also=("share, chosen = ", "return (y * share"),
    ),
    Bug(
        "linear_part_as_it_is",
        "the linear part of the gated activation is not raised by one",
        old="* (up + 1)",
        new="* up",
        modules=("layers.*.moe", f"{LAYER}.mlp.experts"),
        golden=(f"{LAYER}.mlp.experts/Tensor.add*@_apply_gate",),
    ),
    Bug(
        "left_interleaved",
        "the converter leaves the experts' gates and linear parts in turns",
        convert=left_interleaved,
        modules=("layers.*.moe", f"{LAYER}.mlp.experts"),
    ),
    Bug(
        "not_concentrated",
        "cosines and sines lack the factor of long contexts",
        old="return angle.cos() * self.concentration, angle.sin() * self.concentration",
        new="return angle.cos(), angle.sin()",
        modules=("rope", "model.rotary_emb"),
    ),
)
PORTS = (
    written(
        "sinks",
        "Engine",
        "GptOss",
        SETTINGS,
        BUGS,
        norms=norms,
        change=with_biases,
        length=20,
    ),
)
