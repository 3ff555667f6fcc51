"""Opening a dump as a Run: the native format, complete or cut short, and foreign layouts.

Opening executes no code from a dump, reads nothing outside its folder and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import catalog, connection, layouts
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.connection import Connection
from llmdebug_nb.store.figures import LISTED, Figures
from llmdebug_nb.store.layouts import Contents, Layout
from llmdebug_nb.store.process import OF_PROCESS, Process, processes
from llmdebug_nb.store.rows import row_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.source import Source
from llmdebug_nb.store.views import STRIDE, VIEWS, create_tables, create_views, insert_rows

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


def native(path: Path) -> Run:
    """Return the Run of a native dump folder, which may still be written to.

    Raises CorruptDumpError.
    """
    marker = catalog.read_marker(path)
    return Run(str(marker.get("name", path.name)), path, lambda: _open_native(path, marker))


def in_memory(name: str, contents: Contents, nbytes: int) -> Run:
    """Return a run of tensors in memory.

    ``meta["code"]`` may hold the Python that names one, by role, with ``{slot!r}`` in it.
    """
    return Run(name, None, lambda: _indexed(name, contents, "memory", nbytes))


def _open_native(path: Path, marker: dict[str, Any]) -> Source:
    found = processes(path)
    if len(found) == 1:
        db = found[0].db
        create_views(db, 0, found[0].rank, found[0].later)
        db.seal()
    else:
        db = _merged(found)

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
    return Source(
        db,
        load,
        layout=fmt.FORMAT,
        nbytes=sum(process.nbytes for process in found),
        complete=all(process.complete for process in found),
        processes=[
            {"rank": p.rank, "folder": p.folder.name, "later": p.later, **p.meta} for p in found
        ],
        meta=meta,
        outdated=lambda: any(process.outdated() for process in found),
    )


def _merged(processes: list[Process]) -> Connection:
    """Return one index in memory over several processes.

    Model tree and root calls are those of the first process, plus those that only later ones have.
    """
    db = connection.in_memory()
    create_tables(db)
    for process in processes:
        create_views(process.db, process.number, process.rank, process.later)
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
    contents = layout.read(path)
    return _indexed(path.name, contents, layout.NAME, _bytes_of(path))


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


def _indexed(name: str, contents: Contents, layout: str, nbytes: int) -> Source:
    """Put contents into an index in memory, so that the same queries work on them."""
    db = connection.in_memory()
    create_tables(db)
    calls = {(call.generation, call.step): call for call in reversed(contents.calls)}
    by_id = {record.id: record for record in contents.records}
    insert_rows(db, "rows", (row_of(record, calls) for record in contents.records))
    insert_rows(
        db,
        "all_calls",
        (
            (c.index, c.generation, c.step, c.kind, c.query, c.total, c.batch, c.root)
            for c in contents.calls
        ),
    )
    insert_rows(
        db,
        "all_nodes",
        (
            (
                i,
                n.path,
                n.name,
                n.type,
                n.parent,
                json.dumps(n.params),
                json.dumps(n.aliases),
                n.root,
                None if n.source is None else str(n.source),
            )
            for i, n in enumerate(contents.nodes)
        ),
    )
    insert_rows(db, "call_rows", _execution_ids(contents))
    Figures(db, name, contents)
    ranks = sorted({record.site.rank for record in contents.records}) or [0]
    return Source(
        db,
        lambda record: contents.load(by_id[record.id]),
        layout=layout,
        nbytes=nbytes,
        complete=bool(contents.meta.get("complete", True)),
        meta=contents.meta,
        processes=[{"rank": rank} for rank in ranks],
        listed=LISTED,
    )


def _execution_ids(contents: Contents) -> _Rows:
    """Return the rows of ``call_rows``, in execution order as the ids tell it."""
    sites = [record.site for record in contents.records]
    calls = dict.fromkeys((s.rank, s.generation, s.step, s.path, s.call) for s in sites)
    rows = [(*call, id_) for call in calls if (id_ := contents.ids.get(call[3]))]
    rows.sort(key=lambda row: (row[:3], [int(number) for number in row[5].split("_")]))
    return [(place, *row) for place, row in enumerate(rows)]
