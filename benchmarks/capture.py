"""What recording costs, as ratios to the same program uninstrumented: a Markdown table for each size.

    python benchmarks/capture.py [--size S M] [--dtype float32] [--rounds N] [--peer-rounds N]

One round runs every variant once, in turn, in one process; each figure is the median over the rounds of that
round's ratio, so that a machine that drifts or is shared does not favour anyone. The first round is dropped. Other
tools (`peers.py`) leave hooks behind: each is measured afterwards, in a process of its own, in rounds of an
uninstrumented run and one under the tool.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Run, Work
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld
from llmdebug_nb.kernels import native

logging.set_verbosity_error()
SIZES = {
    "S": {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "vocab_size": 4096},
    "M": {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32000},
}  # fmt: skip
PROMPT, DECODE = 128, 8
COLUMNS = ("variant", "while recording", "with start and stop", "lowest–highest", "ms", "bytes on disk / of tensors")
PATIENCE = 1800  # seconds that a tool may take


# -- the work -----------------------------------------------------------------------------------


def build(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model of that size, the same one every time."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).to(dtype).eval()


def prompt() -> torch.Tensor:
    return torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def generate(model: LlamaForCausalLM) -> None:
    """Prefill and greedy decode steps."""
    ids = prompt()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DECODE + 1, do_sample=False)


def forward(model: LlamaForCausalLM) -> None:
    """Prefill alone."""
    with torch.no_grad():
        model(**forward_inputs())


def forward_inputs() -> dict[str, Any]:
    return {"input_ids": prompt(), "use_cache": False}


def training_step(model: LlamaForCausalLM) -> None:
    """A loss and its gradients."""
    ids = prompt()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


WORKS: dict[str, Callable[[LlamaForCausalLM], None]] = {"generate": generate, "forward": forward}


# -- what is measured ---------------------------------------------------------------------------


@dataclass
class Variant:
    """``run`` does the work and what belongs to it. ``base``: the variant that it is held against, none for a base."""

    name: str
    work: Work
    run: Run
    base: str | None = None
    keeps: bool = False


@dataclass
class Row:
    """What was measured of a variant, a figure a round; ``said``: why there is none."""

    name: str
    recording: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stored: float | None = None
    said: str = ""


def plain(work: Work) -> None:
    work()


def empty_hooks(model: LlamaForCausalLM, work: Work) -> None:
    """The floor of recording: hooks of the same kind on every module that do nothing."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda *_: None, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda *_: None, with_kwargs=True))
    work()
    for handle in handles:
        handle.remove()


def recorded(model: LlamaForCausalLM, folder: Path, options: dict[str, Any], work: Work) -> None:
    with ld.dump(model, name="run", path=folder, **options):
        work()


def plain_write(folder: Path, like: Row, work: Work) -> None:
    """The floor of keeping tensors: as many bytes as ``like`` left on the disk, in large pieces to one file."""
    work()
    folder.mkdir(parents=True, exist_ok=True)
    raw = os.urandom(1 << 18)
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(like.nbytes >> 18):
            file.write(raw)


def variants(model: LlamaForCausalLM, folder: Path) -> list[Variant]:
    """Return all but the peers, in the order of the table."""
    figures = {"stats_only": True, "tokens": "all"}
    values = {"tokens": "all"}
    options = {
        "statistics, modules": figures,
        "statistics, module+aten": {**figures, "mode": "module+aten"},
        "statistics, api": {**figures, "mode": "api"},
        "statistics, module+api+aten": {**figures, "mode": "module+api+aten"},
        "all tensors, modules": values,
        "all tensors of token 0 only, modules": {"tokens": "0"},
    }
    work, base = partial(generate, model), "uninstrumented"
    found = [Variant(base, work, plain), Variant("empty hooks (floor)", work, partial(empty_hooks, model), base)]
    for name, said in options.items():
        keeps = "stats_only" not in said
        found.append(Variant(name, work, partial(recorded, model, folder, said), base, keeps))
    work, base = partial(training_step, model), "training step, uninstrumented"
    found.append(Variant(base, work, plain))
    for name in ("statistics, modules", "statistics, module+aten"):
        run = partial(recorded, model, folder, options[name])
        found.append(Variant(f"training step, {name}, with gradients", work, run, base))
    return found


# -- measuring ----------------------------------------------------------------------------------


def seconds(variant: Variant) -> tuple[float, float]:
    """Return how long the work took, not a number where the variant didn't call it, and the whole."""
    taken = math.nan

    def work() -> None:
        nonlocal taken
        begin = time.perf_counter()
        variant.work()
        taken = time.perf_counter() - begin

    gc.collect()  # what the one before left is not this one's to clear
    begin = time.perf_counter()
    variant.run(work)
    return taken, time.perf_counter() - begin


def measure(found: list[Variant], folder: Path, rounds: int) -> list[Row]:
    """Run the variants, all in each round, and one round more at the start that does not count."""
    rows = [Row(variant.name) for variant in found]
    for number in range(rounds + 1):
        bases: dict[str, float] = {}
        for variant, row in zip(found, rows, strict=True):
            inside, whole = seconds(variant)
            base = bases.setdefault(variant.base or variant.name, whole)
            if number:
                row.recording.append(inside / base)
                row.whole.append(whole / base)
                row.seconds.append(whole)
            elif variant.keeps:
                row.stored = stored(folder)
            shutil.rmtree(folder, ignore_errors=True)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return rows


def stored(folder: Path) -> float:
    """Return the bytes that a run takes on the disk, over those of all tensors that it recorded."""
    rows = ld.open_run(folder / "run").query("SELECT shape, dtype, count(*) FROM rows GROUP BY shape, dtype")
    tensors = sum(math.prod(json.loads(shape)) * getattr(torch, dtype).itemsize * n for shape, dtype, n in rows)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / tensors
