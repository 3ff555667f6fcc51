"""Qwen2-MoE with dispatch and combine by einsum and a static cache, against Hugging Face's."""

from __future__ import annotations

from ports.made import SMALLER, written
from ports.weights import Model, State, each, norms_of, renamed

SETTINGS = SMALLER | {
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 12,
    "num_experts_per_tok": 3, "mlp_only_layers": [0], "attn_implementation": "sdpa",
}  # fmt: skip
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.*.{attn,mlp}_norm": "model.layers.*.{input,post_attention}_layernorm",
    "layers.*.attn.{to_q,to_out}": "model.layers.*.self_attn.{q_proj,o_proj}",
    "layers.*.attn.to_kv": "model.layers.*.self_attn.{k,v}_proj",
    "layers.*.mlp.fc_in": "model.layers.*.mlp.{gate,up}_proj",
    "layers.*.mlp.fc_out": "model.layers.*.mlp.down_proj",
    "layers.*.mlp.shared.fc_in": "model.layers.*.mlp.shared_expert.{gate,up}_proj",
    "layers.*.mlp.shared.fc_out": "model.layers.*.mlp.shared_expert.down_proj",
    "layers.*.mlp.{shared_gate,router}": "model.layers.*.mlp.{shared_expert_gate,gate}",
    "layers.*.mlp.experts.{wi,wo}": "model.layers.*.mlp.experts.{gate_up,down}_proj",
}
norms = norms_of(
    "model.layers",
    {
        "input_layernorm": "self_attn.{q,k,v}_proj",
        "post_attention_layernorm": "mlp.{gate,experts.gate_up_proj,gate_proj,up_proj}"
        " mlp.{shared_expert.gate_proj,shared_expert.up_proj,shared_expert_gate}",
    },
    {"model.norm": "lm_head"},
)


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    each(lambda weight: weight.mT, "layers.*.mlp.experts")(state)
    return state


BY_NAME = sorted(range(12), key=str)  # 0, 1, 10, 11, 2, ...
LAYER = "model.layers.*"
MIXTURE = ("layers.*.mlp", f"{LAYER}.mlp")
BUGS = r"""
softmax_of_the_chosen: shares are the softmax of the chosen scores, as Mixtral's
    - share, chosen = self.router(x).float().softmax(dim=-1).topk(self.k, dim=-1)
    + share, chosen = self.router(x).float().topk(self.k, dim=-1)
    +         share = share.softmax(dim=-1)
    in layers.*.mlp $LAYER.mlp.gate
shared_gate_linear: the gate of the shared expert lacks its sigmoid
    - torch.sigmoid(self.shared_gate(x)) * self.shared(x)
    + self.shared_gate(x) * self.shared(x)
    in $MIXTURE
    golden $LAYER.mlp/Tensor.sigmoid $LAYER.mlp/Torch.sigmoid $LAYER.mlp/Functional.sigmoid
empty_slots_seen: single tokens attend without a mask, to the empty slots of the cache too
    - mask = slots[None, :] <= at[:, None]
    + mask = slots[None, :] <= at[:, None] if new > 1 else None
    in (root) model layers.*.attn $LAYER.self_attn
    also out = F.scaled_dot_product_attention(
shares_before_the_experts: the shares weight what goes to the experts, not what comes back
    - sent = torch.einsum("tep,td->epd", dispatch, x)
    -         routed = torch.einsum("tep,epd->td", combine, self.experts(sent))
    + sent = torch.einsum("tep,td->epd", combine, x)
    +         routed = torch.einsum("tep,epd->td", dispatch, self.experts(sent))
    in $MIXTURE $LAYER.mlp.experts
value_bias_dropped: the fused bias of layer 2 has zeros for the values
    weights each(lambda b: zeroed(b, 32), "layers.2.attn.to_kv.bias")
    in layers.2.attn.to_kv model.layers.2.self_attn.v_proj
experts_by_name: the converter stacks the experts of layer 1 in the order of their names as text
    weights each(lambda w: w[BY_NAME], "layers.1.mlp.experts.{wi,wo}")
    in layers.1.mlp.experts model.layers.1.mlp.experts
"""
PORTS = (written(globals(), "dispatch", "Dispatch", "Qwen2MoeForCausalLM", length=18),)
