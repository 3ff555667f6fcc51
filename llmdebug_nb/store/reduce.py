"""Copying a dump with figures of each tensor in place of its values.

The old dump is only removed (`replace`) once the new one is complete on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.columns import AT, OPERATORS, RECORDS, SOURCES, TABLES, Row
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.store import catalog
from llmdebug_nb.store.process import Process, processes
from llmdebug_nb.store.source import read_nodes
from llmdebug_nb.store.views import quoted
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    import torch

Figures = Callable[["torch.Tensor"], "torch.Tensor"]
_PAGE = 4096
_OFFSET, _LENGTH, _LOST = AT["offset"], AT["length"], AT["lost"]
_DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]


def reduced(
    run: Path,
    folder: str,
    kept: str,
    figures: Figures,
    progress: Callable[[int], None],
    name: str | None = None,
) -> Path:
    """Write a smaller run beside ``run``, with figures of its tensors; return its folder.

    ``folder``: the name of the new folder. ``name``: the new run's name, if it differs from that.
    ``figures(tensor)`` returns float64[n], called ``kept``. Tensors that ``run`` keeps only in
    part are copied as they are. ``progress(n)`` is called after every ``n`` records.

    Raises:
        CorruptDumpError: a payload can't be read. DumpWriteError: there is no room. In both cases
            the new run is removed, and the old one is unchanged.
    """
    marker = catalog.read_marker(run)
    options = {**(marker.get("options") or {}), "reduce": kept}
    details = {"options": options, "environment": marker.get("environment", {})}
    if name is not None:
        details["name"] = name
    new = create_run(run.parent, folder, details)
    try:
        for process in processes(run):
            _Copy(process, Writer(new, process.rank), kept, figures).run(progress)
        _flush(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return new


def replace(old: Path, new: Path) -> Path:
    """Put a run in the place of another one."""
    shutil.rmtree(old)
    os.rename(new, old)
    return old


class _Copy:
    """Copies what one process recorded."""

    def __init__(self, process: Process, writer: Writer, kept: str, figures: Figures) -> None:
        self._process, self._writer, self._kept, self._figures = process, writer, kept, figures
        # offset and length of values -> offset, length and shape of their figures
        self._copied: dict[tuple[int, int], tuple[int, int, str | None]] = {}

    def run(self, progress: Callable[[int], None]) -> None:
        try:
            self._tables()
            for rows in self._pages():
                for row in rows:
                    self._reduce(row)
                self._writer.commit(rows)
                progress(len(rows))
        finally:
            of_process = ("rank", "pid", "bytes")
            meta = {k: v for k, v in self._process.meta.items() if k not in of_process}
            self._writer.close(meta)

    def _tables(self) -> None:
        """Copy all tables but the records."""
        read = self._process.db.execute
        self._writer.nodes(read_nodes(self._process.db, "nodes"), 0)
        for table in TABLES:
            if table.added_later:
                names = quoted(table.names)
                self._writer.table(table.name, read(f"SELECT {names} FROM {table.name}").fetchall())
        operators = f"SELECT {quoted(OPERATORS.names)} FROM operators ORDER BY rowid"
        self._writer.commit(
            calls=[RootCall(*row) for row in read("SELECT * FROM root_calls ORDER BY idx")],
            scalars=read("SELECT * FROM scalars").fetchall(),
            operators=[list(row) for row in read(operators)],
            sources=read(f"SELECT {quoted(SOURCES.names)} FROM sources").fetchall(),
        )

    def _pages(self) -> Iterator[list[Row]]:
        last = -1
        names = quoted(RECORDS.names)
        sql = f"SELECT {names} FROM records WHERE id > ? ORDER BY id LIMIT {_PAGE}"
        while rows := [list(row) for row in self._process.db.execute(sql, (last,))]:
            last = rows[-1][0]
            yield rows

    def _reduce(self, row: Row) -> None:
        """Write what is kept of a tensor; values that were met before are written once."""
        offset, length = row[_OFFSET], row[_LENGTH]
        if offset is None:
            return
        whole = row[_KEPT] is None
        if whole:
            row[_KEPT] = self._kept
        if (offset, length) in self._copied:
            new_offset, new_length, row[_KEPT_SHAPE] = self._copied[offset, length]
            self._writer.duplicate(row, new_offset, new_length)
            return
        shape, kept = (row[_SHAPE], None) if whole else (row[_KEPT_SHAPE], row[_KEPT])
        values = self._process.read(offset, length, row[_DTYPE], shape, kept)
        if whole:
            try:
                values = self._figures(values)
            except (RuntimeError, NotImplementedError) as error:
                row[_KEPT], row[_OFFSET], row[_LENGTH] = None, None, None
                reason = str(error).partition("\n")[0]
                row[_LOST] = f"no {self._kept} of {row[_DTYPE]}: {reason}"
                return
            row[_KEPT_SHAPE] = f"[{', '.join(map(str, values.shape))}]"
        self._writer.payload(row, to_bytes(values))
        self._copied[offset, length] = row[_OFFSET], row[_LENGTH], row[_KEPT_SHAPE]


def _flush(folder: Path) -> None:
    """Wait until all files of a run are on the disk."""
    try:
        for file in folder.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
    except OSError as error:
        raise DumpWriteError(f"can't write {folder}: {error.strerror or error}") from None
