"""LitGPT's Llama and Mixtral against those of Hugging Face."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from ports import packages
from ports.entry import Logits
from ports.made import SMALLER, ported
from ports.steps import decode, last_token, spans
from ports.weights import Model, State, hugging_face, interleaved, renamed

WIDTH, HEADS, GROUPS, EXPERTS, VOCABULARY, LAYERS = 64, 4, 2, 4, 512, 3
HEAD = WIDTH // HEADS
SIZES = [WIDTH, GROUPS * HEAD, GROUPS * HEAD]  # rows of q, k and v in the fused weight
BLOCK, LAYER = "transformer.h.*", "model.layers.*"
SETTINGS = SMALLER | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA = SETTINGS | {"intermediate_size": 160, "attn_implementation": "sdpa"}
MIXTRAL = SETTINGS | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}


def source() -> Path:
    stub = {"qkv_reassemble": None}  # for old checkpoints; its module wants lightning
    return packages.file("litgpt", "model.py", scripts__convert_hf_checkpoint=stub)


def make(code: ModuleType, hf: Model, length: int = 73, **settings: float) -> Model:
    """Return LitGPT's model with its key-value cache."""
    from litgpt.config import Config

    # the configuration looks classes up there
    sys.modules["litgpt.model"] = sys.modules["litgpt"].model = code  # type: ignore[attr-defined]
    experts = getattr(hf.config, "num_local_experts", 0)
    given = {
        "name": "port", "block_size": 128, "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS,
        "n_query_groups": GROUPS, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY,
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
        "norm_class_name": "RMSNorm", "norm_eps": hf.config.rms_norm_eps,
        "mlp_class_name": "LLaMAMoE" if experts else "LLaMAMLP",
        "intermediate_size": hf.config.intermediate_size,
        "moe_intermediate_size": hf.config.intermediate_size if experts else None,
        "n_expert": experts, "n_expert_per_token": 2 if experts else 0,
        "rope_base": hf.config.rope_parameters["rope_theta"],
    }  # fmt: skip
    model = code.GPT(Config(**{**given, **settings}))
    model.set_kv_cache(batch_size=1, max_seq_length=length)
    return model


NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
    "transformer.h.*.attn.qkv": "model.layers.*.self_attn.{q,k,v}_proj",
    "transformer.h.*.attn.proj": "model.layers.*.self_attn.o_proj",
    "transformer.h.*.norm_{1,2}": "model.layers.*.{input,post_attention}_layernorm",
    "transformer.h.*.mlp.{fc_1,fc_2,proj}": "model.layers.*.mlp.{gate,up,down}_proj",
    "transformer.h.*.mlp.gate": "model.layers.*.mlp.gate",
}


def convert(hf: Model) -> State:
    """Return the weights under LitGPT's names, q, k and v in one."""
    state = renamed(hf.state_dict(), NAMES)
    for n, layer in enumerate(hf.model.layers):
        for e in range(EXPERTS if hasattr(layer.mlp, "experts") else 0):
            expert = f"transformer.h.{n}.mlp.experts.{e}"
            gate, up = layer.mlp.experts.gate_up_proj[e].chunk(2)
            state[f"{expert}.fc_1.weight"], state[f"{expert}.fc_2.weight"] = gate, up
            state[f"{expert}.proj.weight"] = layer.mlp.experts.down_proj[e]
    return state


def work(model: Model, ids: torch.Tensor, whole_cache: bool = True) -> Logits:
    """Prefill all but the last tokens, then feed them one by one.

    ``whole_cache``: attention goes over the empty places of the cache too, which are masked.
    """
    return [
        model(ids[:, first:last], torch.arange(first, last), None if whole_cache else last)
        for first, last in spans(ids)
    ]


# -- bugs ----------------------------------------------------------------------------------------


def rope_layout(rows: torch.Tensor) -> torch.Tensor:
    q, k, v = rows.split(SIZES)
    return torch.cat([interleaved(q, HEADS), interleaved(k, GROUPS), v])


