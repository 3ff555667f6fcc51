"""Real Hugging Face architectures with random weights, small enough for any test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

transformers.logging.set_verbosity_error()
VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_DECODER = {
    **_COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **changes})).eval()


def qwen2(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**_DECODER, **changes})).eval()


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        **{**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **changes}
    )
    return GPT2LMHeadModel(config).eval()


def mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**_DECODER, **experts, **changes})).eval()


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "qwen2": qwen2,
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def prompt(
    length: int = 7, batch: int = 1, seed: int = 0, vocabulary: int = VOCABULARY
) -> torch.Tensor:
    """Return token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)


def generate(
    model: Any, ids: torch.Tensor | None = None, new: int = 5, **options: Any
) -> torch.Tensor:
    """Return prompt and ``new`` generated tokens, greedily unless ``options`` say otherwise."""
    ids = prompt() if ids is None else ids
    settings = {
        "max_new_tokens": new,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        **options,
    }
    result: torch.Tensor = model.generate(ids, **settings)
    return result


def hooks_left(model: torch.nn.Module) -> int:
    """Count every hook on the model and every global module hook."""
    from torch.nn.modules import module as internals

    own = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks or ())
        for m in model.modules()
    )
    return own + len(internals._global_forward_pre_hooks) + len(internals._global_forward_hooks)
