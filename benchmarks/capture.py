"""What recording costs, as ratios to the same program without it: a Markdown table for each size.

    python benchmarks/capture.py [--size S M] [--dtype float32] [--rounds N] [--peer-rounds N]

One round runs every variant once, in turn, in one process. Each figure is the median of the rounds'
ratios, so a machine that drifts or is shared favours nobody. The first round is dropped. Other
tools (`peers.py`) leave hooks behind: each is measured afterwards, in a process of its own, in
rounds of a run without and a run with the tool.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Run, Work
from transformers import LlamaConfig, LlamaForCausalLM, logging

import llmdebug_nb as ld
from llmdebug_nb.capture.tape import torch_observer
from llmdebug_nb.core.kernels import native

logging.set_verbosity_error()
SIZES = {
    "S": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    },
    "M": {
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
}
PROMPT, DECODE = 128, 8
NOISE = os.urandom(1 << 18)
COLUMNS = (
    "variant",
    "while recording",
    "with start and stop",
    "lowest–highest",
    "ms",
    "bytes on disk / of tensors",
)


# -- the work -----------------------------------------------------------------------------------


def build(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model of that size, the same one every time."""
    return llama(SIZES[size], dtype)


def llama(shape: Mapping[str, int], dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model of that shape, the same one every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def prompt(tokens: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))


def generate(model: LlamaForCausalLM, tokens: int = PROMPT, more: int = DECODE) -> None:
    """Prefill and greedy decode steps."""
    ids = prompt(tokens)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=more + 1, do_sample=False
    )


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


# -- what is measured ---------------------------------------------------------------------------


@dataclass
class Variant:
    """A way to do some work.

    ``run``: does the work, with setup and teardown. ``base``: the variant it is compared with; None
    for a base. ``stored``: bytes on the disk over those of the recorded tensors, if it keeps them.
    """

    name: str
    work: Work
    run: Run
    base: str | None = None
    stored: float | None = None


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


def without(run: Run) -> Run:
    """Let a dispatch mode see operators, as if the observer had not been built."""

    def by_mode(work: Work) -> None:
        observer = torch_observer.observer
        torch_observer.observer = lambda: None
        try:
            run(work)
        finally:
            torch_observer.observer = observer

    return by_mode


