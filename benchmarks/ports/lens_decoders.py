"""GPT-2 and Llama of TransformerLens, with a weight for each head, against Hugging Face's."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import gptlike, packages
from ports.entry import Logits
from ports.made import SMALL, ported
from ports.steps import code_of, parts
from ports.weights import Model, State, hugging_face, renamed, several

NEEDED = ("einops", "jaxtyping", "better_abc")
GPT, LLAMA = "transformer.h.*", "model.layers.*"
FILES = """{past_key_value_caching,hook_points,factories/activation_function_factory}.py
    components/{rms_norm,rms_norm_pre,layer_norm,layer_norm_pre,embed,pos_embed,unembed}.py
    components/{abstract_attention,attention,grouped_query_attention}.py
    components/mlps/{can_be_used_as_mlp,mlp,gated_mlp,moe,gpt_oss_moe}.py
    factories/mlp_factory.py components/transformer_block.py HookedTransformer.py"""
# modules that are imported as they are
PLAIN = "utils HookedTransformerConfig utilities.{attention,addmm,devices}"
STUBS: dict[str, dict[str, Any]] = {
    "loading_from_pretrained": {"NON_HF_HOSTED_MODEL_NAMES": ()},
    "ActivationCache": {"ActivationCache": object},
}
DATASETS: dict[str, dict[str, Any]] = {
    "datasets": {},
    "datasets__arrow_dataset": {"Dataset": object},
    "datasets__load": {"load_dataset": None},
}


@cache
def source() -> Path:
    packages.found(*NEEDED)
    packages.file("transformer_lens", "", **STUBS)
    with packages.stand_ins(**DATASETS):  # it is imported for training alone
        for name in several(PLAIN):
            import_module(f"transformer_lens.{name}")
    return packages.joined("transformer_lens", FILES)


def make(code: ModuleType, hf: Model, kind: str, **settings: Any) -> Model:
    config = hf.config
    given: dict[str, Any] = {
        "n_layers": config.num_hidden_layers, "d_model": config.hidden_size, "n_ctx": 64,
        "n_heads": config.num_attention_heads,
        "d_head": config.hidden_size // config.num_attention_heads, "d_vocab": config.vocab_size,
        "init_weights": False, "device": "cpu",
    }  # fmt: skip
    if kind == "gpt2":
        given |= {"act_fn": "gelu_new", "eps": config.layer_norm_epsilon}
    else:
        given |= {
            "act_fn": "silu",
            "eps": config.rms_norm_eps,
            "d_mlp": config.intermediate_size,
            "n_key_value_heads": config.num_key_value_heads,
            "normalization_type": "RMS",
            "positional_embedding_type": "rotary",
            "rotary_base": config.rope_parameters["rope_theta"],
            "gated_mlp": True,
        }
    # the class is named here, since the module of the configuration is not the port's
    config_class = import_module("transformer_lens.HookedTransformerConfig").HookedTransformerConfig
    return code.HookedTransformer(config_class(**{**given, **settings}))


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Give the configuration, which says what is computed in float32, and the tables the dtype."""
    model.cfg.dtype = dtype
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def by_head(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight [heads * head width, model width] as [heads, model width, head width]."""
    return weight.unflatten(0, (heads, -1)).transpose(1, 2)


GPT_NAMES = {
    "embed.W_E": "transformer.wte.weight",
    "ln_final.{w,b}": "transformer.ln_f.{weight,bias}",
    "blocks.*.attn.b_O": "transformer.h.*.attn.c_proj.bias",
    "blocks.*.mlp.{W,b}_in": "transformer.h.*.mlp.c_fc.{weight,bias}",
    "blocks.*.mlp.{W,b}_out": "transformer.h.*.mlp.c_proj.{weight,bias}",
    "blocks.*.ln1.{w,b}": "transformer.h.*.ln_1.{weight,bias}",
    "blocks.*.ln2.{w,b}": "transformer.h.*.ln_2.{weight,bias}",
}
LLAMA_NAMES = {
    "embed.W_E": "model.embed_tokens.weight",
    "ln_final.w": "model.norm.weight",
    "blocks.*.ln{1,2}.w": "model.layers.*.{input,post_attention}_layernorm.weight",
}


def convert_gpt2(hf: Model) -> State:
    heads = hf.config.n_head
    state = renamed(hf.state_dict(), GPT_NAMES)
    state["pos_embed.W_pos"] = hf.transformer.wpe.weight[:64]
    state["unembed.W_U"] = hf.lm_head.weight.T
    state["unembed.b_U"] = torch.zeros(hf.config.vocab_size)
    for n, layer in enumerate(hf.transformer.h):
        new, fused = f"blocks.{n}.attn", layer.attn.c_attn
        parts = zip("QKV", fused.weight.T.chunk(3), fused.bias.chunk(3), strict=True)
        for kind, weight, bias in parts:
            state[f"{new}.W_{kind}"] = by_head(weight, heads)
            state[f"{new}.b_{kind}"] = bias.unflatten(0, (heads, -1))
        state[f"{new}.W_O"] = layer.attn.c_proj.weight.unflatten(0, (heads, -1))
    return state


def convert_llama(hf: Model) -> State:
    config = hf.config
    state = renamed(hf.state_dict(), LLAMA_NAMES)
    state["unembed.W_U"] = hf.lm_head.weight.T
    state["unembed.b_U"] = torch.zeros(config.vocab_size)
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    for n, layer in enumerate(hf.model.layers):
        attn, mlp, a, m = f"blocks.{n}.attn", f"blocks.{n}.mlp", layer.self_attn, layer.mlp
        parts = (("W_Q", a.q_proj, queries), ("_W_K", a.k_proj, keys), ("_W_V", a.v_proj, keys))
        for name, linear, heads in parts:
            state[f"{attn}.{name}"] = by_head(linear.weight, heads)
            bias = torch.zeros(heads, config.hidden_size // queries)
            state[f"{attn}.{name.replace('W', 'b')}"] = bias
        state[f"{attn}.W_O"] = a.o_proj.weight.T.unflatten(0, (queries, -1))
        state[f"{attn}.b_O"] = torch.zeros(config.hidden_size)
        for name, linear in (("in", m.up_proj), ("gate", m.gate_proj), ("out", m.down_proj)):
            state[f"{mlp}.W_{name}"] = linear.weight.T
        state[f"{mlp}.b_in"] = torch.zeros(config.intermediate_size)
        state[f"{mlp}.b_out"] = torch.zeros(config.hidden_size)
    return state


@torch.no_grad()
def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one with a cache."""
    past = code_of(model).HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 1)
    return [
        model(part, past_kv_cache=past, attention_mask=torch.ones_like(part)) for part in parts(ids)
    ]


