"""The index of a dump, opened so that its content can do no harm.

A dump may come from a stranger. So its schema must be ours, word for word: tables and indexes
alone, without views, triggers, generated columns or virtual tables, which run when they are read.
Every row is checked against the types of its columns where it is read, so that no other part of the
program meets a text in the place of a number.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sqlite3
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from llmdebug_nb.core.columns import TABLES, WAITING
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import own_file, waiting
from llmdebug_nb.store.checked import DAMAGE, rows_of

T = TypeVar("T")
# Seconds. Reading all of 10^7 records takes 20; a damaged index can make SQLite search for ever.
LONGEST_QUERY = 60.0
# Instructions of SQLite between two looks at the clock: 10^8 are done a second, so 1 ms.
_INSTRUCTIONS = 100_000
_TRIES = 5  # to copy an index between two changes, which are seconds apart
_RESERVE = 64 << 20  # bytes of the temporary folder that are left free
# By SQLite's name. Bytes of a text: the longest of ours, the source of a graph, has some 100 KB.
# Columns: a record has 27. Nothing is attached.
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": 1 << 24,
    "SQLITE_LIMIT_COLUMN": 100,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
}


class Connection(sqlite3.Connection):
    """A connection to an index, or to one in memory. ``file``: for messages.

    ``settled``: its writer has closed it. ``widths``: how many columns each of its tables has.
    ``scratch``: the folder with the copy that it reads. ``reading``: what surrounds each query.
    """

    file: Path | None = None
    settled = True
    widths: Mapping[str, int]
    longest = LONGEST_QUERY
    scratch: str | None = None
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    _end = float("inf")

    def close(self) -> None:
        super().close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def __del__(self) -> None:
        self.close()

    def rows(self, kind: type[T], sql: str, values: Sequence[object] = ()) -> list[T]:
        """Return the rows of a SELECT as ``kind``, such as ``tuple[str, int]``.

        Raises CorruptDumpError: a value has another type, or the index can't be read.
        """
        with self.reading(), self._asking():
            return rows_of(kind, self.execute(sql, values).fetchall())

    def numbers(self, sql: str, values: Sequence[object] = ()) -> array[int]:
        """Return the only column of a SELECT, whole numbers. Raises CorruptDumpError.

        It is `rows` of ``tuple[int]`` in a third of the time: the array takes nothing else.
        """
        with self.reading(), self._asking():
            return array("q", itertools.chain.from_iterable(self.execute(sql, values)))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """End a query that takes too long, and tell what is wrong with the index."""
        self._end = time.monotonic() + self.longest
        try:
            yield
        except (*DAMAGE, TypeError) as error:
            late = self._is_late() and f"a query took more than {self.longest:.0f} s"
            raise self.damaged(late or error) from None
        finally:
            self._end = float("inf")

    def write(self, sql: str, values: Sequence[object] = ()) -> None:
        """Change an index in memory. Raises CorruptDumpError."""
        try:
            self.execute(sql, values)
        except DAMAGE as error:
            raise self.damaged(error) from None

    def damaged(self, error: object) -> CorruptDumpError:
        """Return the error to raise about this index."""
        why = " ".join(str(error).split())[:300]
        return CorruptDumpError(f"{self.file or 'index'} is damaged: it can't be read ({why})")

    def harden(self) -> None:
        """Refuse what only a stranger's index holds. Raises CorruptDumpError."""
        self.set_progress_handler(self._is_late, _INSTRUCTIONS)
        if hasattr(self, "setlimit"):  # from Python 3.11 on
            for name, limit in _LIMITS.items():
                self.setlimit(getattr(sqlite3, name), limit)
        try:
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON"):
                self.execute(f"PRAGMA {pragma}")
        except sqlite3.Error as error:
            raise self.damaged(error) from None
        made = self.rows(
            tuple[str, str, str | None], "SELECT type, name, sql FROM main.sqlite_master"
        )
        try:
            self.widths = _widths(tuple(made))
        except ValueError as error:
            raise CorruptDumpError(f"{self.file}: {error}") from None

    def has_waiting(self) -> bool:
        """Return whether rows wait. Raises CorruptDumpError."""
        waits = "SELECT EXISTS (SELECT 1 FROM main.waiting)"
        return WAITING.name in self.widths and self.rows(tuple[int], waits) == [(1,)]

    def settle(self) -> None:
        """Turn rows that wait into rows, in a copy. Raises CorruptDumpError: they are none."""
        try:
            with self:
                waiting.settle_all(self)
        except DAMAGE as error:
            raise self.damaged(error) from None

    def seal(self) -> None:
        """Let nothing be written from now on."""
        self.execute("PRAGMA query_only=ON")

    def _is_late(self) -> bool:
        return time.monotonic() > self._end


