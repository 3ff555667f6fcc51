"""What an error check costs, as ratios to the same program without it: a Markdown table.

    python benchmarks/errcheck.py [--size S M] [--dtype float32] [--rounds N]

One round runs every variant once, in turn, in one process. Each figure is the median of the rounds'
ratios of CPU time, which other work on the machine hardly changes; the first round is dropped.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from capture import SIZES, build, empty_hooks, generate, training_step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import llmdebug_nb as ld

Variant = tuple[str, Callable[[], None], str]  # name, what runs, name of what it is compared with


def checked(
    model: LlamaForCausalLM, mode: str, folder: str, work: Callable[[], None], seconds: list[float]
) -> None:
    """Run work under a check; note the time of the work alone."""
    with ld.errcheck(model, mode=mode, output=folder) as check:
        plain(work, seconds)
    assert check.result is not None
    assert check.result.verdict == "clean"


def plain(work: Callable[[], None], seconds: list[float]) -> None:
    start = time.process_time()
    work()
    seconds.append(time.process_time() - start)


class EmptyMode(TorchDispatchMode):
    """The floor of seeing operators: a mode that only runs them."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return func(*args, **(kwargs or {}))


def under_empty_mode(work: Callable[[], None]) -> None:
    with EmptyMode():
        work()


def measure(size: str, dtype: torch.dtype, rounds: int) -> None:
    """Print the table of one size."""
    model = build(size, dtype)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        variants: list[tuple[str, str, Callable[[list[float]], None]]] = []
        for what, work in (("generate", partial(generate, model)),
                           ("training step", partial(training_step, model))):  # fmt: skip
            base = f"{what}, unchecked"
            variants.append((base, base, partial(plain, work)))
            hooks = partial(empty_hooks, model, work)
            variants.append((f"{what}, empty hooks (floor)", base, partial(plain, hooks)))
            both = partial(under_empty_mode, hooks)
            variants.append((f"{what}, empty hooks and mode (floor)", base, partial(plain, both)))
            for mode in ("module", "aten"):
                run = partial(checked, model, mode, folder, work)
                variants.append((f"{what}, {mode}", base, run))
        for _ in range(rounds + 1):
            for name, _, run in variants:
                gc.collect()
                run(seconds.setdefault(name, []))
    threads = torch.get_num_threads()
    print(f"\n{size}, {dtype}, {threads} thread(s), torch {torch.__version__}; {rounds} rounds\n")
    print("|variant|ratio|lowest–highest|ms|\n|---|---|---|---|")
    for name, base, _ in variants:
        ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)][1:]
        middle, ms = statistics.median(ratios), 1000 * statistics.median(seconds[name][1:])
        print(f"|{name}|{middle:.2f}|{min(ratios):.2f}–{max(ratios):.2f}|{ms:.0f}|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtype:
        for size in args.size:
            measure(size, getattr(torch, dtype), args.rounds)


if __name__ == "__main__":
    main()
