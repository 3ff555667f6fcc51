"""What is written beside the tensors of a run once its program has ended: files in the places of msit's `dump --exec`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.options import DumpKeywords, DumpOptions

TOPOLOGY = ("model", "layer", "onnx")  # model/PID/NAME.json and layer/PID/NAME.json, as .onnx too
TABLES = {
    "op": "op",
    "kernel": "kernel",
    "cpu_profiling": "host",
    "tiling": "tiling",
}  # their names in `DumpOptions.profile`
KNOWN = (*TOPOLOGY, *TABLES)
_SHOWN = 40  # lines
_OPERATORS = frozenset((*TOPOLOGY, "op"))  # what is only whole if operators are recorded


def needed(files: Collection[str], options: DumpOptions) -> DumpKeywords:
    """Return the options without which these files would be empty, where the user leaves the choice to us."""
    found: DumpKeywords = {}
    if _OPERATORS & set(files) and options.graph is None and not options.operators:
        found["mode"] = "module+aten"
    tables = [name for kind, name in TABLES.items() if kind in files]
    if tables and not options.profile:
        found["profile"] = "+".join(tables)
    return found


def write(run: Path, files: Collection[str]) -> Iterator[tuple[str, str]]:
    """Write these files into a run's folder, and say so: a level and a line each."""
    from llmdebug_nb.app import topology
    from llmdebug_nb.app.tables import write_tables

    try:
        written: list[Path] = []
        if set(TOPOLOGY) & set(files):
            written += topology.write_topology(run, run)
        if "onnx" in files:
            written += [
                topology.to_onnx(path, path.with_suffix(".onnx")) for path in tuple(written)
            ]
        if set(TABLES) & set(files):
            written += write_tables(run, run)
    except LLMDebugError as error:
        yield "warning", f"{', '.join(files)}: {error}"
    else:
        places: dict[Path, int] = {}
        for path in written:
            place = path.parent.relative_to(run)
            places[place] = places.get(place, 0) + 1
        said = ", ".join(f"{count} in {place}" for place, count in places.items())
        yield "info", f"files in the places of msit's: {said}"
        if "model" in files:
            yield "info", _calls(run)


def _calls(run: Path) -> str:
    """Return what the first step of a run calls, with the execution ids that ``-ids`` takes: as much as fits a screen."""
    from llmdebug_nb.app import topology

    lines = str(topology.topology(run)).splitlines()
    more = (
        [f"… {len(lines) - _SHOWN:,} more lines: llmdebug topology {run}"]
        if len(lines) > _SHOWN
        else []
    )
    return "\n".join(["execution ids, for -ids:", *lines[:_SHOWN], *more])