QKV = f"{BLOCK}.attn.qkv"
QK = (QKV, f"{LAYER}.self_attn.[qk]_proj")
ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
MLP = (f"{BLOCK}.mlp", f"{LAYER}.mlp")
NORMS = (
    f"{BLOCK}.norm_[12]", "transformer.ln_f",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
EXPERT, MOE = f"{BLOCK}.mlp.experts.*", (*MLP, f"{LAYER}.mlp.experts")
BOTH = r"""
rope_layout: q and k are ordered for interleaved RoPE
    weights each(rope_layout, QKV)
    in $QK
k_heads: the key heads are in another order
    weights each(lambda w: reordered(w, (0, 1, 2, 3, 5, 4, 6, 7)), "transformer.h.1.attn.qkv")
    in $QKV $LAYER.self_attn.k_proj
norms_swapped: the two norms of each layer are swapped
    weights swap(f"{BLOCK}.norm_1", f"{BLOCK}.norm_2")
    in $NORMS
wrong_eps: eps of the norms is 100 times too large
    settings {"norm_eps": 0.001}
    in $NORMS
rope_base: the base of RoPE is 100,000
    settings {"rope_base": 100000}
    in (root) model.rotary_emb
k_rope_off: keys are turned with cos and sin swapped
    - k_roped = apply_rope(k[..., :rope_n_elem], cos, sin)
    + k_roped = apply_rope(k[..., :rope_n_elem], sin, cos)
    in $ATTENTION
no_residual: the residual is not added after attention
    -             x = attention_output + x
    -             x_normed
    +             x = attention_output
    +             x_normed
    in $BLOCK $LAYER
    golden $LAYER/Tensor.add
"""
LLAMA_BUGS = r"""
qkv_order: keys and values are fused in the wrong order
    weights each(lambda w: reordered(w, (0, 2, 1), SIZES), QKV)
    in $QKV $LAYER.self_attn.[kv]_proj
qkv_groups: q, k and v are fused group by group
    weights each(lambda w: reordered(w, (0, 1, 4, 6, 2, 3, 5, 7)), QKV)
    in $QKV $LAYER.self_attn.[qkv]_proj
gate_up: gate and up are swapped
    weights swap(f"{BLOCK}.mlp.fc_1", f"{BLOCK}.mlp.fc_2")
    in $BLOCK.mlp.fc_[12] $LAYER.mlp.gate_proj $LAYER.mlp.up_proj
transposed: the output projection of attention is transposed
    weights transpose(f"{BLOCK}.attn.proj.weight")
    in $BLOCK.attn.proj $LAYER.self_attn.o_proj
layer_off: a down projection is that of the layer before
    weights copy("transformer.h.2.mlp.proj", "transformer.h.1.mlp.proj")
    in transformer.h.2.mlp.proj model.layers.2.mlp.down_proj
unit_offset: norm weights are stored without the one
    weights each(lambda w: w - 1, f"{BLOCK}.norm_1", f"{BLOCK}.norm_2")
    in $NORMS
last_norm: the weight of the last norm is not loaded
    weights each(torch.ones_like, "transformer.ln_f.weight")
    in transformer.ln_f model.norm
head_tied: the head has the embedding's weight
    weights copy("lm_head", "transformer.wte")
    in lm_head
rotate_sign: RoPE turns the other way
    - rotated = torch.cat((-x2, x1), dim=-1)  # (B, ..., T, head_size)
    + rotated = torch.cat((x2, -x1), dim=-1)  # (B, ..., T, head_size)
    in $ATTENTION
heads_repeated: key heads are repeated in the wrong order
    - k = k.repeat_interleave(q_per_kv, dim=1)  # (B, nh_q, T, hs)
    -             v = v.repeat_interleave(q_per_kv, dim=1)  # (B, nh_q, T, hs)
    -
    -         if self.apply
    + k = k.repeat(1, q_per_kv, 1, 1)  # (B, nh_q, T, hs)
    +             v = v.repeat_interleave(q_per_kv, dim=1)  # (B, nh_q, T, hs)
    +
    +         if self.apply
    in $ATTENTION
mask_off: the causal mask lets the next token through
    - torch.tril(ones)
    + torch.tril(ones, 1)
    in (root) model $ATTENTION
    early
no_scale: scores are scaled with the width of the model
    - attention_scores_scalar or self.config.head_size)
    + attention_scores_scalar or self.config.n_embd)
    in $ATTENTION
    also attention_scores_scalar or self.config.n_embd) ... F.scaled_dot_product_attention(
silu_up: the activation is applied to up, not gate
    - F.silu(x_fc_1) * x_fc_2
    + F.silu(x_fc_2) * x_fc_1
    in $MLP $LAYER.mlp.act_fn
norm_mean: the norm subtracts the mean
    - x_normed = x * torch.rsqrt(norm_x + self.eps)
    + x_normed = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(norm_x + self.eps)
    in $NORMS
stale_norm: the second norm takes the layer's input
    -             x = attention_output + x
    -             x_normed = self.norm_2(x)
    +             x_normed = self.norm_2(x)
    +             x = attention_output + x
    in $BLOCK $LAYER
    golden $LAYER.post_attention_layernorm*
"""
MIXTRAL_BUGS = r"""
experts_swapped: two experts are swapped
    weights swap(f"{BLOCK}.mlp.experts.0", f"{BLOCK}.mlp.experts.1")
    in $EXPERT $LAYER.mlp.experts $EXPERT.*
router_rolled: the router's rows are one off
    weights each(lambda w: w.roll(1, 0), f"{BLOCK}.mlp.gate")
    in $BLOCK.mlp.gate $LAYER.mlp.gate
gates_swapped: gate and up of each expert are swapped
    weights swap(f"{EXPERT}.fc_1", f"{EXPERT}.fc_2")
    in $EXPERT.fc_[12] $LAYER.mlp.experts
layer_off: an output projection is that of the layer before
    weights copy("transformer.h.2.attn.proj", "transformer.h.1.attn.proj")
    in transformer.h.2.attn.proj model.layers.2.self_attn.o_proj
not_normalised: the weights of the chosen experts are not normalised
    -             probs, indices = torch.topk(router, self.config.n_expert_per_token)  # (B*T, n_expert_per_token)
    -             probs = probs.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
    +             router = router.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
    +             probs, indices = torch.topk(router, self.config.n_expert_per_token)
    in $MLP $LAYER.mlp.gate
    golden $LAYER.mlp.gate/Tensor.sum $LAYER.mlp.gate/Tensor.div_
overwritten: the last expert of a token overwrites the others
    - y[token_idx] += probs
    + y[token_idx] = probs
    in $MOE
    golden $LAYER.mlp.experts/Tensor.index_add_
unweighted: the experts are averaged without their weights
    - probs[token_idx, expert_idx, None] * expert(x[token_idx])
    + 0.5 * expert(x[token_idx])
    in $MOE
    golden $LAYER.mlp.experts/Tensor.mul
one_expert: each token goes to one expert
    settings {"n_expert_per_token": 1}
    in $MOE $LAYER.mlp.gate
"""  # noqa: E501
PORTS = tuple(
    ported(
        globals(),
        name,
        "litgpt",
        text=BOTH + text,
        original=hugging_face(kind, settings),
        make=partial(make, length=length),
        golden_work=golden_work,
        work=partial(work, whole_cache=whole_cache),
        length=length,
    )
    for name, kind, settings, golden_work, whole_cache, text, length in (
        # generate gives the head the last token alone, here of a prompt of 70
        ("litgpt-llama", "LlamaForCausalLM", LLAMA, last_token, True, LLAMA_BUGS, 73),
        ("litgpt-mixtral", "MixtralForCausalLM", MIXTRAL, decode, False, MIXTRAL_BUGS, 15),
    )
)
