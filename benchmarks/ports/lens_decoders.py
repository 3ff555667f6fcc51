"""GPT-2 and Llama of TransformerLens, with a weight for each head, against Hugging Face's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import gptlike, packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms
from ports.written import SMALL, each, original

NEEDED = ("einops", "jaxtyping", "better_abc")
GPT, LLAMA = "transformer.h.*", "model.layers.*"
ATTENTION = ("blocks.*.attn", "blocks.*.attn.hook_*")
FILES = (
    "past_key_value_caching",
    "hook_points",
    "factories/activation_function_factory",
    "components/rms_norm",
    "components/rms_norm_pre",
    "components/layer_norm",
    "components/layer_norm_pre",
    "components/embed",
    "components/pos_embed",
    "components/unembed",
    "components/abstract_attention",
    "components/attention",
    "components/grouped_query_attention",
    "components/mlps/can_be_used_as_mlp",
    "components/mlps/mlp",
    "components/mlps/gated_mlp",
    "components/mlps/moe",
    "components/mlps/gpt_oss_moe",
    "factories/mlp_factory",
    "components/transformer_block",
    "HookedTransformer",
)
# modules that are imported as they are
PLAIN = (
    "utils",
    "HookedTransformerConfig",
    "utilities.attention",
    "utilities.addmm",
    "utilities.devices",
)
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
        for name in PLAIN:
            import_module(f"transformer_lens.{name}")
    return packages.joined("transformer_lens", *(f"{name}.py" for name in FILES))


def make(code: ModuleType, hf: Model, kind: str, **settings: Any) -> Model:
    config = hf.config
    given: dict[str, Any] = {
        "n_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_ctx": 64,
        "n_heads": config.num_attention_heads,
        "d_head": config.hidden_size // config.num_attention_heads,
        "d_vocab": config.vocab_size,
        "init_weights": False,
        "device": "cpu",
    }
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


def convert_gpt2(hf: Model) -> State:
    given, heads = hf.state_dict(), hf.config.n_head
    state = {
        "embed.W_E": given["transformer.wte.weight"],
        "pos_embed.W_pos": given["transformer.wpe.weight"][:64],
        "ln_final.w": given["transformer.ln_f.weight"],
        "ln_final.b": given["transformer.ln_f.bias"],
        "unembed.W_U": given["lm_head.weight"].T,
        "unembed.b_U": torch.zeros(hf.config.vocab_size),
    }
    for n in range(hf.config.n_layer):
        old, new = f"transformer.h.{n}", f"blocks.{n}"
        fused = given[f"{old}.attn.c_attn.weight"].T.chunk(3)
        biases = given[f"{old}.attn.c_attn.bias"].chunk(3)
        for kind, weight, bias in zip("QKV", fused, biases, strict=True):
            state[f"{new}.attn.W_{kind}"] = by_head(weight, heads)
            state[f"{new}.attn.b_{kind}"] = bias.unflatten(0, (heads, -1))
        out = given[f"{old}.attn.c_proj.weight"]
        state[f"{new}.attn.W_O"] = out.unflatten(0, (heads, -1))
        state[f"{new}.attn.b_O"] = given[f"{old}.attn.c_proj.bias"]
        for ours, theirs in (("in", "c_fc"), ("out", "c_proj")):
            state[f"{new}.mlp.W_{ours}"] = given[f"{old}.mlp.{theirs}.weight"]
            state[f"{new}.mlp.b_{ours}"] = given[f"{old}.mlp.{theirs}.bias"]
        for k in (1, 2):
            state[f"{new}.ln{k}.w"] = given[f"{old}.ln_{k}.weight"]
            state[f"{new}.ln{k}.b"] = given[f"{old}.ln_{k}.bias"]
    return state


def convert_llama(hf: Model) -> State:
    given, config = hf.state_dict(), hf.config
    state = {
        "embed.W_E": given["model.embed_tokens.weight"],
        "ln_final.w": given["model.norm.weight"],
        "unembed.W_U": given["lm_head.weight"].T,
        "unembed.b_U": torch.zeros(config.vocab_size),
    }
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // queries
    for n in range(config.num_hidden_layers):
        old, new = f"model.layers.{n}", f"blocks.{n}"
        for name, kind, heads in (("W_Q", "q", queries), ("_W_K", "k", keys), ("_W_V", "v", keys)):
            weight = given[f"{old}.self_attn.{kind}_proj.weight"]
            state[f"{new}.attn.{name}"] = by_head(weight, heads)
            state[f"{new}.attn.{name.replace('W', 'b')}"] = torch.zeros(heads, width)
        out = given[f"{old}.self_attn.o_proj.weight"].T
        state[f"{new}.attn.W_O"] = out.unflatten(0, (queries, -1))
        state[f"{new}.attn.b_O"] = torch.zeros(config.hidden_size)
        for ours, theirs in (("in", "up"), ("gate", "gate"), ("out", "down")):
            state[f"{new}.mlp.W_{ours}"] = given[f"{old}.mlp.{theirs}_proj.weight"].T
        state[f"{new}.mlp.b_in"] = torch.zeros(config.intermediate_size)
        state[f"{new}.mlp.b_out"] = torch.zeros(config.hidden_size)
        state[f"{new}.ln1.w"] = given[f"{old}.input_layernorm.weight"]
        state[f"{new}.ln2.w"] = given[f"{old}.post_attention_layernorm.weight"]
    return state


@torch.no_grad()
def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one with a cache."""
    code = sys.modules[type(model).__module__]
    past = code.HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 1)
    prompt = ids.shape[1] - DECODE
    return [
        model(part, past_kv_cache=past, attention_mask=torch.ones_like(part))
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1))
    ]


