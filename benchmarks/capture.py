"""What recording costs, as ratios to the same program uninstrumented.

    python benchmarks/capture.py [--size S|M] [--rounds N]

One round runs every variant once, in turn, in one process; each figure is the median over the rounds of that
round's ratio, so that a machine that drifts or is shared does not favour anyone. Work: prefill of 128 tokens and
8 greedy decode steps. Bytes are those on disk over the sum of all recorded tensors' sizes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld

logging.set_verbosity_error()
SIZES = {
    "S": {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "vocab_size": 4096},
    "M": {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000},
}  # fmt: skip
DECODE = 8


def build(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).to(dtype).eval()


def noop_hooks(model: LlamaForCausalLM, work: Callable[[], None]) -> None:
    """The floor: empty hooks of the same kind on every module."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda *_: None, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda *_: None, with_kwargs=True))
    work()
    for handle in handles:
        handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.size, getattr(torch, args.dtype))
    ids = torch.randint(3, 1000, (1, 128), generator=torch.Generator().manual_seed(0))
    place = Path(tempfile.mkdtemp())
    sizes: dict[str, float] = {}
    amount: dict[str, float] = {}

    def work() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DECODE + 1, do_sample=False)

    def recorded(name: str, **options: object) -> Callable[[], None]:
        def run() -> None:
            with ld.dump(model, name=name, path=place, tokens="all", **options) as dump:
                work()
            clocks[name] = time.perf_counter()
            table = dump.to_pandas()
            item = {"float32": 4, "bfloat16": 2, "int64": 8}
            logical = sum(
                torch.Size(shape).numel() * item[dtype]
                for shape, dtype in zip(table["shape"], table.dtype, strict=True)
            )
            amount[name] = dump.info()["bytes"]
            sizes[name] = amount[name] / logical
            shutil.rmtree(place, ignore_errors=True)

        return run

    clocks: dict[str, float] = {}
    raw = os.urandom(1 << 18)

    def written() -> None:
        """The floor of keeping tensors: the same bytes to one file, in large pieces."""
        work()
        place.mkdir(exist_ok=True)
        with open(place / "raw", "wb", buffering=0) as file:
            for _ in range(int(amount.get("tensors", 0)) >> 18):
                file.write(raw)
        clocks["raw"] = time.perf_counter()
        shutil.rmtree(place, ignore_errors=True)

    variants: dict[str, Callable[[], None]] = {
        "uninstrumented": work,
        "empty hooks": lambda: noop_hooks(model, work),
        "statistics": recorded("statistics", stats_only=True),
        "all tensors": recorded("tensors"),
        "plain write of as many bytes": written,
        "tensors of step 0 only": recorded_first(model, work, place),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds + 1):
        for name, run in variants.items():
            clocks.clear()
            start = time.perf_counter()
            run()
            end = next(iter(clocks.values()), time.perf_counter())
            times[name].append(end - start)
    base = times["uninstrumented"][1:]
    print(f"size {args.size}, {args.dtype}, {args.threads} threads, {args.rounds} rounds")
    print(f"{'variant':30} {'ratio':>7} {'min':>6} {'max':>6} {'ms':>8}")
    for name, values in times.items():
        ratios = [value / reference for value, reference in zip(values[1:], base, strict=True)]
        row = f"{name:30} {statistics.median(ratios):7.3f} {min(ratios):6.2f} {max(ratios):6.2f} {1e3 * statistics.median(values[1:]):8.1f}"
        print(row)
    print(f"bytes on disk / logical bytes, all tensors: {sizes['tensors']:.2f}")


def recorded_first(model: LlamaForCausalLM, work: Callable[[], None], place: Path) -> Callable[[], None]:
    """Record step 0 alone: the other steps should cost nothing."""

    def run() -> None:
        with ld.dump(model, name="first", path=place, tokens="0"):
            work()
        shutil.rmtree(place, ignore_errors=True)

    return run


if __name__ == "__main__":
    main()
