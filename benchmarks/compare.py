"""What comparing and explaining cost, as ratios to the forward passes and to reading both dumps.

    python benchmarks/compare.py [--hidden 256 1024] [--rounds 5] [--threads 1]

Llama with 12 layers, a prefill of 32 tokens and 3 decode steps; in mine the attention of one layer
has a wrong scale. One round does everything in turn, in one process. Each figure is the median over
the rounds, of which the first is dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld

logging.set_verbosity_error()
LAYERS, PROMPT, TOKENS = 12, 32, 4
MODES = {"module": ("module",), "module + api": ("module", "api")}
COLUMNS = (
    "hidden",
    "recorded",
    "rows",
    "MB",
    "two forward passes, s",
    "reading, s",
    "compare and blame, s",
    "ratio",
)


def build(hidden: int) -> LlamaForCausalLM:
    """Return the model of that width, the same one every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_attention_heads=hidden // 32,
        vocab_size=32000,
        initializer_range=0.06,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: LlamaForCausalLM) -> None:
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with contextlib.redirect_stderr(io.StringIO()):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read(run: Any) -> None:
    """Read every tensor of a dump once."""
    for record in run.records():
        if record.payload is not None:
            run.load(record).sum()


def line(hidden: int, kind: str, rounds: int) -> tuple[str, ...]:
    """Return one line of the table."""
    golden, mine = build(hidden), build(hidden)
    mine.model.layers[LAYERS // 2].self_attn.scaling *= 1.5
    figures: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("golden", golden), ("mine", mine)):
            with ld.dump(model, name=name, path=folder, tokens="all", mode=MODES[kind]):
                generate(model)
        for _ in range(rounds + 1):
            # opened anew each time: what one round has looked up shall not help the next
            runs = [ld.open_run(Path(folder, name)) for name in ("golden", "mine")]
            passes = seconds(lambda: [generate(model) for model in (golden, mine)])
            reading = seconds(lambda runs=runs: [read(run) for run in runs])
            runs = [ld.open_run(Path(folder, name)) for name in ("golden", "mine")]
            reports: list[Any] = []
            compared = seconds(
                lambda runs=runs, reports=reports: reports.append(
                    ld.compare(*runs, model=mine, progress=False)
                )
            )
            figures.append((passes, reading, compared))
        rows = len(reports[0].differences)
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert reports[0].findings, "nothing was blamed"
    medians = [statistics.median(column) for column in zip(*figures[1:], strict=True)]
    ratio = statistics.median(
        compared / (passes + reading) for passes, reading, compared in figures[1:]
    )
    return (
        str(hidden),
        kind,
        f"{rows:,}",
        f"{nbytes / 1e6:.0f}",
        *(f"{m:.2f}" for m in medians),
        f"{ratio:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    machine = f"{given.threads} thread(s), torch {torch.__version__}"
    print(f"{LAYERS} layers, {TOKENS} tokens; {machine}; median of {given.rounds} rounds\n")
    for cells in (COLUMNS, ["---"] * len(COLUMNS)):
        print(f"|{'|'.join(cells)}|")
    for hidden in given.hidden:
        for kind in MODES:
            print(f"|{'|'.join(line(hidden, kind, given.rounds))}|", flush=True)


if __name__ == "__main__":
    main()
