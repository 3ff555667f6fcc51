"""What the statistics of one CPU tensor cost, in µs: C kernel, torch, fingerprint, a plain read.

    python benchmarks/summaries.py [--rounds N] [--threads N]

One round runs every variant in turn. Each figure is the median over the rounds, so a machine that
drifts or is shared favours nobody.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.raw import memory, to_bytes
from llmdebug_nb.core.kernels.summary import figures, torch_figures

SHAPES = [(1, 1, 256), (1, 1, 1024), (1, 128, 1024)]
DTYPES = [torch.float32, torch.bfloat16]


def variants(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    kernel, data, room = native.kernel(), to_bytes(tensor), torch.empty_like(tensor)
    found = {"sum (torch)": tensor.sum, "copy (torch)": lambda: room.copy_(tensor)}
    if kernel is not None:
        address, nbytes = memory(tensor)
        found["C kernel"] = lambda: kernel(address, nbytes, native.KINDS[tensor.dtype])
        found["figures"] = lambda: figures(tensor)
    found["torch path"] = lambda: torch_figures(tensor)
    found["to_bytes"] = lambda: to_bytes(tensor)
    found["xxh3"] = lambda: fingerprint(data)
    return found


def microseconds(work: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the C kernel has one")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if native.why_not():
        print(f"No C kernel: {native.why_not()}\n")
    names = list(variants(torch.zeros(1)))
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), median of {args.rounds} rounds, µs\n"
    )
    print(f"|tensor|{'|'.join(names)}|\n|---|{'---|' * len(names)}")
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            work = variants(tensor)
            times = max(10, 100_000 // tensor.numel())
            rounds = [
                {name: microseconds(work[name], times) for name in names}
                for _ in range(args.rounds)
            ]
            medians = [statistics.median(row[name] for row in rounds) for name in names]
            cells = [f"{shape} {str(dtype).removeprefix('torch.')}", *(f"{m:.2f}" for m in medians)]
            print(f"|{'|'.join(cells)}|")


if __name__ == "__main__":
    main()
