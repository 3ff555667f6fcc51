"""DeepSeek-V3 with absorbed up-projections and a cache of latents, against Hugging Face's."""

from __future__ import annotations

import torch

from ports.made import SMALLER, written
from ports.weights import Model, State, hugging_face, norms_of, renamed

HEADS = 4
SETTINGS = SMALLER | {
    "num_key_value_heads": HEADS, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64,
}  # fmt: skip
A = "model.layers.*.self_attn"
NAMES = {
    "embed": "model.embed_tokens",
    "norm.gain": "model.norm.weight",
    "head": "lm_head",
    "blocks.*.{attn,ffn}_norm.gain": "model.layers.*.{input,post_attention}_layernorm.weight",
    "blocks.*.attn.{wq_a,wq_b}": f"{A}.{{q_a_proj,q_b_proj}}",
    "blocks.*.attn.{wkv_a,wo}": f"{A}.{{kv_a_proj_with_mqa,o_proj}}",
    "blocks.*.attn.{q,kv}_norm.gain": f"{A}.{{q,kv}}_a_layernorm.weight",
    "blocks.*.ffn.{w1,w2,w3}": "model.layers.*.mlp.{gate_proj,down_proj,up_proj}",
    "blocks.*.ffn.gate.weight": "model.layers.*.mlp.gate.weight",
    "blocks.*.ffn.gate.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blocks.*.ffn.shared.{w1,w2,w3}": "model.layers.*.mlp.shared_experts.{gate,down,up}_proj",
}
norms = norms_of(
    "model.layers",
    {
        "input_layernorm": "self_attn.{q_a_proj,kv_a_proj_with_mqa}",
        "self_attn.q_a_layernorm": "self_attn.q_b_proj",
        "self_attn.kv_a_layernorm": "self_attn.kv_b_proj",
        "post_attention_layernorm": "mlp.{gate,experts.gate_up_proj,gate_proj,up_proj}"
        " mlp.shared_experts.{gate,up}_proj",
    },
    {"model.norm": "lm_head"},
)
LAYER = "model.layers.*"
ATTENTION = ("blocks.*.attn", f"{LAYER}.self_attn")
GATE = ("blocks.*.ffn.gate", f"{LAYER}.mlp.gate")


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    for n, layer in enumerate(hf.model.layers):
        up = layer.self_attn.kv_b_proj.weight
        state[f"blocks.{n}.attn.wkv_b"] = up.unflatten(0, (HEADS, -1))
        if hasattr(layer.mlp, "experts"):
            new, experts = f"blocks.{n}.ffn", layer.mlp.experts
            state[f"{new}.w1"], state[f"{new}.w3"] = experts.gate_up_proj.chunk(2, dim=1)
            state[f"{new}.w2"] = experts.down_proj
    return state


def with_correction(model: Model) -> None:
    """Give the routers a correction bias, which a model without training has not."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def by_kind(weight: torch.Tensor) -> torch.Tensor:
    """Return the up-projection as if all keys came before all values."""
    keys = weight.flatten(0, 1)
    rows = torch.stack(keys.split(keys.shape[0] // (2 * HEADS)))
    return rows.unflatten(0, (2, HEADS)).transpose(0, 1).flatten(1, 2)


original = hugging_face("DeepseekV3ForCausalLM", SETTINGS, change=with_correction)
BUGS = r"""
latent_not_normed: latents are cached without their norm
    -         latent = self.kv_norm(latent)
    in $ATTENTION blocks.*.attn.kv_norm $A.kv_a_layernorm
    golden $A.kv_a_layernorm*
    also self.latents[start:end] = latent
values_first: the up-projection is split as values, then keys
    - up_k, up_v = self.wkv_b[:, : self.nope], self.wkv_b[:, self.nope :]
    + up_v, up_k = self.wkv_b[:, : self.nope], self.wkv_b[:, self.nope :]
    in $ATTENTION $A.kv_b_proj
    also absorbed = einsum("thd,hdc->thc", q, up_k)
    also out = einsum("thc,hdc->thd"
scaled_without_rope: scores are scaled with the width of the channels that do not turn
    - scores = scores * self.scale
    + scores = scores * self.nope**-0.5
    in $ATTENTION
halves_turned: RoPE turns the halves, not neighbours
    - x.float().unflatten(-1, (-1, 2)).contiguous()
    + x.float().unflatten(-1, (2, -1)).mT.contiguous()
    in $ATTENTION
biased_share: the experts' shares contain the correction bias
    - share = affinity.gather(1, chosen)
    + share = ranked.gather(1, chosen)
    in $GATE
factor_forgotten: the experts' shares are not scaled
    -         share = share * self.factor
    in $GATE
    golden $LAYER.mlp.gate/Tensor.mul
group_by_best: a group is ranked by its best expert, as DeepSeek-V2's
    - group = grouped.topk(2, dim=-1).values.sum(-1)
    + group = grouped.amax(-1)
    in $GATE
shared_takes_the_sum: the shared expert takes the routed experts' output too
    - return routed + self.shared(x)
    + return routed + self.shared(x + routed)
    in blocks.*.ffn $LAYER.mlp
key_not_turned: the shared key is cached before RoPE
    - key = turn(key[:, None], phases)[:, 0]
    + turn(key[:, None], phases)[:, 0]
    in $ATTENTION
    also self.turned[start:end] = key
phases_behind: while decoding, phases are those of the token before
    - phases = self.phases[start : start + len(tokens)]
    + phases = self.phases[max(start - 1, 0) :][: len(tokens)]
    in (root) model.rotary_emb
sees_one_ahead: the mask lets the next token through
    - torch.arange(end)[None] <= torch.arange(start, end)[:, None]
    + torch.arange(end)[None] <= torch.arange(start, end)[:, None] + 1
    in $ATTENTION model
    also scores = scores.masked_fill(~past
up_by_kind: the converter reads the up-projection as all keys, then all values
    weights each(by_kind, "blocks.*.attn.wkv_b")
    in blocks.*.attn $A.kv_b_proj
experts_moved: the down-projections of layer 2 belong to the expert before
    weights each(lambda weight: weight.roll(1, dims=0), "blocks.2.ffn.w2")
    in blocks.2.ffn model.layers.2.mlp.experts
no_correction: the converter leaves the correction bias out, which is no parameter
    weights each(torch.zeros_like, "blocks.*.ffn.gate.bias")
    in $GATE
"""
PORTS = (written(globals(), "latent", "LatentModel"),)