def connect(index: Path) -> Connection:
    """Open an index: in place if it was closed, else a copy of it.

    Raises CorruptDumpError.
    """
    log = log_of(index)
    try:
        own_file.check(index)
        settled = not os.path.lexists(log)
        db = _in_place(index) if settled else _copied(index, log)
    except FileNotFoundError:
        raise CorruptDumpError(f"{index} is missing") from None
    except (sqlite3.Error, OSError) as error:
        raise CorruptDumpError(f"{index} is damaged: {error}") from None
    db.file, db.settled = index, settled
    db.harden()
    if db.has_waiting():
        if settled:  # the writer could not finish
            db.close()
            db = _copied(index, log)
            db.file, db.settled = index, False
            db.harden()
        db.settle()
    return db


def log_of(index: Path) -> Path:
    """Return the write-ahead log of an index, which is there until the writer closes it."""
    return index.with_name(f"{index.name}-wal")


def in_memory() -> Connection:
    """Return an empty index of our own."""
    return sqlite3.connect(":memory:", check_same_thread=False, factory=Connection)


def _in_place(index: Path) -> Connection:
    uri = f"{index.resolve().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, factory=Connection)


def _copied(index: Path, log: Path) -> Connection:
    """SQLite changes an index that has a log when it opens it, so it is given a copy.

    The copy stays on disk, as an index may be larger than memory. It vanishes with the connection.

    Raises:
        CorruptDumpError: there is no room for it.
    """
    scratch = tempfile.mkdtemp(prefix="llmdebug-")
    db = None
    try:
        needed, free = sum(map(_size, (index, log))), _room(scratch)
        if needed > free:
            raise CorruptDumpError(
                f"{index} was not closed, so a copy of it is read, and that needs {needed:,} bytes:"
                f" {tempfile.gettempdir()} has {max(free, 0):,}; TMPDIR names another folder"
            )
        _copy_both(index, log, Path(scratch))
        db = sqlite3.connect(
            Path(scratch) / index.name, check_same_thread=False, factory=Connection
        )
        db.scratch = scratch
        db.execute("PRAGMA journal_mode=MEMORY")  # after the log was folded in
        db.execute("PRAGMA synchronous=OFF")
        if os.name == "posix":  # where an open file needs no name
            shutil.rmtree(scratch, ignore_errors=True)
        return db
    except BaseException:
        if db is not None:
            db.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _copy_both(index: Path, log: Path, scratch: Path) -> None:
    """Copy an index and its log, again if the log was merged into the index meanwhile.

    Only a recording with the option ``last`` does so, after many steps.
    """
    for _ in range(_TRIES):
        before = own_file.check(index)
        for file in filter(os.path.lexists, (index, log)):
            with own_file.open_file(file) as stream, open(scratch / file.name, "wb") as copy:
                shutil.copyfileobj(stream, copy)
        after = own_file.check(index)
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return
    raise CorruptDumpError(f"{index} changes too fast to be read: try again")


def _size(file: Path) -> int:
    return own_file.check(file).st_size if os.path.lexists(file) else 0


def _room(folder: str) -> int:
    """Return how many bytes a copy may take: what is free, but for what others may need."""
    return shutil.disk_usage(folder).free - _RESERVE


@functools.lru_cache(16)  # runs of one version have one schema
def _widths(made: tuple[tuple[str, str, str | None], ...]) -> Mapping[str, int]:
    """Return the number of columns of each table. Raises ValueError for what is not ours."""
    widths: dict[str, int] = {}
    for kind, name, sql in made:
        table, columns = _known().get(_words(sql or ""), ("", 0))
        if columns:
            widths[table] = columns
        elif not table and not (kind == "index" and sql is None):
            raise ValueError(
                f"the {kind} {name[:60]!r} is none of this format, or other than docs/format.md"
                " describes it"
            )
    for one in TABLES:
        if not one.added_later and one.name not in widths:
            raise ValueError(f"the table {one.name} is missing")
    return widths


def _words(sql: str) -> str:
    """Return a statement without what makes no difference: spaces, quotes, case."""
    return "".join(sql.split()).replace('"', "").lower()


@functools.cache
def _known() -> dict[str, tuple[str, int]]:
    """Return the statements of our schema with the table and its columns; 0 for an index.

    The tables of older dumps lack some columns.
    """
    tables = {
        _words(table.create_with(columns)): (table.name, columns)
        for table in TABLES
        for columns in range(len(table.first_names), len(table.names) + 1)
    }
    indexes = filter(None, map(_words, fmt.INDEXES.split(";")))
    return tables | dict.fromkeys(indexes, ("index", 0))
