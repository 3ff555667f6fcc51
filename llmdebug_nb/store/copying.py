"""Copying a dump with a change: the base of `reduce` and `redact`.

The old dump stays as it is, and the new one is removed if it can't be finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import OPERATORS, RECORDS, SCALARS, SOURCES, TABLES, Row, Table
from llmdebug_nb.core.errors import saving
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.store.process import OF_PROCESS, Process, processes
from llmdebug_nb.store.source import read_nodes, read_root_calls
from llmdebug_nb.store.views import quoted
from llmdebug_nb.store.writer import Writer, create_run

_PAGE = 4096
Rows = Iterable[Sequence[Any]]


class Copy:
    """Copies what one process recorded. Subclasses say what changes; the base copies all."""

    def __init__(self, process: Process, writer: Writer) -> None:
        self.process, self.writer = process, writer

    # -- what may change ------------------------------------------------------------------------

    def record(self, row: Row) -> None:
        """Change a row of `columns.RECORDS` in place, and write its values."""
        raise NotImplementedError

    def rows(self, table: Table, rows: Rows) -> Rows:
        """Return the rows of another table, changed."""
        return rows

    def nodes(self, nodes: list[Node]) -> list[Node]:
        """Return the model tree, changed."""
        return nodes

    def meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return what the process says of itself, changed."""
        return meta

    # -- copying --------------------------------------------------------------------------------

    def run(self, progress: Callable[[int], None]) -> None:
        """Copy everything. ``progress(n)`` is called after every ``n`` records."""
        try:
            self._tables(read_root_calls(self.process.db, "root_calls"))
            for rows in self._pages():
                for row in rows:
                    self.record(row)
                self.writer.commit(Batch(records=rows))
                progress(len(rows))
        finally:
            meta = {k: v for k, v in self.process.meta.items() if k not in OF_PROCESS}
            self.writer.close(self.meta(meta))

    def _tables(self, calls: Iterable[RootCall]) -> None:
        """Copy all tables but the records. ``calls``: the root calls of the copy."""
        db = self.process.db
        self.writer.nodes(self.nodes(read_nodes(db, "nodes")), 0)
        for table in TABLES:
            if table.added_later:
                self.writer.table(table.name, self.rows(table, self._read(table)))
        self.writer.commit(Batch(
            calls=calls,
            scalars=map(tuple, self.rows(SCALARS, self._read(SCALARS))),
            operators=map(list, self.rows(OPERATORS, self._read(OPERATORS))),
            sources=((*row,) for row in self.rows(SOURCES, self._read(SOURCES))),  # type: ignore[misc]
        ))  # fmt: skip

    def _read(
        self, table: Table, then: str = "ORDER BY rowid", *values: object
    ) -> list[tuple[Any, ...]]:
        sql = f"SELECT {quoted(table.names)} FROM {table.name} {then}"
        return self.process.db.rows(table.row, sql, values)

    def _pages(self) -> Iterator[list[Row]]:
        last, page = -1, f"WHERE id > ? ORDER BY id LIMIT {_PAGE}"
        while rows := [list(row) for row in self._read(RECORDS, page, last)]:
            last = rows[-1][0]
            yield rows


def copied(
    run: Path,
    new: tuple[Path, str],
    details: dict[str, Any],
    copy: Callable[[Process, Writer], Copy],
    progress: Callable[[int], None],
) -> Path:
    """Write a changed copy of ``run``; return its folder.

    ``new``: the folder that will hold it, and its name. ``details``: fields of its marker.
    ``copy(process, writer)``: copies one process. ``progress(n)`` is called after every ``n``
    records.

    Raises:
        CorruptDumpError: something can't be read. DumpWriteError: there is no room. In both cases
            the new run is removed, and the old one is unchanged.
    """
    folder = create_run(*new, details)
    try:
        for process in processes(run):
            copy(process, Writer(folder, process.rank)).run(progress)
        _flush(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _flush(folder: Path) -> None:
    """Wait until all files of a run are on the disk."""
    with saving(folder):
        for file in folder.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
