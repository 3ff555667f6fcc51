"""Opening a dump as a Run: the native format, complete or cut short, and foreign layouts.

Opening executes no code from a dump, reads nothing outside its folder and changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core import collector
from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError
from llmdebug_nb.core.records import Frame, Record, RootCall, Site
from llmdebug_nb.store import catalog, connection, layouts
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.connection import Connection
from llmdebug_nb.store.figures import LISTED, Figures
from llmdebug_nb.store.layouts import Contents, Layout
from llmdebug_nb.store.process import OF_PROCESS, Process, processes
from llmdebug_nb.store.rows import node_row, row_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.source import About, Source
from llmdebug_nb.store.views import (
    OPERATOR_COLUMNS,
    STRIDE,
    VIEWS,
    Step,
    create_tables,
    create_views,
    insert_rows,
)

if TYPE_CHECKING:
    import torch

_Rows = list[tuple[Any, ...]]


def open_run(where: str | os.PathLike[str] | Run) -> Run:
    """Open a dump by name, path, or foreign dump folder; a Run is returned as it is.

    Raises:
        UnknownRunError, NotADumpError, CorruptDumpError: the message names the cause and a remedy.
    """
    if isinstance(where, Run):
        return where
    if not isinstance(where, (str, os.PathLike)):
        raise NotADumpError(f"a run is opened by name or path, not by {type(where).__name__}")
    path = catalog.find(where)
    if path.is_dir() and catalog.is_run(path):
        return native(path)
    layout = layouts.detect(path)
    if layout is None:
        known = ", ".join(each.NAME for each in layouts.layouts())
        raise NotADumpError(
            f"{path} is not a dump: no {fmt.MARKER} in it, and no layout matches (known: {known})"
        )
    run = Run(path.name, path, lambda: _foreign(layout, path))
    run.source  # noqa: B018 - a dump of which nothing can be read is reported now, not later
    return run


def lone(run: Run) -> Record | None:
    """Return the tensor of a run that is one file of another tool with one tensor; else None."""
    if run.path is None or not run.path.is_file() or len(run) != 1:
        return None
    return next(run.records())


def placed(run: Run, site: Site, op: str) -> Run:
    """Return a run of a `lone` tensor with its tensor at another site, as one of operator ``op``.

    Raises:
        NotADumpError, CorruptDumpError: the file is another one by now.
    """
    path = run.path
    layout = None if path is None else layouts.detect(path)
    if path is None or layout is None:
        raise NotADumpError(f"{run.label} is no single file of tensors any more")

    def opened() -> Source:
        contents = layout.read(path)
        moved = [replace(record, site=site, op=op) for record in contents.records]
        if len(moved) != 1:
            raise CorruptDumpError(f"{path} holds {len(moved):,} tensors by now")
        calls = [RootCall(0, site.generation, site.step, "forward")]
        contents = replace(contents, records=moved, calls=calls, nodes=[], ids={}, stacks=())
        return _indexed(path.name, contents, layout.NAME, lambda: _bytes_of(path))

    return Run(run.name, path, opened)


def native(path: Path) -> Run:
    """Return the Run of a native dump folder, which may still be written to.

    Raises CorruptDumpError.
    """
    marker = catalog.read_marker(path)
    return Run(str(marker.get("name", path.name)), path, lambda: _open_native(path, marker))


def with_values(path: Path, load: Callable[[Record], torch.Tensor]) -> Run:
    """Return a native run, still being written perhaps, whose values ``load`` reads.

    They lie in no file of it. Raises CorruptDumpError.
    """
    marker = catalog.read_marker(path)

    def opened() -> Source:
        source = _open_native(path, marker)
        source.load = load
        return source

    return Run(str(marker.get("name", path.name)), path, opened)


def of_step(run: Run, step: Step) -> Run:
    """Return a run of one generation and step of a native run. Raises CorruptDumpError."""
    if run.path is None or not run.is_native:
        raise NotADumpError(f"{run.label} is no run of ours, of which one step can be read alone")
    path, marker = run.path, catalog.read_marker(run.path)
    return Run(run.name, path, lambda: _open_native(path, marker, step))


def in_memory(name: str, contents: Contents, nbytes: int) -> Run:
    """Return a run of tensors in memory.

    ``meta["code"]`` may hold the Python that names one, by role, with ``{slot!r}`` in it.
    """
    return Run(name, None, lambda: _indexed(name, contents, "memory", nbytes))


def _open_native(path: Path, marker: dict[str, Any], step: Step | None = None) -> Source:
    found = processes(path)
    if len(found) == 1:
        db = found[0].db
        create_views(db, 0, found[0].rank, found[0].later, step)
        db.seal()
    else:
        db = _merged(found, step)

    def load(record: Record) -> torch.Tensor:
        try:
            number, offset, length = map(int, record.payload.split(","))
        except ValueError:
            raise CorruptDumpError(f"{path}: {record.site} has no valid place of values") from None
        dtype, shape = record.summary.dtype, record.payload_shape
        return found[number].read(offset, length, dtype, shape, record.kept)

    missing = sum(process.missing for process in found)
    meta = marker | {k: v for k, v in found[0].meta.items() if k not in OF_PROCESS}
    if missing:
        meta["ended_by"] = f"{fmt.PAYLOAD} is cut short, {missing:,} tensors have lost their values"
    about = About(
        fmt.FORMAT,
        nbytes=sum(process.nbytes for process in found),
        complete=all(process.complete for process in found),
        processes=[
            {"rank": p.rank, "folder": p.folder.name, "later": p.later, **p.meta} for p in found
        ],
        meta=meta,
    )
    return Source(
        db,
        load,
        about,
        outdated=lambda: any(process.outdated() for process in found),
    )


def _merged(processes: list[Process], step: Step | None) -> Connection:
    """Return one index in memory over several processes, or over one step of them.

    Model tree and root calls are those of the first process, plus those that only later ones have.
    """
    db = connection.in_memory()
    create_tables(db)
    for process in processes:
        create_views(process.db, process.number, process.rank, process.later, step)
        for name, view in VIEWS.items():
            rows = process.db.rows(view.row(), f"SELECT * FROM {name}")
            if process.number and name == "all_calls":
                rows = _new_calls(db, rows, process.number)
            elif process.number and name == "all_nodes":
                rows = _new_nodes(db, rows)
            insert_rows(db, name, rows)
        process.db.close()
    db.execute("CREATE INDEX by_id ON rows(id)")
    return db


def _new_calls(db: Connection, rows: _Rows, number: int) -> _Rows:
    """Return the root calls of a further process that no process before it has."""
    known = set(db.execute("SELECT generation, step FROM all_calls"))
    return [(row[0] + number * STRIDE, *row[1:]) for row in rows if row[1:3] not in known]


def _new_nodes(db: Connection, rows: _Rows) -> _Rows:
    """Return the modules of a further process that no process before it has, numbered on."""
    known = db.execute("SELECT path FROM all_nodes ORDER BY idx")
    places = {path: place for place, (path,) in enumerate(known)}
    new: _Rows = []
    for _, path, label, kind, parent, *rest in rows:
        if path not in places:
            above = places.get(rows[parent][1], -1) if 0 <= parent < len(rows) else -1
            places[path] = len(places)
            new.append((places[path], path, label, kind, above, *rest))
    return new


def _foreign(layout: Layout, path: Path) -> Source:
    with collector.paused():
        contents = layout.read(path)
        return _indexed(path.name, contents, layout.NAME, lambda: _bytes_of(path))


def _bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for at, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):  # a link that leads nowhere
                total += os.stat(os.path.join(at, file)).st_size
    return total


def _indexed(name: str, contents: Contents, layout: str, nbytes: int | Callable[[], int]) -> Source:
    """Put contents into an index in memory, so that the same queries work on them."""
    db = connection.in_memory()
    create_tables(db)
    calls = {(call.generation, call.step): call for call in reversed(contents.calls)}
    by_id = {record.id: record for record in contents.records}
    unread = contents.unread
    rows = (row_of(record, calls, record.id in unread) for record in contents.records)
    insert_rows(db, "rows", rows)
    insert_rows(
        db,
        "all_calls",
        (
            (c.index, c.generation, c.step, c.kind, c.query, c.total, c.batch, c.root)
            for c in contents.calls
        ),
    )
    insert_rows(db, "all_nodes", itertools.starmap(node_row, enumerate(contents.nodes)))
    insert_rows(db, "call_rows", _execution_ids(contents))
    operators, sources = _stacks(contents)
    insert_rows(db, "operator_rows", operators)
    insert_rows(db, "all_sources", sources)
    Figures(db, name, contents)
    ranks = sorted({record.site.rank for record in contents.records}) or [0]
    complete = bool(contents.meta.get("complete", True))
    processes: list[dict[str, Any]] = [{"rank": rank} for rank in ranks]
    about = About(layout, nbytes, complete, processes, contents.meta)
    return Source(db, lambda record: contents.load(by_id[record.id]), about, listed=LISTED)


def _execution_ids(contents: Contents) -> _Rows:
    """Return the rows of ``call_rows``, in execution order as the ids tell it."""
    sites = [record.site for record in contents.records]
    calls = dict.fromkeys((s.rank, s.generation, s.step, s.path, s.call) for s in sites)
    rows = [(*call, id_) for call in calls if (id_ := contents.ids.get(call[3]))]
    rows.sort(key=lambda row: (row[:3], [int(number) for number in row[5].split("_")]))
    return [(place, *row) for place, row in enumerate(rows)]


def _stacks(contents: Contents) -> tuple[_Rows, _Rows]:
    """Return the rows of ``operator_rows``, and those of ``all_sources``: equal stacks share one.

    A module whose call has a stack has a row, too, of level module.
    """
    numbers: dict[tuple[tuple[Frame, str], ...], int] = {}
    operators: _Rows = []
    for number, stack in enumerate(contents.stacks):
        rank, generation, step, phase, path, call = stack.key
        row: dict[str, object] = dict.fromkeys(OPERATOR_COLUMNS)
        row |= {"id": number, "rank": rank, "generation": generation, "step": step, "path": path}
        row |= {"call": call, "phase": phase, "level": stack.level, "op": stack.op}
        row["source"] = numbers.setdefault(stack.lines, len(numbers))
        operators.append(tuple(row.values()))
    sources: _Rows = [
        (number, json.dumps([str(frame) for frame, _ in lines]),
         json.dumps([code for _, code in lines]), None)
        for lines, number in numbers.items()
    ]  # fmt: skip
    return operators, sources
