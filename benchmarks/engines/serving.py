"""A vLLM engine in this process, and the ways in which it serves the same texts."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
}

BLOCK = 32  # tokens of a block of the cache
OUTPUT = 6
Text = list[int]
State = dict[str, torch.Tensor]


class Way(NamedTuple):
    """A way to serve: settings of the engine, and how long the prompts are.

    ``again``: the prompts are served before the recording, and begin with a block in common.
    """

    settings: dict[str, Any]
    lengths: tuple[int, ...] = (5, 23, 9)
    output: int = OUTPUT
    again: bool = False


WAYS = {
    "alone": Way({}, (13,)),
    "batched": Way({}),
    "chunked": Way({"max_num_batched_tokens": 16}),
    "cached": Way({"enable_prefix_caching": True}, (40, 45, 37), again=True),
    # three blocks hold no two texts that pass the end of their first block
    "preempted": Way({"num_gpu_blocks_override": 4}, (29, 28), 12),
}


def prompts(way: Way) -> list[Text]:
    """Return prompts that differ; with ``again``, from the first block on."""
    texts = [
        [token * (k + 3) % 500 for token in range(10, 10 + n)] for k, n in enumerate(way.lengths)
    ]
    same = [token * 7 % 500 for token in range(3, 3 + BLOCK)]
    return [same + text[BLOCK:] if way.again else text for text in texts]


def engine(
    origin: PreTrainedModel, state: State, dtype: torch.dtype, way: Way, settings: dict[str, Any]
) -> Any:
    """Return a ``vllm.LLM`` with a checkpoint. ``settings``: of its config, other than golden's."""
    from vllm import LLM

    options: dict[str, Any] = {
        "max_num_batched_tokens": 128,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        origin.save_pretrained(folder, state_dict=state)
        return LLM(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=BLOCK,
            disable_hybrid_kv_cache_manager=True,
            hf_overrides=settings,
            **options | way.settings,
        )


def serve(llm: Any, texts: Sequence[Text], tokens: int) -> list[Text]:
    """Generate greedily; return prompts and outputs."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": text} for text in texts]
    done = llm.generate(given, sampling, use_tqdm=False)
    return [text + list(out.outputs[0].token_ids) for text, out in zip(texts, done, strict=True)]


def close(llm: Any) -> None:
    """Free an engine's memory."""
    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
