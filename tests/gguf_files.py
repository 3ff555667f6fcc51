"""Checkpoints of tiny models, and GGUF files of them as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

gguf: Any = pytest.importorskip("gguf", reason="no gguf: pip install gguf")
Tensors = dict[str, torch.Tensor]
WIDTH, HEADS, KV, LAYERS, VOCABULARY = 256, 4, 2, 2, 96
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "intermediate_size": 512,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 4,
            "num_experts_per_tok": 2}  # fmt: skip
# class, settings, architecture of GGUF
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "llama"),
    "qwen2": ("Qwen2", {}, "qwen2"),
    "qwen3": ("Qwen3", {"head_dim": 64}, "qwen3"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "llama"),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS, "qwen2moe"),
    "gemma2": ("Gemma2", {"head_dim": 64, "sliding_window": 32}, "gemma2"),
}


def checkpoint(folder: Path, model: str, **changes: Any) -> Path:
    """Save a tiny model of random weights with outliers; norms and biases are not trivial."""
    name, settings, _ = MODELS[model]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **settings, **changes})
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.mul_(torch.where(noise > 3, 20.0, 1.0))
    made.save_pretrained(folder)
    return folder


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's own formula (LlamaModel.permute)."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@dataclass
class Bug:
    """A mistake of a conversion. ``before``: in HF's names; ``after``: in GGUF's.

    ``says``: words that name it. ``at``: a part of the name of the weight or setting.
    """

    says: str
    at: str
    before: Callable[[Tensors], None] = lambda tensors: None
    after: Callable[[Tensors], None] = lambda tensors: None
    meta: dict[str, Any] = field(default_factory=dict)
    permute: int = 1  # times
    plus: float = 1.0  # to Gemma's norms


NO_BUG = Bug("", "")


def metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Return what the converter writes of a config."""
    rope = config.get("rope_parameters") or config
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if arch in ("llama", "qwen3", "gemma2"):
        found["attention.key_length"] = found["attention.value_length"] = size
    if arch == "llama":
        found["rope.dimension_count"] = size
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        found["expert_count"] = experts
        found["expert_used_count"] = config["num_experts_per_tok"]
    if arch == "qwen2moe":
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if arch == "gemma2":
        found["attention.sliding_window"] = config["sliding_window"]
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[name] = config[name]
    return {f"{arch}.{key}": value for key, value in found.items()}


def convert(folder: Path, path: Path, model: str, kind: str = "F32", bug: Bug = NO_BUG) -> Path:
    """Write what llama.cpp's converter would, with gguf's own writer and map of names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = MODELS[model][2]
    tensors = load_file(folder / "model.safetensors")
    bug.before(tensors)
    stored = _stored(tensors, config, arch, bug)
    bug.after(stored)
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in {**metadata(config, arch), **bug.meta}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, value in stored.items():
        _add(writer, name, value.detach().float().contiguous().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(tensors: Tensors, config: dict[str, Any], arch: str, bug: Bug) -> Tensors:
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], LAYERS
    )
    found: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, value in tensors.items():
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            for _ in range(bug.permute):
                value = permuted(value, heads[part])
        if arch == "gemma2" and "norm" in name:
            value = value + bug.plus
        if ".experts." in name:
            head, _, rest = name.partition(".experts.")
            number, _, rest = rest.partition(".")
            experts.setdefault(f"{head}.experts.{rest}", {})[int(number)] = value
        else:
            found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    for name, parts in experts.items():
        stacked = torch.stack([parts[number] for number in sorted(parts)])
        found[names.get_name(name, try_suffixes=(".weight",))] = stacked
    return found


def _add(writer: Any, name: str, value: np.ndarray, kind: str) -> None:
    """Add a tensor: vectors and routers stay in float32."""
    if value.ndim == 1 or "ffn_gate_inp" in name or kind == "F32":
        writer.add_tensor(name, value.astype(np.float32))
        return
    if kind == "F16":
        writer.add_tensor(name, value.astype(np.float16))
        return
    chosen = gguf.GGMLQuantizationType[kind]
    raw = QUANTISERS.get(kind, lambda w: gguf.quants.quantize(w, chosen))(value)
    writer.add_tensor(name, raw, raw_dtype=chosen)


# -- K quants, which gguf can't write: scales from the range, codes the nearest -------------------


def _q6_k(value: np.ndarray) -> np.ndarray:
    blocks = value.reshape(-1, 16, 16).astype(np.float32)
    most = np.abs(blocks).max(2)
    common = (most.max(1) / 31 / 127).astype(np.float16)
    wide = np.where(common == 0, 1, common).astype(np.float32)
    scales = np.clip(np.ceil(most / 31 / wide[:, None]), 0, 127).astype(np.int8)
    steps = wide[:, None] * scales
    codes = np.rint(blocks / np.where(steps == 0, 1, steps)[..., None]).clip(-32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves, quarters of 32
    low, high = codes & 15, codes >> 4
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    n = len(blocks)
    parts = [ql.reshape(n, -1), qh.reshape(n, -1), scales.view(np.uint8), _bytes(common)]
    return np.concatenate(parts, 1).reshape(*value.shape[:-1], -1)


def _q4_k(value: np.ndarray) -> np.ndarray:
    blocks = value.reshape(-1, 8, 32).astype(np.float32)
    least = np.maximum(-blocks.min(2), 0)
    wide = np.maximum(blocks.max(2), 0) + least
    d, dmin = (wide.max(1) / 15 / 63).astype(np.float16), (least.max(1) / 63).astype(np.float16)
    one = np.where(d == 0, 1, d).astype(np.float32)[:, None]
    two = np.where(dmin == 0, 1, dmin).astype(np.float32)[:, None]
    scales = np.rint(wide / 15 / one).clip(0, 63).astype(np.uint8)
    mins = np.rint(least / two).clip(0, 63).astype(np.uint8)
    steps = (one * scales)[..., None]
    codes = np.rint((blocks + (two * mins)[..., None]) / np.where(steps == 0, 1, steps))
    codes = codes.clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    head = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6, mins[:, :4] | mins[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4,
    ]  # fmt: skip
    body = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(blocks), -1)
    parts = [_bytes(d), _bytes(dmin), *head, body]
    return np.concatenate(parts, 1).reshape(*value.shape[:-1], -1)


def _bytes(value: np.ndarray) -> np.ndarray:
    return value.view(np.uint8).reshape(-1, 2)


QUANTISERS = {"Q4_K": _q4_k, "Q6_K": _q6_k}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_K", "Q6_K")
