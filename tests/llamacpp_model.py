"""Tiny models of transformers and their GGUF files, right ones and wrong ones.

Needs torch, transformers and gguf. A bug changes what the file says, never its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4, 4, 2, 256, 512
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_K": 15, "q5_K": 16, "q6_K": 18}
Weights = dict[str, np.ndarray]
Settings = dict[str, float]
Bug = Callable[[Weights, Settings], None]


def model(kind: str) -> torch.nn.Module:
    """Return a random model, well scaled; hidden 256, so that k-quants apply."""
    torch.manual_seed(0)
    config, cls = KINDS[kind]
    made = cls(
        config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=512,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            max_position_embeddings=512, tie_word_embeddings=False, rms_norm_eps=1e-5,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                width = 1 if "embed" in name else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn_like(weight) * width)
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.5)
            else:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
    return made.eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k in the order that ggml's rope of Llama expects: pairs, no halves."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def write(source: torch.nn.Module, path: Path, precision: str, bug: Bug | None = None) -> None:
    """Write a model as a GGUF file without a tokenizer. ``precision``: a key of `FILE_TYPES`."""
    kind = source.config.model_type
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), LAYERS)
    weights = {}
    for name, weight in source.state_dict().items():
        values = weight.float().numpy().copy()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permuted(values, HEADS if ".q_proj." in name else KV_HEADS)
        weights[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    settings = {"eps": 1e-5, "base": 10000.0, "heads": HEADS, "kv_heads": KV_HEADS}
    if bug is not None:
        bug(weights, settings)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(512)
    writer.add_head_count(int(settings["heads"]))
    writer.add_head_count_kv(int(settings["kv_heads"]))
    writer.add_layer_norm_rms_eps(settings["eps"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_dimension_count(int(settings.get("dims", HIDDEN // HEADS)))
    writer.add_rope_freq_base(settings["base"])
    if "scaling" in settings:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(settings["scaling"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in weights.items():
        _add(writer, name, np.ascontiguousarray(values), precision)
    writer.add_file_type(FILE_TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, precision: str) -> None:
    kind = gguf.GGMLQuantizationType[precision.upper()]
    if values.ndim < 2 or precision == "f32":
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

    (rows, columns), (block, size) = values.shape, gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros((rows, columns // block * size), np.uint8)
    quantise = llama_cpp._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    places = [array.ctypes.data_as(ctypes.c_void_p) for array in (values, out)]
    counts = [ctypes.c_int64(count) for count in (0, rows, columns)]
    quantise(ctypes.c_int(int(kind)), *places, *counts, None)
    return out
