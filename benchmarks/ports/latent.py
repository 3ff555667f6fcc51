"""DeepSeek-V3 with absorbed up-projections and a cache of latents, against Hugging Face's."""

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
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}
LAYERS, HEADS = SETTINGS["num_hidden_layers"], SETTINGS["num_attention_heads"]
LAYER = "model.layers.*"
ATTENTION = ("blocks.*.attn", f"{LAYER}.self_attn")
GATE = ("blocks.*.ffn.gate", f"{LAYER}.mlp.gate")


def with_correction(model: Model) -> Model:
    """Give the routers a correction bias, which a model without training has not."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def norms(model: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_a_proj, a.kv_a_proj_with_mqa]
        yield a.q_a_layernorm, [a.q_b_proj]
        yield a.kv_a_layernorm, [a.kv_b_proj]
        if hasattr(m, "experts"):
            shared = m.shared_experts
            takers = [m.gate, m.experts.gate_up_proj, shared.gate_proj, shared.up_proj]
            yield layer.post_attention_layernorm, takers
        else:
            yield layer.post_attention_layernorm, [m.gate_proj, m.up_proj]
    yield model.model.norm, [model.lm_head]


def by_kind(weight: torch.Tensor) -> torch.Tensor:
    """Return the up-projection as if all keys came before all values."""
    keys = weight.flatten(0, 1)
    return (
        torch.stack(keys.split(keys.shape[0] // (2 * HEADS)))
        .unflatten(0, (2, HEADS))
        .transpose(0, 1)
        .flatten(1, 2)
    )


def experts_moved(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(1, dims=0)


def no_correction(state: State) -> None:
    for n in range(1, LAYERS):
        state[f"blocks.{n}.ffn.gate.bias"].zero_()


BUGS = (
    Bug(
        "latent_not_normed",
        "latents are cached without their norm",
        old="        latent = self.kv_norm(latent)\n",
        new="",
        modules=(*ATTENTION, "blocks.*.attn.kv_norm", f"{LAYER}.self_attn.kv_a_layernorm"),
        golden=(f"{LAYER}.self_attn.kv_a_layernorm*",),
        also=("self.latents[start:end] = latent",),
    ),
    Bug(
        "values_first",
        "the up-projection is split as values, then keys",
        old="up_k, up_v = self.wkv_b[:, : self.nope], self.wkv_b[:, self.nope :]",
        new="up_v, up_k = self.wkv_b[:, : self.nope], self.wkv_b[:, self.nope :]",
        modules=(*ATTENTION, f"{LAYER}.self_attn.kv_b_proj"),
        also=('absorbed = einsum("thd,hdc->thc", q, up_k)', 'out = einsum("thc,hdc->thd"'),
    ),
    Bug(
        "scaled_without_rope",
        "scores are scaled with the width of the channels that do not turn",
        old="scores = scores * self.scale",
        new="scores = scores * self.nope**-0.5",
        modules=ATTENTION,
    ),
    Bug(
        "halves_turned",
        "RoPE turns the halves, not neighbours",
        old="x.float().unflatten(-1, (-1, 2)).contiguous()",
        new="x.float().unflatten(-1, (2, -1)).mT.contiguous()",
        modules=ATTENTION,
    ),
    Bug(
        "biased_share",
        "the experts' shares contain the correction bias",
        old="share = affinity.gather(1, chosen)",
        new="share = ranked.gather(1, chosen)",
        modules=GATE,
    ),
    Bug(
        "factor_forgotten",
        "the experts' shares are not scaled",
        old="        share = share * self.factor\n",
        new="",
        modules=GATE,
        golden=(f"{LAYER}.mlp.gate/Tensor.mul",),
    ),
    Bug(
        "group_by_best",
        "a group is ranked by its best expert, as DeepSeek-V2's",
        old="group = grouped.topk(2, dim=-1).values.sum(-1)",
        new="group = grouped.amax(-1)",
        modules=GATE,
    ),
    Bug(
        "shared_takes_the_sum",
        "the shared expert takes the routed experts' output too",
        old="return routed + self.shared(x)",
        new="return routed + self.shared(x + routed)",
        modules=("blocks.*.ffn", f"{LAYER}.mlp"),
    ),
    Bug(
        "key_not_turned",
        "the shared key is cached before RoPE",
        old="key = turn(key[:, None], phases)[:, 0]",
        new="turn(key[:, None], phases)[:, 0]",
        modules=ATTENTION,
        also=("self.turned[start:end] = key",),
    ),
    Bug(
        "phases_behind",
        "while decoding, phases are those of the token before",
        old="phases = self.phases[start : start + len(tokens)]",
        new="phases = self.phases[max(start - 1, 0) :][: len(tokens)]",
        modules=("", "model.rotary_emb"),
    ),
    Bug(
        "sees_one_ahead",
        "the mask lets the next token through",
        old="torch.arange(end)[None] <= torch.arange(start, end)[:, None]",
        new="torch.arange(end)[None] <= torch.arange(start, end)[:, None] + 1",
        modules=(*ATTENTION, "model"),
        also=("scores = scores.masked_fill(~past",),
    ),
    Bug(
        "up_by_kind",
        "the converter reads the up-projection as all keys, then all values",
        convert=each(by_kind, *(f"blocks.{n}.attn.wkv_b" for n in range(LAYERS))),
        modules=("blocks.*.attn", f"{LAYER}.self_attn.kv_b_proj"),
    ),
    Bug(
        "experts_moved",
        "the down-projections of layer 2 belong to the expert before",
        convert=each(experts_moved, "blocks.2.ffn.w2"),
        modules=("blocks.2.ffn", "model.layers.2.mlp.experts"),
    ),
    Bug(
        "no_correction",
        "the converter leaves the correction bias out, which is no parameter",
        convert=no_correction,
        modules=GATE,
    ),
)
PORTS = (
    written(
        "latent", "LatentModel", "DeepseekV3", SETTINGS, BUGS, norms=norms, change=with_correction
    ),
)