# -- conversions gone wrong ----------------------------------------------------------------------


def all_layers(name: str, layers: int) -> Iterator[str]:
    return (f"blocks.{n}.{name}" for n in range(layers))


def channels_first(weight: torch.Tensor) -> torch.Tensor:
    """Return weights by head as if the rows had been ordered by channel, then head."""
    rows = weight.transpose(1, 2)
    return rows.flatten(0, 1).unflatten(0, (-1, len(weight))).permute(1, 2, 0)


def out_transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, 1).T.unflatten(0, weight.shape[:2])


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Return weights by head with their channels ordered for RoPE of adjacent pairs."""
    return weight.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def gate_for_up(state: State) -> None:
    for n in range(SMALL["num_hidden_layers"]):
        a, b = f"blocks.{n}.mlp.W_gate", f"blocks.{n}.mlp.W_in"
        state[a], state[b] = state[b], state[a]


def head_tied(state: State) -> None:
    state["unembed.W_U"] = state["embed.W_E"].T.clone()


def copied(to: str, of: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[to] = state[of].clone()

    return change


GPT_LAYERS, LLAMA_LAYERS = gptlike.SETTINGS["n_layer"], SMALL["num_hidden_layers"]
GPT_ATTENTION = (*ATTENTION, f"{GPT}.attn")
LLAMA_ATTENTION = (*ATTENTION, f"{LLAMA}.self_attn")
GPT_MLP = ("blocks.*.mlp", "blocks.*.mlp.hook_*", f"{GPT}.mlp", f"{GPT}.mlp.act")
LLAMA_MLP = ("blocks.*.mlp", "blocks.*.mlp.hook_*", f"{LLAMA}.mlp", f"{LLAMA}.mlp.act_fn")

GPT_BUGS = (
    Bug(
        "heads_for_channels",
        "the rows of the queries are split into channels first, then heads",
        convert=each(channels_first, *all_layers("attn.W_Q", GPT_LAYERS)),
        modules=(*ATTENTION, f"{GPT}.attn.c_attn"),
    ),
    Bug(
        "query_bias_left",
        "the biases of the queries stay zero",
        convert=each(torch.zeros_like, *all_layers("attn.b_Q", GPT_LAYERS)),
        modules=(*ATTENTION, f"{GPT}.attn.c_attn"),
    ),
    Bug(
        "out_transposed",
        "the output projection of layer 1 is transposed as if it were no Conv1D",
        convert=each(out_transposed, "blocks.1.attn.W_O"),
        modules=("blocks.1.attn", "transformer.h.1.attn.c_proj"),
    ),
    Bug(
        "second_bias_of_the_layer_before",
        "the bias behind the feed-forward part of layer 3 is that of layer 2",
        convert=copied("blocks.3.mlp.b_out", "blocks.2.mlp.b_out"),
        modules=("blocks.3.mlp", "transformer.h.3.mlp.c_proj"),
    ),
    Bug("relu", "ReLU for GELU", settings={"act_fn": "relu"}, modules=GPT_MLP),
    Bug(
        "scaled_by_layer",
        "scores are divided by the number of the layer too",
        settings={"scale_attn_by_inverse_layer_idx": True},
        modules=GPT_ATTENTION,
    ),
    Bug(
        "not_centred",
        "norms do not subtract the mean",
        "        x = x - x.mean(-1, keepdim=True)  # [batch, pos, length]\n"
        '        scale: Float[torch.Tensor, "batch pos 1"] = self.hook_scale(\n'
        "            (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()\n"
        "        )\n"
        "        x = x / scale  # [batch, pos, length]\n"
        "        return self.hook_normalized(x * self.w + self.b)",
        '        scale: Float[torch.Tensor, "batch pos 1"] = self.hook_scale(\n'
        "            (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()\n"
        "        )\n"
        "        x = x / scale  # [batch, pos, length]\n"
        "        return self.hook_normalized(x * self.w + self.b)",
        modules=("blocks.*.ln[12]", "ln_final", f"{GPT}.ln_[12]", "transformer.ln_f"),
        also=(
            "class LayerNorm(nn.Module) ... (x.pow(2)",
            "class LayerNorm(nn.Module) ... x / scale",
        ),
    ),
    Bug(
        "first_norm_again",
        "the feed-forward part takes the first norm",
        "normalized_resid_mid = self.ln2(mlp_in)",
        "normalized_resid_mid = self.ln1(mlp_in)",
        modules=("blocks.*", "blocks.*.ln[12]", f"{GPT}.ln_2"),
    ),
    Bug(
        "values_in_front",
        "new values go in front of the cached ones",
        "torch.cat([self.past_values, new_values], dim=1)",
        "torch.cat([new_values, self.past_values], dim=1)",
        modules=GPT_ATTENTION,
    ),
    Bug(
        "position_off",
        "positions are one too large",
        "pos_embed = self.W_pos[offset_position_ids]",
        "pos_embed = self.W_pos[offset_position_ids + 1]",
        modules=("pos_embed", "transformer.wpe"),
    ),
    Bug(
        "mask_top_left",
        "the mask of a decode step begins at the top left",
        "self.mask[None, None, -query_ctx_length:, -key_ctx_length:]",
        "self.mask[None, None, :query_ctx_length, :key_ctx_length]",
        modules=GPT_ATTENTION,
        also=("torch.where(final_mask, attn_scores, self.IGNORE)",),
    ),
)
LLAMA_BUGS = (
    Bug(
        "rope_layout",
        "queries and keys are ordered for RoPE of adjacent pairs",
        convert=each(
            interleaved,
            *all_layers("attn.W_Q", LLAMA_LAYERS),
            *all_layers("attn._W_K", LLAMA_LAYERS),
        ),
        modules=(*ATTENTION, f"{LLAMA}.self_attn.[qk]_proj"),
    ),
    Bug(
        "adjacent_pairs",
        "RoPE turns adjacent pairs",
        settings={"rotary_adjacent_pairs": True},
        modules=(*LLAMA_ATTENTION, "model.rotary_emb"),
    ),
    Bug(
        "value_heads",
        "the value heads of layer 2 are in another order",
        convert=each(lambda weight: weight.flip(0), "blocks.2.attn._W_V"),
        modules=("blocks.2.attn", "blocks.2.attn.hook_v", "model.layers.2.self_attn.v_proj"),
    ),
    Bug(
        "gate_for_up",
        "the gate and the linear part are swapped in the conversion",
        convert=gate_for_up,
        modules=(
            "blocks.*.mlp",
            "blocks.*.mlp.hook_*",
            f"{LLAMA}.mlp.gate_proj",
            f"{LLAMA}.mlp.up_proj",
        ),
    ),
    Bug("head_tied", "the head is tied", convert=head_tied, modules=("unembed", "lm_head")),
    Bug(
        "last_norm_left",
        "the weight of the last norm stays one",
        convert=each(torch.ones_like, "ln_final.w"),
        modules=("ln_final", "model.norm"),
    ),
    Bug(
        "tiled_keys",
        "key heads are tiled, value heads repeated",
        "k = torch.repeat_interleave(k, dim=2, repeats=self.repeat_kv_heads)",
        "k = k.repeat(1, 1, self.repeat_kv_heads, 1)",
        modules=LLAMA_ATTENTION,
    ),
    Bug(
        "one_more",
        "norms multiply by one plus their weight, as Gemma's",
        "return x * self.w\n",
        "return x * (1 + self.w)\n",
        modules=(
            "blocks.*.ln[12]",
            "ln_final",
            f"{LLAMA}.input_layernorm",
            f"{LLAMA}.post_attention_layernorm",
            "model.norm",
        ),
    ),
    Bug(
        "no_scale",
        "scores are not scaled",
        "attn_scores = q_ @ k_ / self.attn_scale",
        "attn_scores = q_ @ k_",
        modules=LLAMA_ATTENTION,
    ),
    Bug(
        "activation_of_up",
        "the activation is applied to the linear part",
        "(self.act_fn(pre_act) * pre_linear) + self.b_in",
        "(pre_act * self.act_fn(pre_linear)) + self.b_in",
        modules=LLAMA_MLP,
    ),
    Bug(
        "normed_residual",
        "the normalised input is added to the feed-forward part's output",
        "self.hook_resid_post(resid_mid + mlp_out)",
        "self.hook_resid_post(normalized_resid_mid + mlp_out)",
        modules=("blocks.*", "blocks.*.hook_resid_post", LLAMA),
    ),
    Bug(
        "turned_back",
        "RoPE turns the other way",
        "x_rotated = x_rot * mask_rotary_cos + x_flip * mask_rotary_sin",
        "x_rotated = x_rot * mask_rotary_cos - x_flip * mask_rotary_sin",
        modules=LLAMA_ATTENTION,
    ),
)


def port(name: str, kind: str, **more: Any) -> Port:
    return Port(
        name,
        source,
        make=partial(make, kind=kind),
        golden_work=decode,
        work=work,
        package="transformer_lens",
        prepare=prepare,
        missing=partial(packages.missing, "transformer_lens", *NEEDED),
        **more,
    )


PORTS = (
    port(
        "lens-gpt2",
        "gpt2",
        original=lambda seed: original("GPT2", seed, gptlike.SETTINGS, 1.0),
        convert=convert_gpt2,
        norms=gptlike.norms,
        bugs=GPT_BUGS,
    ),
    port(
        "lens-llama",
        "llama",
        original=lambda seed: original("Llama", seed, SMALL, 1.0),
        convert=convert_llama,
        norms=llama_norms,
        bugs=LLAMA_BUGS,
    ),
)
