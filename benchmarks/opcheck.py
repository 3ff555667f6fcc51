"""How long a check of operators takes, and which share of the operators of models it checks.

python benchmarks/opcheck.py --calls 10000 --jobs 1 2      time: a Markdown table
python benchmarks/opcheck.py --coverage                    the models of the zoo
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from zoo.models import ARCHITECTURES, build, cast, decode, encode

import llmdebug_nb as ld


def recording(calls: int, folder: str) -> ld.Run:
    """Record forward calls of a small model, operator by operator, until there are enough."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 1000, (1, 32))
    with torch.no_grad(), ld.dump(model, name="ops", mode="aten", path=folder, tokens="all") as run:
        model(ids)
        each = len(run.operators())
        for _ in range(calls // each):
            model(ids)
    return run


def coverage(folder: str, precisions: tuple[str, ...] = ("float32", "bfloat16")) -> None:
    """Print the share of recorded operators of each model of the zoo that is checked."""
    print("|model|dtype|level|calls|checked|wrong|not checked|\n|---|---|---|---|---|---|---|")
    for name, precision, mode in itertools.product(ARCHITECTURES, precisions, ("api", "aten")):
        model = cast(build(name, 0), getattr(torch, precision))
        work = encode if model.config.is_encoder_decoder else decode
        with ld.dump(model, name="zoo", mode=mode, path=folder, tokens="all") as run:
            try:
                work(model, 0)
            except (ValueError, TypeError, AttributeError):
                encode(model, 0)
        result = ld.opcheck(run, output=folder, progress=False).result
        share = f"{result.checked / max(result.total, 1):.1%}"
        why = ", ".join(f"{reason} {count}" for reason, count in result.not_checked.items())
        print(
            f"|{name}|{precision}|{mode}|{result.total:,}|{share}|{len(result.wrong)}|{why}|",
            flush=True,
        )
        for each in result.wrong:
            print(f"    {each.key} {[o.why for o in each.outputs]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--coverage", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        coverage(folder) if args.coverage else times(args.calls, args.jobs, folder)


def times(calls: int, jobs: list[int], folder: str) -> None:
    """Print the seconds that a check takes with so many processes."""
    run = recording(calls, folder)
    print("|calls|processes|seconds|ms a call|checked|\n|---|---|---|---|---|")
    for count in jobs:
        start = time.perf_counter()
        result = ld.opcheck(run, jobs=count, output=folder, progress=False).result
        took = time.perf_counter() - start
        each = 1e3 * took / result.total
        print(f"|{result.total:,}|{count}|{took:.1f}|{each:.2f}|{result.checked:,}|", flush=True)
        assert not result.wrong


if __name__ == "__main__":
    main()
