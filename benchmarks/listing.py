"""How long a dump of many files takes to open, for each layout, and to read its statistics.

    python benchmarks/listing.py [--files 50000] [--read 500] [--layouts npy,fx]

Every file holds the same tensor of 4 KB and is a hard link, so the disk has little part in it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import llmdebug_nb as ld
from llmdebug_nb.store.layouts import atb_bin, ge_file

X = torch.arange(1024.0).reshape(32, 32)


def names(layout: str, files: int) -> Iterator[str]:
    """Yield the names that the files of a layout have: two tensors a call, ten steps."""
    calls = range(files // 20)
    for step, call in itertools.product(range(10), calls):
        if layout == "npy":
            yield f"layer{call}/{step}_in.npy"
            yield f"layer{call}/{step}_out.npy"
        elif layout == "msit":
            yield f"0_1/{step}/root.layers.{call}/input_0.pth"
            yield f"0_1/{step}/root.layers.{call}/output.pth"
        elif layout == "fx":
            for way in ("INPUT", "OUTPUT"):
                yield f"{step}/graph_1_0/mm_{call}-aten.mm.default.{way}.0.{call}.npy"
        elif layout == "atb":
            yield f"tensors/0_1/{step}/{call}_Linear/before/intensor0.bin"
            yield f"tensors/0_1/{step}/{call}_Linear/after/outtensor0.bin"
        else:
            for half in (0, 1):
                yield f"0/model/1/{step}/Add.Add_{call}_{half}.1.3.{call}"


def content(layout: str) -> bytes:
    """Return the file of a layout that holds X."""
    out = io.BytesIO()
    if layout in ("npy", "fx"):
        np.save(out, X.numpy())
    elif layout == "msit":
        torch.save(X, out)
    elif layout == "atb":
        return atb_bin.encode(X)
    else:
        return ge_file.encode("Add", [X], [(X, "Add")])
    return out.getvalue()


def measure(layout: str, files: int, read: int, home: Path) -> list[str]:
    """Return a row: tensors, seconds to open the dump, milliseconds to read a tensor's figures."""
    folder, seed = home / layout, home / f"{layout}.seed"
    seed.write_bytes(content(layout))
    for name in names(layout, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(seed, folder / name)
    start = time.perf_counter()
    run = ld.open_run(folder)
    opened = time.perf_counter() - start
    start = time.perf_counter()
    found = len(list(run.records(n=read)))
    return [
        layout,
        f"{len(run):,}",
        f"{opened:.1f}",
        f"{(time.perf_counter() - start) / found * 1e3:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--read", type=int, default=500, help="tensors whose figures are read")
    parser.add_argument("--layouts", default="npy,fx,msit,atb,ge")
    given = parser.parse_args()
    print("|layout|tensors|s to open|ms a tensor|\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        for layout in given.layouts.split(","):
            print(f"|{'|'.join(measure(layout, given.files, given.read, Path(home)))}|")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
