"""How long a dump takes to open: `python benchmarks/opening.py [RECORDS ...]`.

Statistics alone. The best of some rounds, in milliseconds: opening, the first fifty records, and
the line that a notebook shows, which counts all records and steps.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scale import write

import llmdebug_nb as ld
from llmdebug_nb.core.records import Record

ROUNDS, PAGE = 7, 50


def first_page(path: Path) -> list[Record]:
    return list(ld.open_run(path).records(n=PAGE))


def shown(path: Path) -> str:
    return repr(ld.open_run(path))


def best(work: Callable[[Path], object], path: Path) -> float:
    """Return the shortest time in milliseconds."""
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work(path)
        taken.append(time.perf_counter() - begun)
    return 1e3 * min(taken)


def main() -> None:
    print("|records|open|first page|line that a notebook shows|\n|---|---|---|---|")
    for records in [int(word) for word in sys.argv[1:]] or [100_000, 1_000_000]:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), "run", records, 1, other=False)
            opened = best(ld.open_run, path)
            page = best(first_page, path) - opened
            line = best(shown, path) - opened
        print(f"|{records:,}|{opened:.1f} ms|{page:.1f} ms|{line:.0f} ms|", flush=True)


if __name__ == "__main__":
    main()
