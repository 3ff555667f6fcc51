"""Tiny models of transformers and their GGUF files, right ones and wrong ones.

Needs torch, transformers and gguf. A bug changes what the file says, never its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4, 4, 2, 256, 512
# name -> class of transformers, and what its config has besides the sizes that all have
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": HIDDEN // HEADS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "sliding_window": None,
        },
    ),
    # caps as near to the scores as in a trained model, and a window shorter than the prompts
    "gemma2": (
        "Gemma2",
        {
            "head_dim": HIDDEN // HEADS,
            "query_pre_attn_scalar": HIDDEN // HEADS,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # the others leave the cap out
        },
    ),
}
# model_type -> the architecture of its files, where it has another name
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe"}
PERMUTED = ("llama",)  # architectures whose rope takes pairs, no halves
NORMS_LESS_ONE = ("gemma2",)  # models whose norms multiply by 1 + weight
# what a file says -> the first of these attributes that a config has
SETTINGS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_K": 10,
    "q3_K": 12, "q4_K": 15, "q5_K": 16, "q6_K": 18,
}  # fmt: skip
Weights = dict[str, np.ndarray]
Settings = dict[str, float | str]
Bug = Callable[[Weights, Settings], None]


def model(kind: str, **settings: Any) -> transformers.PreTrainedModel:
    """Return a random model, well scaled; hidden 256, so that k-quants apply.

    ``settings``: of its config, other than `KINDS` has.
    """
    torch.manual_seed(0)
    name, more = KINDS[kind]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes | more | settings)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    less_one = float(config.model_type in NORMS_LESS_ONE)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                # an embedding that is the head, too, is scaled up by the model itself
                is_plain = "embed" in name and not config.tie_word_embeddings
                width = 1 if is_plain else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn_like(weight) * width)
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.5)
            else:
                weight.copy_(1 - less_one + 0.2 * torch.randn_like(weight))
    return made.eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k in the order that ggml's rope of Llama expects: pairs, no halves."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def heads_of(name: str) -> int:
    """Return how many heads a weight of q or k has, by its name in either program; else 0."""
    if ".q_proj." in name or ".attn_q." in name:
        return HEADS
    return KV_HEADS if ".k_proj." in name or ".attn_k." in name else 0


def architecture(source: transformers.PreTrainedModel) -> str:
    kind = source.config.model_type
    return ARCHITECTURES.get(kind, kind)


def weights_of(source: transformers.PreTrainedModel) -> Weights:
    """Return the weights as a file has them, by their names there."""
    kind, arch = source.config.model_type, architecture(source)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper()), source.config.num_hidden_layers
    )
    weights = {}
    for name, values in _parts(source):
        if arch in PERMUTED and heads_of(name):
            values = permuted(values, heads_of(name))
        if kind in NORMS_LESS_ONE and name.endswith("norm.weight"):
            values = values + 1
        if len(values) == 1:  # the gate of a shared expert has one row
            values = values[0]
        weights[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return weights


def _parts(source: transformers.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of a model, those of fused experts apart, with names that gguf knows."""
    for name, weight in source.state_dict().items():
        values = weight.float().numpy().copy()
        if name.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate_proj", "up_proj"), np.split(values, 2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{half}.weight"), part
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        elif not (name == "lm_head.weight" and source.config.tie_word_embeddings):
            yield name, values


def settings_of(source: transformers.PreTrainedModel) -> Settings:
    """Return what a file says of the model, by the keys of GGUF without the architecture."""
    config = source.config
    found = {
        key: next((getattr(config, name) for name in names if hasattr(config, name)), None)
        for key, names in SETTINGS.items()
    }
    settings: Settings = {key: value for key, value in found.items() if value is not None}
    settings["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    settings["rope.dimension_count"] = HIDDEN // HEADS
    return settings


def write(
    source: transformers.PreTrainedModel, path: Path, precision: str, bug: Bug | None = None
) -> None:
    """Write a model as a GGUF file. ``precision``: a key of `FILE_TYPES`."""
    weights, settings = weights_of(source), settings_of(source)
    if bug is not None:
        bug(weights, settings)
    writer = gguf.GGUFWriter(path, architecture(source))
    kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
    for key, value in settings.items():
        kind = kinds.get(type(value), gguf.GGUFValueType.STRING)
        writer.add_key_value(f"{architecture(source)}.{key}", value, kind)
    _add_tokenizer(writer, source.config.vocab_size)
    for name, values in weights.items():
        _add(writer, name, np.ascontiguousarray(values), precision)
    writer.add_file_type(FILE_TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_weights_of(source: transformers.PreTrainedModel, path: Path) -> Any:
    """Return a model with the weights of its file, in floats. Its experts are not fused."""
    made, heads = copy.deepcopy(source), {}
    if architecture(source) in PERMUTED:
        heads = {name: heads_of(name) for name in source.state_dict() if heads_of(name)}
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture(source).upper()), source.config.num_hidden_layers
    )
    held = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type)
        for each in gguf.GGUFReader(path).tensors
    }
    state = {}
    for name, weight in source.state_dict().items():
        values = held[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        if name in heads:  # `permuted` undone
            parts = values.reshape(heads[name], -1, 2, *values.shape[1:])
            values = parts.swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(values.copy()).reshape(weight.shape)
    made.load_state_dict(state)
    return made


def _add_tokenizer(writer: gguf.GGUFWriter, count: int) -> None:
    """Let each byte of a text be a token; the other tokens are words that no text has."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"word {number}" for number in range(len(words), count)]
    known = gguf.TokenType
    kinds = [known.UNKNOWN, known.CONTROL, known.CONTROL, *[known.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([*kinds, *[known.NORMAL] * (count - len(kinds))])


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, precision: str) -> None:
    kind = gguf.GGMLQuantizationType[precision.upper()]
    # routers stay in float32, as llama.cpp's own conversion leaves them
    if values.ndim < 2 or precision == "f32" or name.endswith("ffn_gate_inp.weight"):
        writer.add_tensor(name, values)
    elif precision == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    elif precision.endswith("_K"):
        writer.add_tensor(name, _k_quants(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _k_quants(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantise by libggml, as gguf only dequantises these."""
    import ctypes

    from llama_cpp import llama_cpp

    (block, size), columns = gguf.GGML_QUANT_SIZES[kind], values.shape[-1]
    out = np.zeros((*values.shape[:-1], columns // block * size), np.uint8)
    quantise = llama_cpp._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    places = [array.ctypes.data_as(ctypes.c_void_p) for array in (values, out)]
    counts = [ctypes.c_int64(count) for count in (0, values.size // columns, columns)]
    quantise(ctypes.c_int(int(kind)), *places, *counts, None)
    return out
