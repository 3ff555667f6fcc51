"""A smaller dump of the same tensors: figures of each in place of all its values, in a new run.

The dump that it is made from is only removed (`replace`) once the new one lies on the disk as a whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.columns import AT, COLUMNS, OPERATOR, Row
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.store import catalog, reader
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    import torch

Figures = Callable[["torch.Tensor"], "torch.Tensor"]
_Copied = dict[
    tuple[int, int], tuple[int, int, str | None]
]  # where a payload lay -> where its figures lie, and their shape
_PAGE = 4096
_OFFSET, _LENGTH, _DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = (
    AT[name] for name in ("offset", "length", "dtype", "shape", "kept", "kept_shape")
)
_LOST = AT["lost"]


def reduced(
    run: Path, parent: Path, name: str, kept: str, figures: Figures, progress: Callable[[int], None]
) -> Path:
    """Write a run ``name`` below ``parent`` that keeps ``figures`` (float64[n], called ``kept``) of what ``run`` keeps whole; return its folder.

    What ``run`` keeps only in part stays as it is. ``progress(n)`` is told of every n tensors.

    Raises:
        CorruptDumpError: a payload can't be read. DumpWriteError: there is no room. Then the new run is gone, and the old one as it was.
    """
    marker = catalog.read_marker(run)
    options = {**(marker.get("options") or {}), "reduce": kept}
    folder = create_run(
        parent, name, {"options": options, "environment": marker.get("environment", {})}
    )
    try:
        for process in reader.processes(run):
            _copy(process, Writer(folder, process.rank), kept, figures, progress)
        _settle(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def replace(old: Path, new: Path) -> Path:
    """Put a run in the place of another one. The new one is whole on the disk before the old one goes."""
    shutil.rmtree(old)
    os.rename(new, old)
    return old


def _copy(
    process: reader.Process,
    writer: Writer,
    kept: str,
    figures: Figures,
    progress: Callable[[int], None],
) -> None:
    read = process.db.execute
    try:
        nodes = [Node(path, name, kind, parent, json.loads(params), tuple(json.loads(aliases)), root) for path, name, kind, parent, params, aliases, root
                 in read("SELECT path, name, type, parent, params, aliases, root FROM nodes ORDER BY idx")]  # fmt: skip
        writer.nodes(nodes, 0)
        for table, columns in fmt.LATER.items():
            writer.table(table, read(f"SELECT {','.join(columns)} FROM {table}").fetchall())
        calls = [RootCall(*row) for row in read("SELECT * FROM root_calls ORDER BY idx")]
        operators = read(
            f"SELECT {','.join(f'{chr(34)}{c}{chr(34)}' for c in OPERATOR)} FROM operators ORDER BY rowid"
        ).fetchall()
        writer.commit(
            (), calls, read("SELECT * FROM scalars").fetchall(), operators=operators, sources=read("SELECT * FROM sources").fetchall(),
            called=read(f"SELECT {','.join(fmt.CALLED)} FROM calls ORDER BY rowid").fetchall(),
        )  # fmt: skip
        copied: _Copied = {}
        for rows in _pages(process):
            for row in rows:
                _reduce(row, process, writer, kept, figures, copied)
            writer.commit(rows)
            progress(len(rows))
    finally:
        meta = {
            key: value for key, value in process.meta.items() if key not in ("rank", "pid", "bytes")
        }
        writer.close(meta)


def _reduce(
    row: Row, process: reader.Process, writer: Writer, kept: str, figures: Figures, copied: _Copied
) -> None:
    """Write what is kept of a tensor; of one that was seen before, where that lies."""
    offset, length = row[_OFFSET], row[_LENGTH]
    if offset is None:
        return
    partly = row[_KEPT] is not None
    known = copied.get((offset, length))
    if not partly:
        row[_KEPT] = kept
    if known is not None:
        row[_KEPT_SHAPE] = known[2]
        writer.duplicate(row, known[0], known[1])
        return
    shape = row[_KEPT_SHAPE] if partly else row[_SHAPE]
    values = process.read(offset, length, row[_DTYPE], shape, row[_KEPT] if partly else None)
    if not partly:
        try:
            values = figures(values)
        except (RuntimeError, NotImplementedError) as error:
            row[_KEPT], row[_OFFSET], row[_LENGTH] = None, None, None
            row[_LOST] = f"no {kept} of {row[_DTYPE]}: {str(error).partition(chr(10))[0]}"
            return
        row[_KEPT_SHAPE] = f"[{', '.join(map(str, values.shape))}]"
    writer.payload(row, to_bytes(values))
    copied[offset, length] = row[_OFFSET], row[_LENGTH], row[_KEPT_SHAPE]


def _pages(process: reader.Process) -> Iterator[list[Row]]:
    last = -1
    sql = f"SELECT {','.join(COLUMNS)} FROM records WHERE id > ? ORDER BY id LIMIT {_PAGE}"
    while rows := [list(row) for row in process.db.execute(sql, (last,))]:
        last = rows[-1][0]
        yield rows


def _settle(folder: Path) -> None:
    """Wait until all files of a run lie on the disk."""
    try:
        for file in folder.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
    except OSError as error:
        raise DumpWriteError(f"can't write {folder}: {error.strerror or error}") from None
