"""What the black box of a training job costs while nothing happens: the options last and alarm.

    python benchmarks/long_runs.py [--size M] [--steps 40] [--last 8]

Two equal models train in turn, a step each, in one process: one alone, one recorded, with the
loss and all tensors of modules and gradients watched. One recording lasts for all steps, so the
ratio of their medians holds what dropping steps costs. The table has one row for each choice.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from capture import SIZES, build, training_step

import llmdebug_nb as ld

CHOICES: dict[str, dict[str, Any]] = {
    "statistics, with gradients": {"stats_only": True},
    "statistics, forward pass only": {"stats_only": True, "phase": "forward"},
    "statistics of layers, with gradients": {"stats_only": True, "layers": "model.layers.?"},
    "all values, with gradients": {},
    "each 100th step, all values": {"every": 100, "last": None, "alarm": None},
}


def measured(size: str, steps: int, options: dict[str, Any], folder: Path) -> tuple[float, ...]:
    """Return the ratio of the medians, and the lowest and highest of ten parts of the run."""
    times: tuple[list[float], list[float]] = ([], [])
    plain, watched = build(size, torch.float32), build(size, torch.float32)
    with ld.dump(watched, name="long", path=folder, **options):
        for _ in range(steps):
            for kept, model in zip(times, (plain, watched), strict=True):
                begun = time.perf_counter()
                training_step(model)
                kept.append(time.perf_counter() - begun)
    ratios = sorted(b / a for a, b in zip(*(each[steps // 5 :] for each in times), strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--last", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.size}: training steps, {args.steps}, of which the last {args.last} are kept\n")
    print("| recorded | ratio | of ten steps, second lowest and highest |\n|---|---|---|")
    for name, changes in CHOICES.items():
        options = {"last": args.last, "alarm": "nan,spike"} | changes
        options = {key: value for key, value in options.items() if value is not None}
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ratio, low, high = measured(args.size, args.steps, options, Path(folder))
        print(f"| {name} | {ratio:.2f} | {low:.2f}–{high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
