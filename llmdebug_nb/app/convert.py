"""Writing a run in the formats of other tools."""

from __future__ import annotations

import os
from collections.abc import Callable

from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.store import compiled
from llmdebug_nb.store.call_stacks import CallStacks
from llmdebug_nb.store.layouts import atb_writing, fx, ge, msit, msprobe, plain, writing
from llmdebug_nb.store.run import Run

_OF_GRAPHS = {"fx": fx.write, "fx-old": fx.write_old, "ge": ge.write}
WRITERS: dict[str, writing.Writer] = {
    "msit": msit.write, "msprobe": msprobe.write, "atb": atb_writing.write,
    "atb-msprobe": atb_writing.write_msprobe, **_OF_GRAPHS,
    "npy": plain.write,
}  # fmt: skip


def export_dump(
    where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], layout: str
) -> writing.Written:
    """Write a run, or a dump of any tool, in the layout of another tool.

        ld.export_dump("golden", "for_msprobe", layout="msprobe")

    Args:
        where: the run, or its name or path.
        folder: a new or empty folder.
        layout: msit, msprobe, atb, atb-msprobe, npy; of compiled code, and of FX and GE dumps, also
            fx, fx-old (PTA up to 7.1) and ge. docs/layouts.md says what each has a place for.

    Returns:
        How many tensors were written, and how many were left out, by reason.

    Raises:
        OptionError: an unknown layout, or a run without a graph for fx and ge.
        StoreError: the folder is not empty or can't be written, or nothing could be written.
    """
    if layout not in WRITERS:
        raise OptionError(f"layout {layout!r} is not known; known: {', '.join(WRITERS)}")
    return _write(where, folder, layout)


def convert(
    where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], to: str = "fx"
) -> writing.Written:
    """Write a run of compiled code as a dump of torchair's, for the tools that read those.

    ``to``: fx, fx-old or ge. Otherwise as `export_dump`.
    """
    if to not in _OF_GRAPHS:
        raise OptionError(f"to {to!r} is not known; known: {', '.join(_OF_GRAPHS)}")
    return _write(where, folder, to)


def _write(
    where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], layout: str
) -> writing.Written:
    run = open_run(where)
    names = _nodes_of(run) if layout in _OF_GRAPHS else lambda record: None
    created = float(run.meta.get("created") or 0.0)
    root = next((node.type for node in run.nodes if not node.path and node.type), "model")
    dump = writing.Dump(
        list(run.records()), run.nodes, run.load, names, root, created, CallStacks(run).of
    )
    return writing.write(WRITERS[layout], dump, on_this_machine(folder))


def _nodes_of(run: Run) -> Callable[[Record], str | None]:
    """Return the function that names the node of a record. Raises OptionError: there are none."""
    if compiled.is_compiled(run.index):
        names = compiled.names(run.index)
        return lambda record: names.get(compiled.key_of(record.site))
    if run.info()["layout"] in (fx.NAME, ge.NAME):
        return lambda record: module_of(record.site.path) if is_operator(record.site.path) else None
    raise OptionError(f"{run.label} is not of compiled code: record it with graph='fx' or 'fused'")
