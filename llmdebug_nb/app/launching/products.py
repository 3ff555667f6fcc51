"""Files written beside the tensors of a run when its program has ended, as in msit's dumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import LLMDebugError, OptionError
from llmdebug_nb.core.options import DumpKeywords, DumpOptions
from llmdebug_nb.store.own_file import PRIVATE_FILE, PRIVATE_FOLDER

if TYPE_CHECKING:
    from typing_extensions import Unpack

TOPOLOGY = ("model", "layer", "onnx")  # model/PID/NAME.json and layer/PID/NAME.json, also as .onnx
# kinds of tables, and their names in the option `profile`
TABLES = {"op": "op", "kernel": "kernel", "cpu_profiling": "host", "tiling": "tiling"}
KNOWN = (*TOPOLOGY, *TABLES)
_SHOWN = 40  # lines of execution ids
_OF_OPERATORS = frozenset((*TOPOLOGY, "op"))  # incomplete unless operators are recorded


def options_for(files: Collection[str], **options: Unpack[DumpKeywords]) -> DumpOptions:
    """Return the options of a recording, with those that the files need.

    Raises:
        OptionError: an invalid option, or an unknown kind of files.
    """
    unknown = next((each for each in files if each not in KNOWN), None)
    if unknown is not None:
        raise OptionError(f"files {unknown!r} is not known; known: {', '.join(KNOWN)}")
    options.update(_needed(files, DumpOptions.of(**options)))
    return DumpOptions.of(**options)


def _needed(files: Collection[str], options: DumpOptions) -> DumpKeywords:
    """Return the options that these files need and the user did not choose."""
    needs: DumpKeywords = {}
    if _OF_OPERATORS & set(files) and options.graph is None and not options.operators:
        needs["mode"] = "module+aten"
    tables = [name for kind, name in TABLES.items() if kind in files]
    if tables and not options.profile:
        needs["profile"] = "+".join(tables)
    return needs


def write(run: Path, files: Collection[str]) -> Iterator[tuple[str, str]]:
    """Write these files into a run's folder; yield messages, each with its level."""
    from llmdebug_nb.app import topology
    from llmdebug_nb.app.tables import write_tables

    try:
        paths: list[Path] = []
        if set(TOPOLOGY) & set(files):
            paths += topology.write_topology(run, run)
        if "onnx" in files:
            paths += [topology.to_onnx(path, path.with_suffix(".onnx")) for path in tuple(paths)]
        if set(TABLES) & set(files):
            paths += write_tables(run, run)
        for path in paths:  # they tell of the program what the run tells
            path.chmod(PRIVATE_FILE)
            for folder in path.relative_to(run).parents:
                (run / folder).chmod(PRIVATE_FOLDER)
    except (LLMDebugError, OSError) as error:
        yield "warning", f"{', '.join(files)}: {error}"
        return
    folders = Counter(path.parent.relative_to(run) for path in paths)
    counts = ", ".join(f"{count} in {folder}" for folder, count in folders.items())
    yield "info", f"files in the places of msit's: {counts}"
    if "model" in files:
        yield "info", _execution_ids(run)


def _execution_ids(run: Path) -> str:
    """Return the calls of a run's first step with their execution ids, as many as fit a screen."""
    from llmdebug_nb.app.topology import topology

    lines = str(topology(run)).splitlines()
    text = ["execution ids, for -ids:", *lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        text.append(f"… {len(lines) - _SHOWN:,} more lines: llmdebug topology {run}")
    return "\n".join(text)
