"""Writing a run in the formats of other tools."""

from __future__ import annotations

import os
from pathlib import Path

from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.store import compiled
from llmdebug_nb.store.layouts import fx, ge, writing
from llmdebug_nb.store.run import Run

_WRITERS = {"fx": fx.write, "fx-old": fx.write_old, "ge": ge.write}


def convert(
    where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], to: str = "fx"
) -> writing.Written:
    """Write a run of compiled code as a dump of torchair's, for the tools that read those.

    Args:
        where: the run, or its name or path.
        folder: a new or empty folder.
        to: ``fx``, ``fx-old`` (the layout of PTA up to 7.1) or ``ge``.

    Returns:
        How many tensors were written, and how many were left out, by reason.

    Raises:
        OptionError: an unknown layout, or a run that is not of compiled code.
        StoreError: the folder is not empty or can't be written, or nothing could be written.
    """
    if to not in _WRITERS:
        raise OptionError(f"to {to!r} is not known; known: {', '.join(_WRITERS)}")
    run = open_run(where)
    if not compiled.is_compiled(run):
        raise OptionError(
            f"{run.label} is not of compiled code: record it with graph='fx' or 'fused'"
        )
    names, created = compiled.names(run), float(run.meta.get("created") or 0.0)
    root = next((node.type for node in run.nodes if not node.path), "model")
    dump = writing.Dump(
        list(run.records()), run.nodes, run.load,
        lambda record: names.get(compiled.key_of(record.site)), root, created,
    )  # fmt: skip
    return writing.write(_WRITERS[to], dump, Path(folder))
