"""Qwen2-MoE with dispatch and combine by einsum and a static cache, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ports.entry import Bug, Model, State
from ports.written import each, written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [0],
    "max_position_embeddings": 128,
    "initializer_range": 0.12,
    "attn_implementation": "sdpa",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        if hasattr(m, "experts"):
            shared = [m.shared_expert.gate_proj, m.shared_expert.up_proj, m.shared_expert_gate]
            yield layer.post_attention_layernorm, [m.gate, m.experts.gate_up_proj, *shared]
        else:
            yield layer.post_attention_layernorm, [m.gate_proj, m.up_proj]
    yield hf.model.norm, [hf.lm_head]


def value_bias_dropped(state: State) -> None:
    bias = state["layers.2.attn.to_kv.bias"]
    bias[len(bias) // 2 :] = 0


BY_NAME = sorted(range(SETTINGS["num_experts"]), key=str)  # 0, 1, 10, 11, 2, ...


def experts_by_name(weight: torch.Tensor) -> torch.Tensor:
    return weight[BY_NAME]


MIXTURE = ("layers.*.mlp", "model.layers.*.mlp")
BUGS = (
    Bug(
        "softmax_of_the_chosen",
        "shares are the softmax of the chosen scores, as Mixtral's",
        old="share, chosen = self.router(x).float().softmax(dim=-1).topk(self.k, dim=-1)",
        new="share, chosen = self.router(x).float().topk(self.k, dim=-1)\n"
        "        share = share.softmax(dim=-1)",
        modules=("layers.*.mlp", "model.layers.*.mlp.gate"),
    ),
    Bug(
        "shared_gate_linear",
        "the gate of the shared expert lacks its sigmoid",
        old="torch.sigmoid(self.shared_gate(x)) * self.shared(x)",
        new="self.shared_gate(x) * self.shared(x)",
        modules=MIXTURE,
        golden=tuple(f"model.layers.*.mlp/{k}.sigmoid" for k in ("Tensor", "Torch", "Functional")),
    ),
    Bug(
        "empty_slots_seen",
        "single tokens attend without a mask, to the empty slots of the cache too",
        old="mask = slots[None, :] <= at[:, None]",
        new="mask = slots[None, :] <= at[:, None] if new > 1 else None",
        modules=("", "model", "layers.*.attn", "model.layers.*.self_attn"),
        also=("out = F.scaled_dot_product_attention(",),
    ),
    Bug(
        "shares_before_the_experts",
        "the shares weight what goes to the experts, not what comes back",
        old='sent = torch.einsum("tep,td->epd", dispatch, x)\n'
        '        routed = torch.einsum("tep,epd->td", combine, self.experts(sent))',
        new='sent = torch.einsum("tep,td->epd", combine, x)\n'
        '        routed = torch.einsum("tep,epd->td", dispatch, self.experts(sent))',
        modules=(*MIXTURE, "model.layers.*.mlp.experts"),
    ),
    Bug(
        "value_bias_dropped",
        "the fused bias of layer 2 has zeros for the values",
        convert=value_bias_dropped,
        modules=("layers.2.attn.to_kv", "model.layers.2.self_attn.v_proj"),
    ),
    Bug(
        "experts_by_name",
        "the converter stacks the experts of layer 1 in the order of their names as text",
        convert=each(experts_by_name, "layers.1.mlp.experts.wi", "layers.1.mlp.experts.wo"),
        modules=("layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    ),
)
PORTS = (written("dispatch", "Dispatch", "Qwen2Moe", SETTINGS, BUGS, norms=norms, length=18),)
