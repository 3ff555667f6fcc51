"""Measure what recording statistics costs a vLLM engine: a model of 12 layers of 1024.

    python benchmarks/engines/cost.py [--rounds 7] [--dtype bfloat16]

Each round generates once without and once with a recording, of the modules' statistics in all
steps. The table has medians with the least and the greatest, and the ratio of the medians; starting
and ending a recording are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import transformers

import llmdebug_nb as ld
from engines import serving

PROMPT, OUTPUT, REQUESTS = 128, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    rounds, dtype = given.rounds, getattr(torch, given.dtype)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    origin = transformers.LlamaForCausalLM(config)
    way = serving.Way({"max_model_len": 256, "max_num_batched_tokens": 256})
    llm = serving.engine(origin, origin.state_dict(), dtype, way, {})
    texts = [[(k + 3) * at % 30000 for at in range(PROMPT)] for k in range(REQUESTS)]
    print("| task | plain | recorded | ratio |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for task, tokens in (("prompts", 1), (f"prompts and {OUTPUT} tokens", OUTPUT)):
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(rounds + 1):
                for recorded in (False, True):
                    took = measured(llm, texts, tokens, recorded, Path(folder, f"{number}"))
                    if number:  # the first round warms up
                        times[recorded].append(took)
            plain, with_run = (statistics.median(times[kind]) for kind in (False, True))
            cells = spread(times[False]), spread(times[True]), f"{with_run / plain:.2f} ×"
            print(f"| {task} | {' | '.join(cells)} |")


def spread(seconds: list[float]) -> str:
    """Return the median, the least and the greatest as text."""
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return f"{middle * 1e3:,.0f} ms ({low * 1e3:,.0f}–{high * 1e3:,.0f})"


def measured(
    llm: object, texts: list[list[int]], tokens: int, recorded: bool, folder: Path
) -> float:
    """Return the seconds that generating takes."""
    if not recorded:
        start = time.perf_counter()
        serving.serve(llm, texts, tokens)
        return time.perf_counter() - start
    with ld.dump(llm, name="cost", path=folder / str(tokens), tokens="all", stats_only=True):
        start = time.perf_counter()
        serving.serve(llm, texts, tokens)
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
