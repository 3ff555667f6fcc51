"""What recording compiled code costs, as ratios to Inductor alone: a Markdown table.

    python benchmarks/compiled.py [--rounds N] [--hidden 256] [--layers 4]

One round runs each variant once, in turn, in one process. Each figure is the median of the rounds'
ratios. All variants are forward passes of one Llama over 128 tokens, in float32. Compiling is not
counted: the first rounds are dropped.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld

logging.set_verbosity_error()
WARM = 3


def variants(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return name -> one forward pass; the first one is what the others are held against."""

    def compiled(backend: object) -> Callable[[], object]:
        one = copy.deepcopy(model)
        one.forward = torch.compile(one.forward, backend=backend)
        return lambda: one(input_ids=ids, use_cache=False)

    idle = ld.inductor_backend(name="idle", tokens="0", stats_only=True)
    return {
        "Inductor": compiled("inductor"),
        "backend installed, step not asked for": compiled(idle),
        "fused, statistics of what kernels write": compiled(
            ld.inductor_backend(name="written", tokens="all", stats_only=True, part="out")
        ),
        "fused, statistics of what they write and read": compiled(
            ld.inductor_backend(name="both", tokens="all", stats_only=True)
        ),
        "fused, all tensors": compiled(ld.inductor_backend(name="tensors", tokens="all")),
        "fx, statistics": compiled(ld.fx_backend(name="fx", tokens="all", stats_only=True)),
        "eager, uninstrumented": lambda: model(input_ids=ids, use_cache=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=args.hidden * 11 // 4,
        num_attention_heads=8,
        vocab_size=4096,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 1000, (1, 128))
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["LLMDEBUG_RUNS"] = folder
        runs = variants(model, ids)
        for turn in range(WARM + args.rounds):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                if turn >= WARM:
                    times.setdefault(name, []).append(time.perf_counter() - started)
    base = next(iter(times.values()))
    print("| variant | ratio | lowest–highest | ms |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, base, strict=True))
        reach = f"{ratios[0]:.2f}–{ratios[-1]:.2f}"
        ms = statistics.median(seconds) * 1e3
        print(f"| {name} | {statistics.median(ratios):.2f} | {reach} | {ms:.1f} |")


if __name__ == "__main__":
    main()
