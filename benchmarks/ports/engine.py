"""A serving engine's Qwen2: flat tokens, fused weights, residual kept apart, a cache of slots."""

from __future__ import annotations

import torch

from ports.entry import Bug, State
from ports.written import SMALL, each, transpose, written

LAYERS = range(SMALL["num_hidden_layers"])
Q_HEADS, KV_HEADS = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
ATTENTION = "model.layers.*.self_attn"


def grouped(weight: torch.Tensor) -> torch.Tensor:
    """Return fused rows as Megatron orders them: for each group its queries, its key, its value."""
    heads = weight.unflatten(0, (Q_HEADS + 2 * KV_HEADS, -1))
    q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS])
    q = q.unflatten(0, (KV_HEADS, -1))
    return torch.cat((q, k[:, None], v[:, None]), dim=1).flatten(0, 2)


def no_key_bias(state: State) -> None:
    width = state["blocks.0.attention.qkv_proj.bias"].numel() // (Q_HEADS + 2 * KV_HEADS)
    for n in LAYERS:
        bias = state[f"blocks.{n}.attention.qkv_proj.bias"]
        bias[Q_HEADS * width : (Q_HEADS + KV_HEADS) * width] = 0


def norm_before(state: State) -> None:
    state["blocks.2.mlp_norm.weight"] = state["blocks.1.mlp_norm.weight"].clone()


BUGS = (
    Bug(
        "rope_sign",
        "the second half of a head turns the other way",
        old="second * cos + first * sin",
        new="second * cos - first * sin",
        modules=("blocks.*.attention.rotary_emb", ATTENTION),
    ),
    Bug(
        "tiled_keys",
        "key heads are tiled (0, 1, 0, 1), value heads repeated (0, 0, 1, 1)",
        old="keys = keys.repeat_interleave(self.queries_per_kv, dim=1)",
        new="keys = keys.repeat(1, self.queries_per_kv, 1)",
        modules=("blocks.*.attention.attn", ATTENTION),
    ),
    Bug(
        "split_order",
        "the fused projection is split as queries, values, keys",
        old="q, k, v = qkv.split(",
        new="q, v, k = qkv.split(",
        modules=("blocks.*.attention", ATTENTION),
        also=("self.rotate(k, cos, sin)", "self.v_cache[batch.slot_mapping] = v"),
    ),
    Bug(
        "stale_residual",
        "the norm passes the residual on as it was before the addition",
        old="        residual = x\n",
        new="        residual = x if residual is None else residual\n",
        modules=("blocks.*.*_norm", "norm", "model.layers.*"),
        also=("x = x + residual",),
    ),
    Bug(
        "positions_for_slots",
        "keys are written at their positions, not at their slots",
        old="self.k_cache[batch.slot_mapping] = k",
        new="self.k_cache[batch.positions] = k",
        modules=("blocks.*.attention.attn", ATTENTION),
        also=("keys = self.k_cache[batch.context_slots]",),
    ),
    Bug(
        "decode_position",
        "from the first decode step on, positions are one too large",
        old="positions=torch.arange(start, end),",
        new="positions=torch.arange(start, end) + (start > 0),",
        modules=("", "blocks.*.attention.rotary_emb", "model", "model.rotary_emb"),
        early=True,  # the scheduler makes the positions, before the model is called
    ),
    Bug(
        "row_before",
        "logits are computed of the last token but one of the prompt",
        old="sample_rows=torch.tensor([end - start - 1]),",
        new="sample_rows=torch.tensor([end - start - 2]),",
        modules=("", "lm_head"),
        also=("return self.lm_head(hidden[batch.sample_rows])",),
    ),
    Bug(
        "gate_for_up",
        "the activation takes the second half for the gate",
        old="gate, up = x.chunk(2, dim=-1)",
        new="up, gate = x.chunk(2, dim=-1)",
        modules=("blocks.*.mlp.act_fn", "model.layers.*.mlp", "model.layers.*.mlp.act_fn"),
        also=("return F.silu(gate) * up",),
    ),
    Bug(
        "no_key_bias",
        "the converter leaves the biases of the keys out",
        convert=no_key_bias,
        modules=("blocks.*.attention.qkv_proj", f"{ATTENTION}.k_proj"),
    ),
    Bug(
        "grouped_qkv",
        "the fused rows of layer 1 are ordered by group, as Megatron has them",
        convert=each(
            grouped, "blocks.1.attention.qkv_proj.weight", "blocks.1.attention.qkv_proj.bias"
        ),
        modules=("blocks.1.attention.qkv_proj", "model.layers.1.self_attn.[qkv]_proj"),
    ),
    Bug(
        "transposed_output",
        "the square output projection is transposed",
        convert=transpose(*(f"blocks.{n}.attention.o_proj.weight" for n in LAYERS)),
        modules=("blocks.*.attention.o_proj", f"{ATTENTION}.o_proj"),
    ),
    Bug(
        "norm_of_the_layer_before",
        "layer 2 has the norm of layer 1 before its feed-forward part",
        convert=norm_before,
        modules=("blocks.2.mlp_norm", "model.layers.2.post_attention_layernorm"),
    ),
)
PORTS = (written("engine", "QwenEngineModel", "Qwen2", SMALL, BUGS, keep=1, length=19),)
