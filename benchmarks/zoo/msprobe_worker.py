"""Dump and compare cases with msprobe, in the Python that has it.

The cases come as JSON on stdin; a line for each goes to stdout. Each program is recorded in its own
fork, because msprobe has one debugger per process; every call of the model is a step, at level mix.
msprobe blames the first row of the first step that its ``compare`` calls an error; a warning is
none.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["MSPROBE_LOG_LEVEL"] = "4"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.compare.pt_compare import pt_compare

from zoo.entry import Case, Program
from zoo.sets import SETS

CONFIG = {
    "task": "tensor",
    "rank": [],
    "step": [],
    "level": "mix",
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
}
OPTIONS = {
    **dict.fromkeys(("data_mapping", "cell_mapping", "layer_mapping", "backend", "config")),
    **dict.fromkeys(("fuzzy_match", "diff_analyze", "xlsx", "consistent_check"), False),
}


def dump(program: Program, folder: Path) -> None:
    """Record each call of the model, and what follows it, as a step."""
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, "dump_path": str(folder)}))
    debugger = PrecisionDebugger(config_path=str(config))
    running = False

    def end() -> None:
        nonlocal running
        if running:
            debugger.stop()
            debugger.step()
        running = False

    def begin(*_: Any) -> None:
        nonlocal running
        end()
        debugger.start(program.model)
        running = True

    program.model.register_forward_pre_hook(begin)
    program()
    end()


def in_a_fork(work: Callable[[], None]) -> None:
    """Run it in a process of its own, quietly. Raises RuntimeError if it fails."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            out = os.open(os.devnull, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"msprobe failed in {work}")


def places(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the place of each name in a step's dump.json: path, call and calling function."""
    data = json.loads((folder / "dump.json").read_text())["data"]
    parents = json.loads((folder / "construct.json").read_text())
    stacks = {
        name: frames
        for names, frames in json.loads((folder / "stack.json").read_text()).values()
        for name in names
    }
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for name in data:
        phase = "backward" if ".backward" in name or "parameters_grad" in name else "forward"
        path = module_path(name)
        if path is None:
            prefix, api = name.split(".")[:2]
            path = f"{module_path(parents.get(name)) or ''}/{prefix}.{api.strip('_')}"
        call = counts[path, phase]
        counts[path, phase] += 1
        frames = [frame for frame in stacks.get(name, []) if "msprobe" not in frame]
        function = re.search(r", in (\S+?),", frames[0]) if frames else None
        found[name] = {
            "path": path,
            "phase": phase,
            "calls": [call],
            "functions": [function[1]] if function else [],
        }
    return found


def module_path(name: str | None) -> str | None:
    """Return the path in ``Module.model.layers.0.mlp.LlamaMLP.forward.0``, None if it is none."""
    found = re.match(
        r"Module\.(.*)\.[^.]+\.(forward|backward|parameters_grad)(\.\d+)?$", name or ""
    )
    return found[1] if found else None


def compare(golden: Path, mine: Path, out: Path) -> None:
    """Compare two dumps step by step, into a folder a step."""
    for folder in golden.glob("step*"):
        dumps = [next(side.glob(f"{folder.name}/*/dump.json")) for side in (mine, golden)]
        paths = {
            "npu_path": str(dumps[0]),
            "bench_path": str(dumps[1]),
            "is_print_compare_log": False,
        }
        (out / folder.name).mkdir(parents=True)
        pt_compare(paths, str(out / folder.name), **OPTIONS)


def first_error(golden: Path, mine: Path, out: Path) -> dict[str, Any] | None:
    """Return where the first row is that msprobe calls an error."""
    for step in sorted(int(folder.name[4:]) for folder in out.iterdir()):
        sides = [next(side.glob(f"step{step}/*/dump.json")).parent for side in (mine, golden)]
        with next((out / f"step{step}").glob("*.csv")).open(encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                if row.get("Result", "").lower() == "error":
                    return {"step": step, **place_of(row, *sides)}
    return None


def place_of(row: dict[str, str], mine: Path, golden: Path) -> dict[str, Any]:
    """Return the place of a row: its name ends in ``.input.0``, ``.output.0`` or the like."""
    for name, folder in ((row["NPU Name"], mine), (row["Bench Name"], golden)):
        known = places(folder)
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            return known[name]
    return {"path": row["NPU Name"], "phase": "forward"}


def answer(case: Case, folder: Path) -> dict[str, Any]:
    """Return what msprobe blames in a case, with the seconds and bytes that it took."""
    golden, mine, out = (folder / name for name in ("golden", "mine", "out"))
    start = time.perf_counter()
    in_a_fork(lambda: dump(case.golden(), golden))
    in_a_fork(lambda: dump(case.mine()[0], mine))
    dumped = time.perf_counter()
    in_a_fork(lambda: compare(golden, mine, out))
    figures = {"recording": dumped - start, "seconds": time.perf_counter() - dumped}
    nbytes = sum(
        file.stat().st_size for side in (golden, mine) for file in side.rglob("*") if file.is_file()
    )
    return {"blamed": first_error(golden, mine, out), "nbytes": nbytes, **figures}


def main() -> None:
    torch.set_num_threads(1)
    for number, *which in json.load(sys.stdin):
        entry = next(
            entry for entries in SETS.values() for entry in entries if entry.number == number
        )
        case = Case(entry, *which)
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = answer(case, Path(folder))
            except Exception as error:
                said = {
                    "failed": f"{type(error).__name__}: {error}",
                    "recording": 0.0,
                    "seconds": 0.0,
                    "nbytes": 0,
                }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
