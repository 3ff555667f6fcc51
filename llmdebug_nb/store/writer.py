"""Writing a dump: values at once, rows once for each root call.

A killed process loses nothing that was written: every payload frame names its record and is
written by one `writev`, and rows are committed to a write-ahead log.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmdebug_nb.core import columns
from llmdebug_nb.core.batches import Batch, Frames
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError
from llmdebug_nb.core.masking import MASK, masked_json
from llmdebug_nb.core.records import Node
from llmdebug_nb.store import forgetting, own_file, waiting
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.own_file import PRIVATE_FILE, PRIVATE_FOLDER
from llmdebug_nb.store.payload_files import PayloadWriter
from llmdebug_nb.store.rows import node_row
from llmdebug_nb.store.signals import Signals
from llmdebug_nb.store.utf8 import storable

if TYPE_CHECKING:
    from llmdebug_nb.core.moments import Signal

FLOOR = 256 << 20  # bytes that a dump leaves free on the disk for the program and others
STATS_FLOOR = 16 << 20  # the same for a dump of statistics only
_PAGES = 1000  # of the log, SQLite's own default
_INSERTS = {table.name: table.insert for table in columns.TABLES}
_PAGE = 1 << 12
_KILLED = "the engine was killed between two steps; a request may have been unfinished"


def _create(file: Path, flags: int) -> int:
    """Create a file that only its owner may read; return its descriptor. Raises OSError."""
    return os.open(file, flags | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), PRIVATE_FILE)


def _replacing(table: columns.Table) -> str:
    return table.insert.replace("INSERT", "INSERT OR REPLACE", 1)


def _refusal(error: OSError | sqlite3.Error, folder: Path) -> DumpWriteError:
    if getattr(error, "errno", None) == errno.ENOSPC or "full" in str(error):
        less = "free some, or record less (tokens, layers, stats_only)"
        return DumpWriteError(f"no space left for the dump in {folder}; {less}")
    reason = getattr(error, "strerror", None) or error
    return DumpWriteError(
        f"can't write the dump to {folder}: {reason}; choose another place with path="
    )


def free_space(folder: Path) -> int:
    """Return the free bytes of the disk of ``folder``, which need not exist yet.

    If the disk does not tell, the number is very large.
    """
    places = (folder, *folder.absolute().parents)
    there = next((place for place in places if place.exists()), Path())
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return sys.maxsize
    return usage.free if usage.total else sys.maxsize  # some network disks answer 0 of 0


def _refuse_full_disk(parent: Path, options: dict[str, Any]) -> None:
    free, need, less = free_space(parent), FLOOR, ""
    if options.get("stats_only"):
        need = STATS_FLOOR
    else:
        enough = f"{STATS_FLOOR >> 20} MiB are enough"
        less = f", or record with stats_only=True, for which {enough}"
    if free < need:
        raise DumpWriteError(
            f"not enough space for a dump in {parent}: {free >> 20:,} MiB are free"
            f" and {need >> 20:,} MiB are needed;"
            f" free some, choose another place with path={less}"
        )


def _new_folder(parent: Path, name: str) -> Path:
    """Create ``name``, or ``name.2``, ``.3`` … if that is taken. Raises OSError."""
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}.{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(PRIVATE_FOLDER)
            return folder
    raise AssertionError


def create_run(parent: Path, name: str, details: dict[str, Any]) -> Path:
    """Create the folder of a new run: ``name``, or ``name.2``, ``.3`` … if that is taken.

    ``details``: further fields of the marker. Its ``options`` tell how much room is needed.

    Raises:
        DumpWriteError: the place can't be written to, or the disk is nearly full; nothing was
            created.
    """
    _refuse_full_disk(parent, details.get("options", {}))
    try:
        parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        folder = _new_folder(parent, name)
        marker = {
            "format": fmt.FORMAT,
            "version": fmt.VERSION,
            "name": name,
            "id": uuid.uuid4().hex,
            "created": time.time(),
            **details,
        }
        text = json.dumps(masked_json(marker), indent=1) + "\n"
        with open(_create(folder / fmt.MARKER, os.O_WRONLY), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _refusal(error, parent) from None
    return folder.resolve()


class Writer:
    """The files of one process in a run.

    Any thread may add rows; for payloads, the session holds the lock.
    """

    def __init__(self, run: Path, rank: int = 0, waits: bool = False) -> None:
        """``waits``: a program waits for what is written, see `waiting`.

        Raises DumpWriteError if the run's folder can't be written to.
        """
        self.waits = waits
        self.folder = run / f"rank{rank}_{os.getpid()}"
        undo = contextlib.ExitStack()
        try:
            self.folder = _new_folder(run, self.folder.name)
            self._payload = PayloadWriter(self.folder)
            undo.callback(self._payload.close)
            self._signals = Signals(run, self.folder.name, rank)
            self._masked, self._masked_lines = 0, set[str]()
            self.frames = Frames(bytearray(), fmt.SAFETENSORS)
            index = self.folder / fmt.INDEX
            os.close(_create(index, os.O_WRONLY))  # SQLite gives its log the same permissions
            self._db = sqlite3.connect(index, check_same_thread=False, isolation_level=None)
            self._lock = threading.RLock()  # a connection has one transaction at a time
            undo.callback(self._db.close)
            # an empty index is not worth waiting for the disk
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.executescript(f"BEGIN; {fmt.SCHEMA}; COMMIT")
            # the log is merged once, at close: until then the file never changes under a reader
            for pragma in ("journal_mode=WAL", "wal_autocheckpoint=0"):
                self._db.execute(f"PRAGMA {pragma}")
            self.note({"rank": rank, "pid": os.getpid(), "begun": time.time(), "complete": False})
            self._db.execute("PRAGMA synchronous=NORMAL")
        except BaseException as error:
            undo.close()
            if isinstance(error, (OSError, sqlite3.Error)):
                raise _refusal(error, self.folder) from None
            raise

    def shortage(self, nbytes: int) -> str | None:
        """Say why the disk has no room for so many bytes, or return None.

        This asks the system: too slow to be called for every tensor.
        """
        if free_space(self.folder) - nbytes >= FLOOR:
            return None
        return f"the disk has less than {FLOOR >> 20} MiB left"

    def payload(self, row: Row, data: np.ndarray | memoryview, header: bytes | None = None) -> None:
        """Append ``uint8[n]`` as a frame and set the row's ``offset`` and ``length``.

        ``header``: of the frame, if it is made already. Raises DumpWriteError: the disk is full,
        for instance; the file is cut back to its last complete frame.
        """
        header = header or fmt.encode_header(row, data.nbytes)
        waiting = bytes(self.frames.waiting)
        start = self._append([waiting, header, data, bytes(-data.nbytes % fmt.ALIGN)])
        self.frames.waiting.clear()
        row[AT["offset"]], row[AT["length"]] = start + len(waiting) + len(header), data.nbytes

    def duplicate(self, row: Row, offset: int, length: int) -> None:
        """Point the row at values that are already there, by a frame without values.

        Such frames wait for the next values, or until they fill a page: a system call for each
        would cost more than everything else. Raises DumpWriteError.
        """
        row[AT["offset"]], row[AT["length"]] = offset, length
        self.frames.waiting.extend(fmt.encode_header(row, None))
        if len(self.frames.waiting) >= _PAGE:
            self.write_frames()

    def write_frames(self) -> None:
        """Write the frames that wait. Raises DumpWriteError."""
        if self.frames.waiting:
            self._append([bytes(self.frames.waiting)])
            self.frames.waiting.clear()

    def _append(self, parts: list[Any]) -> int:
        """Write the parts in one go and return their offset. Raises DumpWriteError."""
        try:
            return self._payload.append(parts)
        except OSError as error:
            raise _refusal(error, self.folder) from None

    def commit(self, batch: Batch | None = None, meta: dict[str, Any] | None = None) -> None:
        """Add rows to the index, all of them or none. ``meta``: of the process, too.

        Raises:
            DumpWriteError: they could not be written.
        """
        batch = batch or Batch()
        # these frames only matter after a crash: the index will name the same values
        with contextlib.suppress(DumpWriteError):
            self.write_frames()
        with self._transaction(batch) as db:
            scalars = [*self._counted(batch.scalars)]
            rows = [*batch.records], scalars, [*batch.operators], [*batch.called]
            waiting.add_packed(db, batch.packed)
            (waiting.add if self.waits else waiting.insert_new)(db, rows)
            calls = (tuple(asdict(c).values()) for c in batch.calls)
            db.executemany(_replacing(columns.ROOT_CALLS), storable(calls))
            db.executemany(columns.SOURCES.insert, storable(self._noted(batch.sources)))
            db.executemany(columns.CHAINS.insert, storable(batch.chains))
            db.executemany(columns.FUNCTIONS.insert, storable(self._shown(batch.functions)))
            if meta:
                self._masked += json.dumps(masked_json(meta)).count(MASK)
            covered = {
                "bytes": self._payload.end,
                "masked": self._masked + len(self._masked_lines),
            }
            self._put_meta({**covered, **(meta or {})})
            batch.written = True  # or not, if this is undone

    @contextlib.contextmanager
    def _transaction(self, batch: Batch | None = None) -> Iterator[sqlite3.Connection]:
        """Commit what is written in the block, all or nothing. Raises DumpWriteError.

        ``batch``: what is written, to be marked if it is undone.
        Outside of one, SQLite would write to its log once for each row.
        """
        db = self._db
        with self._lock:
            masked = self._masked
            try:
                db.execute("BEGIN")
                yield db
                db.execute("COMMIT")
            except BaseException as error:
                if db.in_transaction:
                    self._masked = masked  # of secrets in what is undone
                    if batch is not None:
                        batch.written = False
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                if isinstance(error, (OSError, sqlite3.Error)):
                    raise _refusal(error, self.folder) from None
                raise

    def _counted(self, scalars: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield scalars, and count the secrets that were masked in them."""
        value = columns.SCALARS.names.index("value")
        for row in scalars:
            if row[value] and MASK in row[value]:
                self._masked += row[value].count(MASK)
            yield row

    def _noted(self, sources: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield call stacks, and note their lines in which secrets were masked."""
        for row in sources:
            if row[2] and MASK in row[2]:
                self._masked_lines |= {line for line in json.loads(row[2]) if MASK in line}
            yield row

    def _shown(self, functions: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield functions, and note their lines in which secrets were masked."""
        for row in functions:
            if MASK in row[3]:
                self._masked_lines |= {each.strip() for each in row[3].split("\n") if MASK in each}
            yield row

    def note(self, meta: dict[str, Any]) -> None:
        """Set metadata of the process: JSON values by name."""
        self.commit(meta=meta)

    def _put_meta(self, meta: dict[str, Any]) -> None:
        self._db.executemany(
            _replacing(columns.META), ((k, json.dumps(masked_json(v))) for k, v in meta.items())
        )

    def nodes(self, nodes: Iterable[Node], start: int) -> None:
        """Add modules to the model tree; ``start``: how many it has already."""
        rows = list(itertools.starmap(node_row, enumerate(nodes, start)))
        with self._transaction() as db:
            db.executemany(columns.NODES.insert, storable(rows))

    def table(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows to a table by its name."""
        with self._transaction() as db:
            db.executemany(_INSERTS[name], storable(rows))

    def tell(self, generation: int, step: int) -> None:
        """Tell the other processes of the run of an alarm. Raises DumpWriteError."""
        try:
            self._signals.tell(generation, step)
        except OSError as error:
            raise _refusal(error, self.folder.parent) from None

    def heard(self) -> list[Signal]:
        """Return the alarms of other processes since this was last asked. Raises DumpWriteError."""
        try:
            return self._signals.heard()
        except OSError as error:
            raise _refusal(error, self.folder.parent) from None

    def drop(self, calls: Collection[int], into: int) -> int:
        """Forget root calls and what was recorded in them; return how many bytes that sets free.

        What is recorded once, such as weights, then belongs to the root call ``into``. Further
        values go to a file of their own, which can go with its step.

        Raises:
            DumpWriteError: the disk does not let them go.
        """
        try:
            self._settle()
            self._payload.begin_file()
            unused = self._forget(calls, into)
            return sum(map(self._payload.remove, unused))
        except OSError as error:
            raise _refusal(error, self.folder) from None

    def _settle(self) -> None:
        """Turn all that waits into rows; what was done stays done if that ends early."""
        for batch in waiting.batches(self._db):
            with self._transaction() as db:
                waiting.settle(db, batch)

    def _forget(self, calls: Iterable[int], into: int) -> list[int]:
        """Take root calls out of the index; return where the files begin that nothing refers to."""
        self._db.execute(f"PRAGMA wal_autocheckpoint={_PAGES}")  # else the log grows for ever
        with self._transaction() as db:
            db.execute(forgetting.BY_CALL)
            places = forgetting.forget(db, {*calls, *forgetting.late(db)}, into)
            files = {file for place in places for file in self._payload.between(*place)}
            used = "SELECT 1 FROM records WHERE offset >= ? AND offset < ? LIMIT 1"
            return [file[0] for file in files if not db.execute(used, file).fetchone()]

    def close(self, meta: dict[str, Any]) -> None:
        """Merge the log into the index, add ``meta`` and close the files, whatever happens."""
        try:
            self._settle()
            self.commit(meta=meta)
            _merge_log(self._db)
        except sqlite3.Error as error:
            raise _refusal(error, self.folder) from None
        finally:
            self._payload.close()
            self._db.close()


def _merge_log(db: sqlite3.Connection) -> None:
    db.executescript(fmt.INDEXES.replace("INDEX", "INDEX IF NOT EXISTS"))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # without a log: one page changes, in its first 100 bytes, and needs no journal on the disk
    db.execute("PRAGMA journal_mode=MEMORY")


def finish(folder: Path) -> bool:
    """Close what a process wrote that was killed while it had nothing to record.

    An engine's process says so between two steps (``idle``); what there is to say at the end is
    noted by then. Return whether it was closed: not if the process lives, or was at work.

    Raises:
        CorruptDumpError: the index is a link, or no file. DumpWriteError: it can't be written.
    """
    index = folder / fmt.INDEX
    own_file.check(index)
    db = sqlite3.connect(index, timeout=0, isolation_level=None)
    try:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # refused while the writer has the file open
        meta = dict(db.execute("SELECT key, value FROM main.meta"))
        if meta.get("idle") != "true":
            return False
        for batch in waiting.batches(db):
            db.execute("BEGIN")
            waiting.settle(db, batch)
            db.execute("COMMIT")
        notes = [*json.loads(meta.get("notes", "[]")), _KILLED]
        fresh = {"complete": "true", "notes": json.dumps(notes)}
        db.executemany(_replacing(columns.META), fresh.items())
        _merge_log(db)
    except ValueError:
        raise CorruptDumpError(f"{index}: its notes are no JSON") from None
    except sqlite3.Error as error:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return False
        raise _refusal(error, folder) from None
    finally:
        db.close()
    return True
