"""What launching a program costs it: `python benchmarks/launch.py [ROUNDS]`.

Each program runs plainly, then by `llmdebug dump`, then inside a launched program (with everything
but the command itself), in turn. The figures are medians in milliseconds, of wall time and of the
CPU time of all processes, which a shared machine disturbs less. The program with a model is
recorded with statistics only, so the figures show the start.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmdebug_nb.app.launching.environment import environment
from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.core.options import DumpOptions

PROGRAMS = {
    "a Python that imports nothing": "pass",
    "one that imports torch": "import torch",
    "one that runs a model": "import torch; torch.nn.Linear(4, 4)(torch.ones(1, 4))",
}
DUMP = "import sys; from llmdebug_nb.cli import main; sys.exit(main(sys.argv[1:]))"


def _seconds(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command, env=variables, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(program: str, rounds: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds: plain, inside a launched program, and launched."""
    plain = {**os.environ, "LLMDEBUG_RUNS": str(folder / "runs")}
    plain.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled modules
    handover = Handover(Path(tempfile.mkdtemp(dir=folder)))
    handover.write_options({**DumpOptions(stats_only=True).given(), "path": str(folder / "inside")})
    inside = environment(handover, plain, None)
    command = [sys.executable, "-c", program]
    ways = {
        "plain": (command, plain),
        "inside": (command, inside),
        "launched": ([sys.executable, "-c", DUMP, "dump", "-sd", "--", *command], plain),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, (words, variables) in ways.items():
            seconds = _seconds(words, variables)
            if number:  # the first round compiles, and warms the disk
                taken[way].append(seconds)
    return {
        way: (_middle([w for w, _ in all_]), _middle([c for _, c in all_]))
        for way, all_ in taken.items()
    }


def _middle(seconds: list[float]) -> float:
    return statistics.median(seconds)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print("| program | plain, wall / CPU | inside a launched program | launched |")
    print("| --- | --- | --- | --- |")
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(program, rounds, Path(folder))
        plain = found["plain"]
        cells = [f"{plain[0] * 1e3:.0f} / {plain[1] * 1e3:.0f} ms"]
        for way in ("inside", "launched"):
            more = [(found[way][i] - plain[i]) * 1e3 for i in (0, 1)]
            cells.append(f"{more[0]:+.0f} / {more[1]:+.0f} ms")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
