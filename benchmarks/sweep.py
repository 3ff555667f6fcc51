"""Check the operators that opcheck knows on torch's own samples: as they are, and with a fault.

    python benchmarks/sweep.py [--every 1] [--operators softmax,linear] [--samples 2]
        [--dtypes float32,bfloat16,float16]

The samples are those of torch's OpInfo database. Each is recorded by `ld.dump`, forward and
backward where the operator has a gradient, and checked by `ld.opcheck` twice: as it was recorded,
and with each output changed by a tenth (numbers of places by one, flags to their opposite) when it
is read. Nothing may be wrong at first, and everything then, unless rounding explains that much.
What torch's own kernels are known to compute wrongly (`FAULTS_OF_TORCH`) is counted apart.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import llmdebug_nb as ld
from llmdebug_nb.core.records import Record
from llmdebug_nb.replay.checks import CallCheck
from llmdebug_nb.replay.operators import REPLAYED, bare_name
from llmdebug_nb.store.run import Run

DTYPES = torch.float32, torch.bfloat16, torch.float16
# torch 2.13: operators of its CPU that are wrong in 16 bits, see docs/opcheck.md
FAULTS_OF_TORCH = frozenset(
    (name, dtype)
    for name, dtypes in {
        "linalg.vector_norm": (torch.float16,),
        "matrix_exp": (torch.bfloat16, torch.float16),
        "nn.functional.soft_margin_loss": (torch.float16,),
    }.items()
    for dtype in dtypes
)
LARGEST = 1 << 16  # elements of an input; larger samples only take time


@dataclass
class Seen:
    """What a sweep has seen. ``wrong``, ``missed``: calls that are right, and faults, in words.

    ``unchecked``: how many calls were not checked, by operator and reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def operators(every: int = 1, only: frozenset[str] = frozenset()) -> list[OpInfo]:
    """Return torch's descriptions of the operators that are replayed, in a seeded order."""
    known = [op for op in op_db if _bare(op) in REPLAYED]
    random.Random(0).shuffle(known)
    return [op for op in known[::every] if not only or op.name in only]


def _bare(op: OpInfo) -> str:
    return bare_name(f"Torch.{op.name.removeprefix('nn.functional.')}")


class One(nn.Module):
    """A model of one operator."""

    def __init__(self, op: OpInfo) -> None:
        super().__init__()
        self.op = op

    def forward(self, sample: SampleInput) -> Any:
        return self.op.op(sample.input, *sample.args, **sample.kwargs)


def samples(op: OpInfo, dtype: torch.dtype, count: int) -> list[SampleInput]:
    """Return some samples of an operator, with gradients where it has one."""
    torch.manual_seed(0)
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    made = op.sample_inputs("cpu", dtype, requires_grad=gradients)
    fit = (s for s in made if isinstance(s.input, torch.Tensor) and 0 < s.input.numel() <= LARGEST)
    return list(islice(fit, count))


def recorded(op: OpInfo, sample: SampleInput, folder: str) -> Run:
    """Record one call and, where it has a gradient, its backward pass."""
    model = One(op)
    with ld.dump(model, name="sample", mode="api", path=folder) as run:
        result = model(sample)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        roots = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
        if roots:
            with torch._C.DisableTorchFunction():  # no operators of the sample
                torch.autograd.backward(roots, [torch.randn_like(y) for y in roots])
    return run


def changed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a fault in each element, if it has any."""
    if x.dtype == torch.bool:
        return ~x
    if not (x.is_floating_point() or x.is_complex()):
        return x + 1
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    return torch.where((x == 0) | ~x.isfinite(), 1.0, 1.1 * wide).to(x.dtype)


@contextmanager
def faulty() -> Iterator[None]:
    """Change what runs hold as outputs."""
    load = Run.load

    def with_fault(self: Run, record: Record) -> torch.Tensor:
        x = load(self, record)
        return changed(x) if record.site.role == "output" else x

    with patch.object(Run, "load", with_fault):
        yield


def sweep(chosen: list[OpInfo], dtypes: tuple[torch.dtype, ...], count: int, seen: Seen) -> None:
    """Check samples of operators, and add what was seen."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in chosen:
            for dtype in dtypes:
                for sample in samples(op, dtype, count) if op.supports_dtype(dtype, "cpu") else []:
                    _check(op, dtype, sample, folder, seen)


def _check(op: OpInfo, dtype: torch.dtype, sample: SampleInput, folder: str, seen: Seen) -> None:
    try:
        run = recorded(op, sample, folder)
    except (RuntimeError, ld.LLMDebugError):
        seen.counts["not recorded"] += 1
        return
    for call in ld.opcheck(run, progress=False, output=folder).result.calls:
        if call.reason:
            seen.unchecked[f"{op.name}: {call.reason}: {call.detail}"] += 1
        if call.verdict == "wrong" and (op.name, dtype) in FAULTS_OF_TORCH:
            seen.counts["a fault of torch"] += 1
            continue
        seen.counts[call.reason or call.verdict] += 1
        if call.verdict == "wrong":
            seen.wrong.append(_told(op, dtype, call))
    with faulty():
        for call in ld.opcheck(run, progress=False, output=folder).result.calls:
            if call.verdict == "right" and any(0 not in output.shape for output in call.outputs):
                seen.missed.append(_told(op, dtype, call))
            seen.counts["fault found"] += call.verdict == "wrong"


def _told(op: OpInfo, dtype: torch.dtype, call: CallCheck) -> str:
    what = "; ".join(f"{output.why} {list(output.shape)}" for output in call.outputs)
    return f"{op.name} {dtype} {call.key.phase} {call.op}: {what}"


def main() -> int:
    """Return 1 if a right call is called wrong; rounding may explain a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="one of so many operators")
    parser.add_argument("--operators", default="", help="some of them, by commas")
    parser.add_argument("--samples", type=int, default=2, help="of each operator and dtype")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = operators(args.every, frozenset(filter(None, args.operators.split(","))))
    dtypes = tuple(getattr(torch, name) for name in args.dtypes.split(","))
    seen = Seen()
    try:
        for n, op in enumerate(chosen):
            sweep([op], dtypes, args.samples, seen)
            print(f"\r{n + 1} of {len(chosen)} operators", end="", flush=True)
    finally:
        print("", "right calls that are called wrong:", *seen.wrong, sep="\n  ")
        print("faults that rounding explains:", *seen.missed, sep="\n  ")
        print("not checked:", *(f"{n:,} {why}" for why, n in seen.unchecked.items()), sep="\n  ")
        seen.counts["fault not found"] = len(seen.missed)
        print(*(f"{what}: {count:,}" for what, count in seen.counts.most_common()), sep="\n")
    return int(bool(seen.wrong))


if __name__ == "__main__":
    sys.exit(main())
