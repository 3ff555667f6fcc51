"""How what recording costs grows, with the model and the work: a Markdown table for each curve.

    python benchmarks/curves.py [--rounds 5] [--only layers threads memory]

From S of `capture.py` (8 layers of hidden size 256, a prompt of 128 tokens, 8 more, one thread) one
thing is changed at a time. Each figure is a ratio to the uninstrumented program, the median of the
rounds, each of which runs all variants once, in turn. Memory is the peak of a process that does the
work once, plainly or under a recording, with the model in it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import capture
import torch

RECORDINGS: dict[str, dict[str, Any]] = {
    "statistics, module": {"stats_only": True},
    "and aten": {"stats_only": True, "mode": "module+aten"},
    "statistics, api": {"stats_only": True, "mode": "api"},
    "all tensors, module": {},
}
PLAIN = "uninstrumented"
CURVES = {
    "layers": (2, 8, 32),
    "hidden": (64, 256, 1024),
    "prompt": (16, 128, 512),
    "more": (1, 8, 64),
    "threads": tuple(dict.fromkeys((1, 2, os.cpu_count() or 1))),
}
MEMORY = (("more", 8), ("more", 128), ("hidden", 1024))
NAMES = {"hidden": "hidden size", "prompt": "tokens of the prompt", "more": "more tokens"}


@dataclass(frozen=True)
class Point:
    """A model and its work. ``more``: tokens after the prompt."""

    layers: int = capture.SIZES["S"]["num_hidden_layers"]
    hidden: int = capture.SIZES["S"]["hidden_size"]
    prompt: int = capture.PROMPT
    more: int = capture.DECODE
    threads: int = 1

    def variants(self, folder: Path) -> list[capture.Variant]:
        """Return the plain work, and the same under each kind of recording."""
        shape = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": 43 * self.hidden // 16,  # as of S
            "num_attention_heads": self.hidden // 32,
            "vocab_size": capture.SIZES["S"]["vocab_size"],
        }
        torch.set_num_threads(self.threads)
        model = capture.llama(shape)
        work = partial(capture.generate, model, self.prompt, self.more)
        recordings = [
            capture.Variant(
                name,
                work,
                partial(capture.recorded, model, folder, {"tokens": "all", **options}),
                PLAIN,
            )
            for name, options in RECORDINGS.items()
        ]
        return [capture.Variant(PLAIN, work, capture.plain), *recordings]


def row(point: Point, folder: Path, rounds: int) -> list[str]:
    """Return the time of the plain work in ms, and the ratios while recording."""
    plain, *recorded = capture.measure(point.variants(folder), folder, rounds)
    ratios = [f"{statistics.median(each.recording):.2f}" for each in recorded]
    return [f"{1e3 * statistics.median(plain.seconds):.0f}", *ratios]


def peak(point: Point, variant: str) -> int:
    """Return the peak memory of a process that does the work once, in MB."""
    values = [str(getattr(point, field.name)) for field in fields(point)]
    command = [sys.executable, __file__, "--alone", variant, *values]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def alone(variant: str, point: Point, folder: Path) -> None:
    """Do the work once, and print the peak memory in MB."""
    one = next(each for each in point.variants(folder) if each.name == variant)
    capture.timed(one)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


def table(first: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [[first, *columns], ["---"] * (1 + len(columns)), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", choices=[*CURVES, "memory"], default=[*CURVES, "memory"]
    )
    parser.add_argument("--alone", nargs="+", help="a variant and a point: print its peak memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs"
        if args.alone:
            variant, *values = args.alone
            alone(variant, Point(*map(int, values)), folder)
            return
        if "memory" in args.only:  # first: a new process counts the peak of the one that made it
            rows = [
                [
                    f"{NAMES[name]}: {value}",
                    *(str(peak(point, each)) for each in (PLAIN, *RECORDINGS)),
                ]
                for name, value in MEMORY
                for point in [replace(Point(), **{name: value})]
            ]
            print(table("peak memory, MB", [PLAIN, *RECORDINGS], rows))
        for name in (each for each in args.only if each in CURVES):
            points = [replace(Point(), **{name: value}) for value in CURVES[name]]
            rows = [
                [str(getattr(point, name)), *row(point, folder, args.rounds)] for point in points
            ]
            print(table(NAMES.get(name, name), [f"{PLAIN}, ms", *RECORDINGS], rows), flush=True)


if __name__ == "__main__":
    main()
