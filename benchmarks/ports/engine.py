"""A serving engine's Qwen2: flat tokens, fused weights, residual kept apart, a cache of slots."""

from __future__ import annotations

from ports.made import SMALL, written
from ports.steps import last_token

SETTINGS = SMALL
LAYER = "model.layers.*"
ATTENTION = f"{LAYER}.self_attn"
OWN = "blocks.*.attention"
BY_GROUP = (0, 1, 2, 6, 8, 3, 4, 5, 7, 9)  # of each group its queries, its key, its value
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "blocks.*.attention.qkv_proj": "model.layers.*.self_attn.{q,k,v}_proj",
    "blocks.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "blocks.*.mlp.gate_up_proj": "model.layers.*.mlp.{gate,up}_proj",
    "blocks.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "blocks.*.{attention,mlp}_norm": "model.layers.*.{input,post_attention}_layernorm",
}


BUGS = r"""
rope_sign: the second half of a head turns the other way
    - second * cos + first * sin
    + second * cos - first * sin
    in $OWN.rotary_emb $ATTENTION
tiled_keys: key heads are tiled (0, 1, 0, 1), value heads repeated (0, 0, 1, 1)
    - keys = keys.repeat_interleave(self.queries_per_kv, dim=1)
    + keys = keys.repeat(1, self.queries_per_kv, 1)
    in $OWN.attn $ATTENTION
split_order: the fused projection is split as queries, values, keys
    - q, k, v = qkv.split(
    + q, v, k = qkv.split(
    in $OWN $ATTENTION
    also self.rotate(k, cos, sin)
    also self.v_cache[batch.slot_mapping] = v
stale_residual: the norm passes the residual on as it was before the addition
    -         residual = x
    +         residual = x if residual is None else residual
    in blocks.*.*_norm norm $LAYER
    also x = x + residual
positions_for_slots: keys are written at their positions, not at their slots
    - self.k_cache[batch.slot_mapping] = k
    + self.k_cache[batch.positions] = k
    in $OWN.attn $ATTENTION
    also keys = self.k_cache[batch.context_slots]
decode_position: from the first decode step on, positions are one too large
    - positions=torch.arange(start, end),
    + positions=torch.arange(start, end) + (start > 0),
    in (root) $OWN.rotary_emb model model.rotary_emb
    early
row_before: logits are computed of the last token but one of the prompt
    - sample_rows=torch.tensor([end - start - 1]),
    + sample_rows=torch.tensor([end - start - 2]),
    in (root) lm_head
    also return self.lm_head(hidden[batch.sample_rows])
gate_for_up: the activation takes the second half for the gate
    - gate, up = x.chunk(2, dim=-1)
    + up, gate = x.chunk(2, dim=-1)
    in blocks.*.mlp.act_fn $LAYER.mlp $LAYER.mlp.act_fn
    also return F.silu(gate) * up
no_key_bias: the converter leaves the biases of the keys out
    weights each(lambda b: zeroed(b, 96, 128), "blocks.*.attention.qkv_proj.bias")
    in $OWN.qkv_proj $ATTENTION.k_proj
grouped_qkv: the fused rows of layer 1 are ordered by group, as Megatron has them
    weights each(lambda w: reordered(w, BY_GROUP), "blocks.1.attention.qkv_proj")
    in blocks.1.attention.qkv_proj model.layers.1.self_attn.[qkv]_proj
transposed_output: the square output projection is transposed
    weights transpose("blocks.*.attention.o_proj.weight")
    in $OWN.o_proj $ATTENTION.o_proj
norm_of_the_layer_before: layer 2 has the norm of layer 1 before its feed-forward part
    weights copy("blocks.2.mlp_norm", "blocks.1.mlp_norm")
    in blocks.2.mlp_norm model.layers.2.post_attention_layernorm
"""
PORTS = (
    written(
        globals(),
        "engine",
        "QwenEngineModel",
        "Qwen2ForCausalLM",
        golden_work=last_token,
        length=19,
    ),
)
