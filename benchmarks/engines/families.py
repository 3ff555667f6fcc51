"""Small random models of Hugging Face whose weights have the spread of trained ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from zoo.entry import PRECISIONS

WIDTH, HEADS, GROUPS, LAYERS, VOCABULARY = 128, 4, 2, 4, 512
HEAD = WIDTH // HEADS  # vLLM's attention on the CPU takes heads of 32 and more
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# name -> class of transformers, and what its config has besides the sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "sliding_window": None,
        },
    ),
    "gemma2": (
        "Gemma2",
        {"tie_word_embeddings": True, "query_pre_attn_scalar": HEAD, "sliding_window": 16},
    ),
}


def model(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Return a model in float32.

    Matrices keep the size of what they multiply, embeddings are of size 1, norms are near 1, and
    biases are large enough to matter, as in trained models.
    """
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SIZES | more)
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # the others leave the cap out
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if family.startswith("gemma") else 1.0  # Gemma adds one to a norm's weight
    with torch.no_grad():
        for name, weight in made.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                # Gemma multiplies the embedding by the root of the width
                size = weight.shape[-1] ** -0.5 if "embed" not in name or not offset else 1.0
                weight.copy_(values * size)
            elif name.endswith("bias"):
                weight.copy_(values * 0.5)
            else:
                weight.copy_(offset + 0.2 * values)
    return made.eval()


def cast(origin: transformers.PreTrainedModel, precision: str) -> transformers.PreTrainedModel:
    """Return a copy of a model with golden's weights of a precision."""
    return copy.deepcopy(origin).to(PRECISIONS[precision][0])
