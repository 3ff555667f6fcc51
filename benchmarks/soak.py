"""A long program with recording going on and off: its memory stays flat, and its results the same.

    python benchmarks/soak.py [--steps 5000] [--tokens 2000]

A tiny model is trained, another one generates tokens: each once as it is, and once with blocks that
record it in all modes in turn. Every loss, weight and token must have the same bits. Memory is that
of the process, after each block; its growth is that from the first fourth of the blocks, in which
caches fill, to the last one. The exit status is 1 if a bit differs or memory grows.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld

logging.set_verbosity_error()
BLOCK = 25  # steps or tokens of a block; every second block is recorded
GROWTH = 8.0  # MiB: what the allocator's arenas make a steady program vary by, seen without us
MODES = (
    {"mode": "module"},
    {"mode": "module+api+aten", "phase": "both"},
    {"mode": "module", "stats_only": True, "phase": "both"},
)
Record = Callable[[], AbstractContextManager[object]]


def resident() -> float:
    """Return the memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def blocks(count: int, record: Record, memory: list[float]) -> Iterator[int]:
    """Yield the number of each step; every second block of them runs in ``record()``."""
    for first in range(0, count, BLOCK):
        with record() if first // BLOCK % 2 else nullcontext():
            yield from range(first, min(first + BLOCK, count))
        memory.append(resident())


def trained(steps: int, record: Callable[[nn.Module], Record], memory: list[float]) -> list[bytes]:
    """Train a model; return the bits of each loss, and of the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bits = []
    for _ in blocks(steps, record(model), memory):
        x = torch.randn(8, 16)
        loss = (model(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits.append(loss.detach().numpy().tobytes())
    return bits + [p.detach().numpy().tobytes() for p in model.parameters()]


def generated(
    tokens: int, record: Callable[[nn.Module], Record], memory: list[float]
) -> list[bytes]:
    """Generate tokens, a block of them at a time; return their bits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, bos_token_id=1, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, bits = torch.tensor([[3, 5, 7]]), []
    for number in blocks(tokens, record(model), memory):
        if number % BLOCK == 0:
            new = model.generate(ids, max_new_tokens=min(BLOCK, tokens - number), do_sample=True)
            bits.append(new.numpy().tobytes())
            ids = new[:, -3:]
    return bits


def recording(folder: str, model: nn.Module) -> Record:
    """Return what records a block of a model, in one mode after the other, and forgets it."""
    modes = itertools.cycle(MODES)

    @contextmanager
    def record() -> Iterator[None]:
        with ld.dump(model, name="soak", path=folder, tokens="all", **next(modes)) as run:
            yield
        assert run.info()["complete"], run.info()
        ld.delete_run(run)

    return record


def soaked(what: str, count: int, work: Callable[..., list[bytes]]) -> bool:
    """Run a program with and without recordings, print the figures, return whether all is well."""
    began = time.monotonic()
    plain: list[float] = []
    expected = work(count, lambda model: nullcontext, plain)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        got = work(count, lambda model: recording(folder, model), memory)
    fourth = max(1, len(memory) // 4)
    growth = statistics.median(memory[-fourth:]) - statistics.median(memory[:fourth])
    own = statistics.median(plain[-fourth:]) - statistics.median(plain[:fourth])
    settled = range(fourth, len(memory))
    slope = statistics.linear_regression(settled, memory[fourth:]).slope if len(settled) > 1 else 0
    same = got == expected
    print(
        f"{count} {what}, {len(memory) // 2} blocks recorded: results"
        f" {'are the same bit by bit' if same else 'DIFFER'}; memory grows by {growth:.1f} MiB"
        f" ({own:.1f} MiB without recording), {slope * 1000 / BLOCK:.3f} MiB per 1,000 {what} once"
        f" caches are full; {memory[-1]:.0f} MiB at the end; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return same and growth - max(own, 0) <= GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000, help="of training")
    parser.add_argument("--tokens", type=int, default=2000, help="generated")
    arguments = parser.parse_args()
    good = [
        soaked("steps", arguments.steps, trained),
        soaked("tokens", arguments.tokens, generated),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
