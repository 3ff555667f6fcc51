"""GGUF files of random weights, of architectures whose operations `llamacpp_model` has not.

`write` needs gguf. The weights are those that llama.cpp asks an architecture for.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV, INNER, EXPERTS, VOCABULARY = 2, 64, 6, 3, 96, 4, 96
HEAD = 16  # channels
Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, int | float | str] = {
    "context_length": 512, "embedding_length": WIDTH, "block_count": LAYERS,
    "feed_forward_length": INNER, "attention.head_count": HEADS, "vocab_size": VOCABULARY,
}  # fmt: skip
# attention sinks, biases of experts, SWIGLU with a limit, YaRN, and a window in every other layer
_GPT_OSS: dict[str, int | float | str] = {
    **_COMMON, "attention.head_count_kv": KV, "attention.key_length": HEAD,
    "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 8, "rope.freq_base": 10000.0, "rope.dimension_count": HEAD,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64, "expert_count": EXPERTS, "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
}  # fmt: skip
_EXPERT_LAYER: Shapes = {
    "attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,),
    "attn_q.weight": (HEADS * HEAD, WIDTH), "attn_q.bias": (HEADS * HEAD,),
    "attn_k.weight": (KV * HEAD, WIDTH), "attn_k.bias": (KV * HEAD,),
    "attn_v.weight": (KV * HEAD, WIDTH), "attn_v.bias": (KV * HEAD,),
    "attn_output.weight": (WIDTH, HEADS * HEAD), "attn_output.bias": (WIDTH,),
    "attn_sinks.weight": (HEADS,), "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.weight": (EXPERTS, INNER, WIDTH), "ffn_gate_exps.bias": (EXPERTS, INNER),
    "ffn_up_exps.weight": (EXPERTS, INNER, WIDTH), "ffn_up_exps.bias": (EXPERTS, INNER),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, INNER), "ffn_down_exps.bias": (EXPERTS, WIDTH),
}  # fmt: skip
# ALiBi in place of positions, with a number of heads that is no power of 2
_BLOOM: dict[str, int | float | str] = {
    **_COMMON, "embedding_length": HEADS * HEAD, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
_BIASED_LAYER: Shapes = {
    f"{name}.{part}": shape if part == "weight" else shape[:1]
    for name, shape in {
        "attn_norm": (HEADS * HEAD,), "ffn_norm": (HEADS * HEAD,),
        "attn_qkv": (3 * HEADS * HEAD, HEADS * HEAD), "attn_output": (HEADS * HEAD, HEADS * HEAD),
        "ffn_up": (INNER, HEADS * HEAD), "ffn_down": (HEADS * HEAD, INNER),
    }.items()
    for part in ("weight", "bias")
}  # fmt: skip
# an architecture -> what its file says, and its weights: of the model, of a layer
ARCHITECTURES: dict[str, tuple[dict[str, int | float | str], Shapes, Shapes]] = {
    "gpt-oss": (
        _GPT_OSS,
        {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,),
         "output.weight": (VOCABULARY, WIDTH)},
        _EXPERT_LAYER,
    ),
    "bloom": (
        _BLOOM,
        {"token_embd.weight": (VOCABULARY, HEADS * HEAD), "token_embd_norm.weight": (HEADS * HEAD,),
         "token_embd_norm.bias": (HEADS * HEAD,), "output_norm.weight": (HEADS * HEAD,),
         "output_norm.bias": (HEADS * HEAD,), "output.weight": (VOCABULARY, HEADS * HEAD)},
        _BIASED_LAYER,
    ),
}  # fmt: skip


def write(architecture: str, path: Path) -> None:
    settings, whole, layer = ARCHITECTURES[architecture]
    writer, draws = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
    for key, value in settings.items():
        kind = kinds.get(type(value), gguf.GGUFValueType.STRING)
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    writer.add_tokenizer_model("no_vocab")
    blocks = {f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    for name, shape in {**whole, **blocks}.items():
        values = draws.standard_normal(shape).astype(np.float32)
        if len(shape) > 1 and name.endswith("weight"):
            values *= np.float32(shape[-1] ** -0.5)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
