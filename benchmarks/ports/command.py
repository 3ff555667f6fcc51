"""Cohere 2 with flat tokens, ring buffers and fused projections, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model
from ports.written import each, written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,  # three local ones and one that sees everything
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "logit_scale": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms of the layers; the head is the embedding too."""
    for layer in hf.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj, m.gate_proj, m.up_proj]


def halves_swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(len(weight) // 2, dims=0)


ATTENTION = ("blocks.*.attn", "model.layers.*.self_attn")
BUGS = (
    Bug(
        "window_too_wide",
        "a local layer sees one token more than its window",
        old="(ago < self.window)",
        new="(ago <= self.window)",
        modules=("model", *ATTENTION),
        also=("p = scores.masked_fill(~seen",),
    ),
    Bug(
        "rope_everywhere",
        "the layer that sees everything gets rotary embeddings too",
        old="        if self.local:\n            q, k = swirl(",
        new="        q, k = swirl(",
        modules=ATTENTION,
    ),
    Bug(
        "rope_base_of_llama",
        "rotary embeddings have the base of Llama",
        old='self.theta = cfg.rope_parameters["rope_theta"]',
        new="self.theta = 10000.0",
        modules=("model.rotary_emb", *ATTENTION),
        early=True,
    ),
    Bug(
        "values_one_slot_off",
        "values are remembered in the slot after that of their keys",
        old="self.v[slot] = v.float()",
        new="self.v[(slot + 1) % self.slots] = v.float()",
        modules=ATTENTION,
        also=("values = torch.cat((self.v", 'return self.wo(torch.einsum("gmts,sgd->tgmd"'),
    ),
    Bug(
        "block_in_sequence",
        "the MLP takes the norm of what attention gave, not of the layer's input",
        old="return x + (a + self.ffn(h))",
        new="return x + (a + self.ffn(self.norm(x + a)))",
        modules=(
            "blocks.*",
            "blocks.*.norm",
            "blocks.*.ffn",
            "model.layers.*",
            "model.layers.*.mlp",
        ),
    ),
    Bug(
        "gate_and_up_swapped",
        "the converter fuses the linear part before the gate, in layer 2",
        convert=each(halves_swapped, "blocks.2.ffn.w13.weight"),
        modules=("blocks.2.ffn.w13", "model.layers.2.mlp.[gu]*_proj"),
    ),
)
PORTS = (written("command", "Command", "Cohere2", SETTINGS, BUGS, norms=norms, length=20),)