def plain_write(folder: Path, nbytes: int, work: Work) -> None:
    """The floor of keeping tensors: so many bytes to one file, in large pieces, after the work."""
    work()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(nbytes // len(NOISE)):
            file.write(NOISE)


def room(model: LlamaForCausalLM, folder: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Return what a run takes on the disk, and what the tensors that it recorded take, in bytes."""
    recorded(model, folder, options, partial(generate, model))
    summaries = [record.summary for record in ld.open_run(folder / "run").records()]
    tensors = sum(s.numel * getattr(torch, s.dtype).itemsize for s in summaries)
    disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return disk, tensors


def ours(model: LlamaForCausalLM, folder: Path) -> list[Variant]:
    """Return what is measured in one process, in the order of the table."""

    def recording(**options: Any) -> Run:
        return partial(recorded, model, folder, options)

    disk, tensors = room(model, folder, {"tokens": "all"})
    disk_of_first, tensors_of_first = room(model, folder, {"tokens": "0"})
    figures = {"stats_only": True, "tokens": "all"}
    modules, operators = recording(**figures), recording(mode="module+aten", **figures)
    work, base = partial(generate, model), "uninstrumented"
    step, step_base = partial(training_step, model), "training step, uninstrumented"
    all_levels = recording(mode="module+api+aten", **figures)
    told, by_mode = torch_observer.observer() is not None, "statistics, module+aten"
    write, first = partial(plain_write, folder, disk), disk_of_first / tensors_of_first
    return [
        Variant(base, work, plain),
        Variant("empty hooks (floor)", work, partial(empty_hooks, model), base),
        Variant("statistics, module", work, modules, base),
        Variant(by_mode, work, operators, base),
        *(
            [Variant(f"{by_mode}, by a dispatch mode", work, without(operators), base)]
            if told
            else []
        ),
        Variant("statistics, api", work, recording(mode="api", **figures), base),
        Variant("statistics, module+api+aten", work, all_levels, base),
        Variant("all tensors, module", work, recording(tokens="all"), base, disk / tensors),
        Variant("plain write of as many bytes (floor)", work, write, base),
        Variant("all tensors of token 0 only, module", work, recording(tokens="0"), base, first),
        Variant(step_base, step, plain),
        Variant("training step, statistics with gradients, module", step, modules, step_base),
        Variant(
            "training step, statistics with gradients, module+aten", step, operators, step_base
        ),
    ]


def beside(name: str, size: str, dtype: torch.dtype, folder: Path) -> list[Variant]:
    """Return an uninstrumented run and one under another tool, which has a model to itself."""
    work = {"generate": generate, "forward": forward}[PEERS[name].work]
    model, base = build(size, dtype), "uninstrumented"
    run = PEERS[name].start(model, forward_inputs(), folder)
    return [
        Variant(base, partial(work, build(size, dtype)), plain),
        Variant(name, partial(work, model), run, base),
    ]


# -- measuring ----------------------------------------------------------------------------------


@dataclass
class Row:
    """What was measured of a variant, a figure a round; ``said``: why there is none."""

    name: str
    recording: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stored: float | None = None
    said: str = ""


def timed(variant: Variant) -> tuple[float, float]:
    """Return the seconds of the work (NaN if the variant didn't call it), and of the whole."""
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


def measure(variants: list[Variant], folder: Path, rounds: int) -> list[Row]:
    """Run the variants, all in each round, and one round more at the start that does not count."""
    rows = [Row(variant.name, stored=variant.stored) for variant in variants]
    for number in range(rounds + 1):
        bases: dict[str, float] = {}
        for variant, row in zip(variants, rows, strict=True):
            inside, whole = timed(variant)
            base = bases.setdefault(variant.base or variant.name, whole)
            if number:
                row.recording.append(inside / base)
                row.whole.append(whole / base)
                row.seconds.append(whole)
            shutil.rmtree(folder, ignore_errors=True)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return rows


def measure_peer(name: str, args: argparse.Namespace, folder: Path) -> Row:
    """Measure another tool here, or say why not."""
    try:
        variants = beside(name, args.size[0], getattr(torch, args.dtype), folder)
        return measure(variants, folder, args.peer_rounds)[1]
    except ImportError as error:
        return Row(name, said=f"not installed ({error})")
    except Exception as error:
        return Row(name, said=f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def measure_peer_apart(name: str, size: str, args: argparse.Namespace) -> Row:
    """Measure another tool in a process of its own."""
    print(name, file=sys.stderr)
    said = {
        "peer": name,
        "size": size,
        "dtype": args.dtype,
        "threads": args.threads,
        "peer-rounds": args.peer_rounds,
    }
    options = [str(word) for option, value in said.items() for word in (f"--{option}", value)]
    command = [sys.executable, __file__, *options]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=args.patience, check=True
        )
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Row(name, said=f"given up after {args.patience} s")
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        return Row(name, said=f"failed: {error}")


# -- showing ------------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    if row.said:
        return [row.name, "–", row.said.replace("|", "/"), "", "", ""]
    recording, whole = statistics.median(row.recording), statistics.median(row.whole)
    return [
        row.name,
        "–" if math.isnan(recording) else f"{recording:.2f}",
        f"{whole:.2f}",
        f"{min(row.whole):.2f}–{max(row.whole):.2f}",
        f"{1e3 * statistics.median(row.seconds):.0f}",
        "" if row.stored is None else f"{row.stored:.2f}",
    ]


def table(size: str, rows: list[Row], args: argparse.Namespace) -> str:
    """Return the Markdown of one size."""
    why_not = native.why_not()
    layers, hidden = SIZES[size]["num_hidden_layers"], SIZES[size]["hidden_size"]
    facts = [
        f"{size}: {layers} layers of hidden size {hidden}",
        f"{args.dtype}, {args.threads} thread(s), torch {torch.__version__}",
        f"median of {args.rounds} rounds ({args.peer_rounds} for other tools)",
        f"C kernel {'not used: ' + why_not if why_not else 'used'}",
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(["; ".join(facts), "", *(f"|{'|'.join(line)}|" for line in lines), ""])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--peer-rounds", type=int, default=2, help="of other tools; 0 leaves them out"
    )
    parser.add_argument(
        "--patience", type=int, default=1800, help="seconds that another tool may take"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--peer", choices=PEERS, help="measure this one alone, and print its row as JSON"
    )
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs"
        if args.peer:
            print(json.dumps(asdict(measure_peer(args.peer, args, folder))))
            return
        for size in args.size:
            rows = measure(
                ours(build(size, getattr(torch, args.dtype)), folder), folder, args.rounds
            )
            if args.peer_rounds:
                rows += [measure_peer_apart(name, size, args) for name in PEERS]
            print(table(size, rows, args), flush=True)


if __name__ == "__main__":
    main()