# -- bugs ----------------------------------------------------------------------------------------


def channels_first(weight: torch.Tensor) -> torch.Tensor:
    """Return weights by head as if the rows had been ordered by channel, then head."""
    rows = weight.transpose(1, 2)
    return rows.flatten(0, 1).unflatten(0, (-1, len(weight))).permute(1, 2, 0)


def out_transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, 1).T.unflatten(0, weight.shape[:2])


def neighbours_turn(weight: torch.Tensor) -> torch.Tensor:
    """Return weights by head with their channels ordered for RoPE of adjacent pairs."""
    return weight.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def head_tied(state: State) -> None:
    state["unembed.W_U"] = state["embed.W_E"].T.clone()


ATTENTION = ("blocks.*.attn", "blocks.*.attn.hook_*")
FORWARD = ("blocks.*.mlp", "blocks.*.mlp.hook_*")
GPT_ATTENTION, GPT_MLP = (*ATTENTION, f"{GPT}.attn"), (*FORWARD, f"{GPT}.mlp", f"{GPT}.mlp.act")
LLAMA_ATTENTION = (*ATTENTION, f"{LLAMA}.self_attn")
LLAMA_MLP = (*FORWARD, f"{LLAMA}.mlp", f"{LLAMA}.mlp.act_fn")
GPT_BUGS = r"""
heads_for_channels: the rows of the queries are split into channels first, then heads
    weights each(channels_first, "blocks.*.attn.W_Q")
    in $ATTENTION $GPT.attn.c_attn
query_bias_left: the biases of the queries stay zero
    weights each(torch.zeros_like, "blocks.*.attn.b_Q")
    in $ATTENTION $GPT.attn.c_attn
out_transposed: the output projection of layer 1 is transposed as if it were no Conv1D
    weights each(out_transposed, "blocks.1.attn.W_O")
    in blocks.1.attn transformer.h.1.attn.c_proj
second_bias_of_the_layer_before: the bias behind the feed-forward part of layer 3 is that of layer 2
    weights copy("blocks.3.mlp.b_out", "blocks.2.mlp.b_out")
    in blocks.3.mlp transformer.h.3.mlp.c_proj
relu: ReLU for GELU
    settings {"act_fn": "relu"}
    in $GPT_MLP
scaled_by_layer: scores are divided by the number of the layer too
    settings {"scale_attn_by_inverse_layer_idx": True}
    in $GPT_ATTENTION
not_centred: norms do not subtract the mean
    -         x = x - x.mean(-1, keepdim=True)  # [batch, pos, length]
    -         scale: Float[torch.Tensor, "batch pos 1"] = self.hook_scale(
    +         scale: Float[torch.Tensor, "batch pos 1"] = self.hook_scale(
    in blocks.*.ln[12] ln_final $GPT.ln_[12] transformer.ln_f
    also class LayerNorm(nn.Module) ... (x.pow(2)
    also class LayerNorm(nn.Module) ... x / scale
first_norm_again: the feed-forward part takes the first norm
    - normalized_resid_mid = self.ln2(mlp_in)
    + normalized_resid_mid = self.ln1(mlp_in)
    in blocks.* blocks.*.ln[12] $GPT.ln_2
values_in_front: new values go in front of the cached ones
    - torch.cat([self.past_values, new_values], dim=1)
    + torch.cat([new_values, self.past_values], dim=1)
    in $GPT_ATTENTION
position_off: positions are one too large
    - pos_embed = self.W_pos[offset_position_ids]
    + pos_embed = self.W_pos[offset_position_ids + 1]
    in pos_embed transformer.wpe
mask_top_left: the mask of a decode step begins at the top left
    - self.mask[None, None, -query_ctx_length:, -key_ctx_length:]
    + self.mask[None, None, :query_ctx_length, :key_ctx_length]
    in $GPT_ATTENTION
    also torch.where(final_mask, attn_scores, self.IGNORE)
"""
LLAMA_BUGS = r"""
rope_layout: queries and keys are ordered for RoPE of adjacent pairs
    weights each(neighbours_turn, "blocks.*.attn.{W_Q,_W_K}")
    in $ATTENTION $LLAMA.self_attn.[qk]_proj
adjacent_pairs: RoPE turns adjacent pairs
    settings {"rotary_adjacent_pairs": True}
    in $LLAMA_ATTENTION model.rotary_emb
value_heads: the value heads of layer 2 are in another order
    weights each(lambda weight: weight.flip(0), "blocks.2.attn._W_V")
    in blocks.2.attn blocks.2.attn.hook_v model.layers.2.self_attn.v_proj
gate_for_up: the gate and the linear part are swapped in the conversion
    weights swap("blocks.*.mlp.W_gate", "blocks.*.mlp.W_in")
    in $FORWARD $LLAMA.mlp.gate_proj $LLAMA.mlp.up_proj
head_tied: the head is tied
    weights head_tied
    in unembed lm_head
last_norm_left: the weight of the last norm stays one
    weights each(torch.ones_like, "ln_final.w")
    in ln_final model.norm
tiled_keys: key heads are tiled, value heads repeated
    - k = torch.repeat_interleave(k, dim=2, repeats=self.repeat_kv_heads)
    + k = k.repeat(1, 1, self.repeat_kv_heads, 1)
    in $LLAMA_ATTENTION
one_more: norms multiply by one plus their weight, as Gemma's
    - return x * self.w
    + return x * (1 + self.w)
    in blocks.*.ln[12] ln_final $LLAMA.input_layernorm $LLAMA.post_attention_layernorm model.norm
no_scale: scores are not scaled
    - attn_scores = q_ @ k_ / self.attn_scale
    + attn_scores = q_ @ k_
    in $LLAMA_ATTENTION
activation_of_up: the activation is applied to the linear part
    - (self.act_fn(pre_act) * pre_linear) + self.b_in
    + (pre_act * self.act_fn(pre_linear)) + self.b_in
    in $LLAMA_MLP
normed_residual: the normalised input is added to the feed-forward part's output
    - self.hook_resid_post(resid_mid + mlp_out)
    + self.hook_resid_post(normalized_resid_mid + mlp_out)
    in blocks.* blocks.*.hook_resid_post $LLAMA
turned_back: RoPE turns the other way
    - x_rotated = x_rot * mask_rotary_cos + x_flip * mask_rotary_sin
    + x_rotated = x_rot * mask_rotary_cos - x_flip * mask_rotary_sin
    in $LLAMA_ATTENTION
"""
PORTS = tuple(
    ported(
        globals(),
        name,
        "transformer_lens",
        *NEEDED,
        text=text,
        original=hugging_face(kind, settings),
        make=partial(make, kind=name.removeprefix("lens-")),
        convert=convert,
        **more,
    )
    for name, kind, settings, convert, text, more in (
        (
            "lens-gpt2",
            "GPT2LMHeadModel",
            gptlike.SETTINGS,
            convert_gpt2,
            GPT_BUGS,
            {"norms": gptlike.norms},
        ),
        ("lens-llama", "LlamaForCausalLM", SMALL, convert_llama, LLAMA_BUGS, {}),
    )
)
