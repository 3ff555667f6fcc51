"""gpt-oss as an engine with slots written in place and sorted experts, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ports.made import written
from ports.weights import Model, State, each, hugging_face, renamed

ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
SETTINGS = {
    "vocab_size": 512, "hidden_size": 64,
    "num_hidden_layers": 3,  # a window, everything, a window
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
    "swiglu_limit": 1.25,  # some gates and many linear parts are beyond it
    "rope_parameters": ROPE, "initializer_range": 0.12, "attn_implementation": "eager",
}  # fmt: skip
NAMES = {
    "embed": "model.embed_tokens",
    "norm.gain": "model.norm.weight",
    "head": "lm_head",
    "layers.*.norm{1,2}.gain": "model.layers.*.{input,post_attention}_layernorm.weight",
    "layers.*.attn.qkv": "model.layers.*.self_attn.{q,k,v}_proj",
    "layers.*.attn.{out,sinks}": "model.layers.*.self_attn.{o_proj,sinks}",
    "layers.*.moe.router": "model.layers.*.mlp.router",
    "layers.*.moe.{w13,w2}": "model.layers.*.mlp.experts.{gate_up_proj,down_proj}",
    "layers.*.moe.{b13,b2}": "model.layers.*.mlp.experts.{gate_up_proj_bias,down_proj_bias}",
}


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    each(lambda weight: weight.transpose(1, 2), "layers.*.moe.{w13,w2}")(state)
    # gates are the even rows, on axis 1
    gate_first = each(lambda w: torch.cat((w[:, 0::2], w[:, 1::2]), 1), "layers.*.moe.{w13,b13}")
    gate_first(state)
    return state


def with_biases(hf: Model) -> None:
    """Give the experts the biases of trained ones: they are zero at first."""
    generator = torch.Generator().manual_seed(3000)
    for layer in hf.model.layers:
        experts = layer.mlp.experts
        for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
            bias.add_(0.2 * torch.randn(bias.shape, generator=generator))


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms; the experts' weights have the input channels on axis 1."""
    for layer in hf.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        experts = m.experts.gate_up_proj.detach().transpose(1, 2)
        yield layer.post_attention_layernorm, [m.router, experts]
    yield hf.model.norm, [hf.lm_head]


def in_turns(fused: torch.Tensor) -> torch.Tensor:
    """Leave gates and linear parts in turns, as the checkpoint has them."""
    return torch.stack(fused.chunk(2, dim=1), dim=2).flatten(1, 2)


original = hugging_face("GptOssForCausalLM", SETTINGS, change=with_biases)
LAYER = "model.layers.*"
ATTENTION = ("layers.*.attn", f"{LAYER}.self_attn")
BUGS = r"""
sinks_forgotten: the sinks take no part of the probability
    -  + (sink - top).exp()
    +
    in $ATTENTION
    golden $LAYER.self_attn/Torch.cat*@eager_attention_forward
window_one_wide: while decoding, a layer with a window reads one slot too many
    - first = max(0, start + 1 - self.window)
    + first = max(0, start - self.window)
    in $ATTENTION
    also keys, values = slots.keys
    also scores = torch.einsum(
shares_not_summed_to_one: the shares of the chosen experts are those among all experts
    -         share = share / share.sum(dim=-1, keepdim=True)
    in layers.*.moe $LAYER.mlp.router
    also share, chosen =
    also return (y * share
linear_part_as_it_is: the linear part of the gated activation is not raised by one
    - * (up + 1)
    + * up
    in layers.*.moe $LAYER.mlp.experts
    golden $LAYER.mlp.experts/Tensor.add*@_apply_gate
left_interleaved: the converter leaves the experts' gates and linear parts in turns
    weights each(in_turns, "layers.*.moe.{w13,b13}")
    in layers.*.moe $LAYER.mlp.experts
not_concentrated: cosines and sines lack the factor of long contexts
    - return angle.cos() * self.concentration, angle.sin() * self.concentration
    + return angle.cos(), angle.sin()
    in rope model.rotary_emb
"""
PORTS = (written(globals(), "sinks", "Engine", length=20),)
