"""Cohere 2 with flat tokens, ring buffers and fused projections, against Hugging Face's."""

from __future__ import annotations

from ports.made import SMALLER, written
from ports.weights import norms_of

SETTINGS = SMALLER | {
    "num_hidden_layers": 4,  # three local ones and one that sees everything
    "num_attention_heads": 8, "intermediate_size": 112, "max_position_embeddings": 256,
    "sliding_window": 6, "logit_scale": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}  # fmt: skip
NAMES = {
    "tok": "model.embed_tokens",
    "norm.gain": "model.norm.weight",
    "blocks.*.norm.gain": "model.layers.*.input_layernorm.weight",
    "blocks.*.attn.wqkv": "model.layers.*.self_attn.{q,k,v}_proj",
    "blocks.*.attn.wo": "model.layers.*.self_attn.o_proj",
    "blocks.*.ffn.w13": "model.layers.*.mlp.{gate,up}_proj",
    "blocks.*.ffn.w2": "model.layers.*.mlp.down_proj",
}
# the head is the embedding too
norms = norms_of("model.layers", {"input_layernorm": "self_attn.{q,k,v}_proj mlp.{gate,up}_proj"})
LAYER = "model.layers.*"
ATTENTION = ("blocks.*.attn", f"{LAYER}.self_attn")
BUGS = r"""
window_too_wide: a local layer sees one token more than its window
    - (ago < self.window)
    + (ago <= self.window)
    in model $ATTENTION
    also p = scores.masked_fill(~seen
rope_everywhere: the layer that sees everything gets rotary embeddings too
    -         if self.local:
    -             q, k = swirl(
    +         q, k = swirl(
    in $ATTENTION
rope_base_of_llama: rotary embeddings have the base of Llama
    - self.theta = cfg.rope_parameters["rope_theta"]
    + self.theta = 10000.0
    in model.rotary_emb $ATTENTION
    early
values_one_slot_off: values are remembered in the slot after that of their keys
    - self.v[slot] = v.float()
    + self.v[(slot + 1) % self.slots] = v.float()
    in $ATTENTION
    also values = torch.cat((self.v
    also return self.wo(torch.einsum("gmts,sgd->tgmd"
block_in_sequence: the MLP takes the norm of what attention gave, not of the layer's input
    - return x + (a + self.ffn(h))
    + return x + (a + self.ffn(self.norm(x + a)))
    in blocks.* blocks.*.norm blocks.*.ffn $LAYER $LAYER.mlp
gate_and_up_swapped: the converter fuses the linear part before the gate, in layer 2
    weights each(lambda w: w.roll(len(w) // 2, 0), "blocks.2.ffn.w13.weight")
    in blocks.2.ffn.w13 model.layers.2.mlp.[gu]*_proj
"""
PORTS = (written(globals(), "command", "Command", "Cohere2ForCausalLM", length=20),)
