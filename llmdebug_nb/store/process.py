"""The files that one process wrote of a native dump, opened read-only.

An index that was not closed is copied before SQLite opens it, and the payload frames behind its
last commit are read from the payload file.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.columns import AT, ROOT_CALLS, TABLES, Row, insert
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.store import format as fmt

if TYPE_CHECKING:
    import torch

_NAMES = frozenset(table.name for table in TABLES)
_LATER = {table.name for table in TABLES if table.added_later}
_FIGURES = ("min", "max", "mean", "l2norm", "nan", "inf", "zero")


class Process:
    """The recording of one process.

    ``number``: its place among the processes of the run. ``later``: what is added to its
    generations, so that they follow those of an earlier process of the same rank.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.later = folder, number, 0
        self.settled = not _log_of(folder / fmt.INDEX).is_file()
        self._seen = self._state()
        self.db = _connect(folder / fmt.INDEX, self.settled)
        try:
            self._read_meta()
        except (
            sqlite3.DatabaseError,
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CorruptDumpError(f"{folder / fmt.INDEX} is damaged: {error}") from None
        payload = folder / fmt.PAYLOAD
        self.nbytes = payload.stat().st_size if payload.is_file() else 0
        self.missing = self._count_missing() if self.nbytes < self._covered else 0
        self.complete = bool(self.meta.get("complete")) and not self.missing
        if not self.settled:
            try:
                self._add_tail()
            except (sqlite3.Error, OverflowError, TypeError) as error:
                raise CorruptDumpError(f"{payload}: a payload frame is damaged ({error})") from None

    def _read_meta(self) -> None:
        found = self.db.execute("SELECT name FROM sqlite_master WHERE type != 'index'")
        tables = {name for (name,) in found}
        if not tables >= _NAMES - _LATER or tables - _NAMES:
            raise CorruptDumpError(
                f"{self.folder / fmt.INDEX}: expected the tables {', '.join(sorted(_NAMES))}"
            )
        self._stand_ins = dict(self._absent(tables))
        self.stand_in(self.db)
        pairs = self.db.execute("SELECT key, value FROM meta")
        self.meta = {key: json.loads(value) for key, value in pairs}
        self.rank, self._covered = int(self.meta.get("rank", 0)), int(self.meta.get("bytes", 0))
        self.begun = float(self.meta.get("begun", 0.0))

    def stand_in(self, db: sqlite3.Connection) -> None:
        """Give an index, or a copy of it, the tables and columns that older dumps do not have."""
        for name, select in self._stand_ins.items():
            db.execute(f"CREATE TEMP VIEW {name} AS SELECT {select}")

    def _absent(self, tables: set[str]) -> Iterator[tuple[str, str]]:
        """Yield name and stand-in of each table that is absent, or lacks columns added later."""
        for table in TABLES:
            if table.name not in tables:
                columns = ", ".join(f"NULL AS {column}" for column in ("rowid", *table.names))
                yield table.name, f"{columns} WHERE 0"
            elif table.first_names != table.names:
                there = {row[1] for row in self.db.execute(f"PRAGMA table_info({table.name})")}
                lacking = [name for name in table.names if name not in there]
                if lacking:
                    columns = ", ".join(f"NULL AS {name}" for name in lacking)
                    yield table.name, f"rowid AS rowid, *, {columns} FROM main.{table.name}"

    def _count_missing(self) -> int:
        """Count the records whose values the payload file has lost: it was cut short."""
        sql = "SELECT count(*) FROM records WHERE offset + length > ?"
        return int(self.db.execute(sql, (self.nbytes,)).fetchone()[0])

    def _state(self) -> list[tuple[int, int]]:
        """Return size and time of change of each file; they tell whether the recording went on."""
        index = self.folder / fmt.INDEX
        files = (index, _log_of(index), self.folder / fmt.PAYLOAD)
        states = (file.stat() for file in files if file.is_file())
        return [(stat.st_size, stat.st_mtime_ns) for stat in states]

    def outdated(self) -> bool:
        """Tell whether more was recorded since this was opened."""
        return not self.settled and self._state() != self._seen

    def _add_tail(self) -> None:
        """Add the payload frames that were written after the last commit."""
        with open(self.folder / fmt.PAYLOAD, "rb") as file:
            rows = list(fmt.scan_frames(file, self._covered, self.nbytes))
        known = {index for (index,) in self.db.execute("SELECT idx FROM root_calls")}
        # not into the stand-in for a table that lacks columns
        columns = len(self.db.execute("PRAGMA main.table_info(records)").fetchall())
        insert_row = insert("main.records", columns).replace("INSERT", "INSERT OR IGNORE", 1)
        for row in rows:
            if row[AT["root_call"]] not in known:
                self._add_root_call(row[AT["root_call"]])
                known.add(row[AT["root_call"]])
            if row[AT["length"]] is not None and row[AT["kept"]] is None:
                self._add_figures(row)
            self.db.execute(insert_row, row[:columns])

    def _add_root_call(self, index: int) -> None:
        """Add a root call that was not committed, as a step after the last one."""
        sql = "SELECT max(generation), max(step) FROM root_calls"
        generation, last = self.db.execute(sql).fetchone()
        step = 0 if last is None else last + 1
        row = (index, generation or 0, step, "forward", None, None, None, "")
        self.db.execute(ROOT_CALLS.insert, row)

    def _add_figures(self, row: Row) -> None:
        offset, length, dtype, shape = (
            row[AT[name]] for name in ("offset", "length", "dtype", "shape")
        )
        summary = summarize(self.read(offset, length, dtype, shape))
        for name in _FIGURES:
            row[AT[name]] = getattr(summary, name)

    def read(
        self,
        offset: int,
        length: int,
        dtype: str,
        shape: str | tuple[int, ...],
        kept: str | None = None,
    ) -> torch.Tensor:
        """Return the values of a record: a ``dtype`` tensor, or what ``kept`` names of it.

        ``shape``: of what is returned. Offset and length are checked before memory is allocated.

        Raises:
            CorruptDumpError: the payload file is gone, too short, or does not hold such values.
        """
        file = self.folder / fmt.PAYLOAD
        try:
            if not (offset >= 0 and length >= 0 and offset + length <= file.stat().st_size):
                raise ValueError("cut short: the bytes of this tensor lie beyond its end")
            with open(file, "rb", buffering=0) as stream:
                stream.seek(offset)
                data = bytearray(length)
                if stream.readinto(data) != length:
                    raise ValueError("it ends early")
            sizes = fmt.shape_of(shape) if isinstance(shape, str) else shape
            return from_bytes(data, fmt.payload_dtype(kept, dtype), sizes)
        except FileNotFoundError:
            raise CorruptDumpError(f"{file} is gone: was the run deleted?") from None
        except (OSError, ValueError) as error:
            raise CorruptDumpError(f"{file}: {error}") from None


def processes(path: Path) -> list[Process]:
    """Return the processes of a native run, in order of rank and start. Raises CorruptDumpError."""
    folders = [
        child
        for child in sorted(path.iterdir())
        if child.is_dir()
        and (child / fmt.INDEX).exists()
        and path.resolve() in child.resolve().parents
    ]
    if not folders:
        raise CorruptDumpError(f"{path} holds no recording: no rank*/{fmt.INDEX} in it")
    found = [Process(folder, 0) for folder in folders]
    found.sort(key=lambda process: (process.rank, process.begun, process.folder.name))
    for number, process in enumerate(found):
        process.number = number
    _number_generations(found)
    return found


def _number_generations(processes: list[Process]) -> None:
    """Let the generations of a process follow those of the process before it with its rank."""
    free: dict[int, int] = {}
    for process in processes:
        sql = "SELECT min(generation), max(generation) FROM root_calls"
        low, high = process.db.execute(sql).fetchone()
        if process.rank in free and low is not None:
            process.later = free[process.rank] - min(low, 0)
        end = (high if high is not None else -1) + 1 + process.later
        free[process.rank] = max(free.get(process.rank, 0), end)


def _log_of(index: Path) -> Path:
    return index.with_name(index.name + "-wal")


def _connect(index: Path, settled: bool) -> sqlite3.Connection:
    """Open an index: in place if it was closed, else a copy in memory."""
    if not index.is_file():
        raise CorruptDumpError(f"{index} is missing")
    try:
        if settled:
            uri = f"{index.resolve().as_uri()}?mode=ro&immutable=1"
            db = sqlite3.connect(uri, uri=True, check_same_thread=False)
        else:
            db = _copied(index)
        db.execute("PRAGMA trusted_schema=OFF")
    except (sqlite3.DatabaseError, OSError) as error:
        raise CorruptDumpError(f"{index} is damaged: {error}") from None
    return db


def _copied(index: Path) -> sqlite3.Connection:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / fmt.INDEX
        shutil.copyfile(index, copy)
        if _log_of(index).is_file():
            shutil.copyfile(_log_of(index), _log_of(copy))
        with sqlite3.connect(copy) as torn:
            db = sqlite3.connect(":memory:", check_same_thread=False)
            torn.backup(db)
        torn.close()
    return db
