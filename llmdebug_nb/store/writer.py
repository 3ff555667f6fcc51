"""Writing a dump: payloads at once, rows once per root call.

A process that is killed loses nothing that was written: payload frames go to the file by one
`writev` each and name their record, and rows are committed to a write-ahead log.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmdebug_nb.core.columns import AT, COLUMNS, OPERATOR, Row
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.records import Node, RootCall
from llmdebug_nb.store import format as fmt

FLOOR = 256 << 20  # bytes that a dump leaves free on the disk: the program and others need some too
STATS_FLOOR = 16 << 20  # the same for one of statistics only
_INSERT = f"INSERT INTO records VALUES({','.join('?' * len(COLUMNS))})"
_INSERT_OPERATOR = f"INSERT INTO operators VALUES({','.join('?' * len(OPERATOR))})"
_MAX_WRITE = 1 << 30
_PAGE = 1 << 12


def _refusal(error: OSError | sqlite3.Error, folder: Path) -> DumpWriteError:
    if getattr(error, "errno", None) == errno.ENOSPC or "full" in str(error):
        return DumpWriteError(
            f"no space left for the dump in {folder}; free some, or record less (tokens, layers, stats_only)"
        )
    return DumpWriteError(
        f"can't write the dump to {folder}: {error}; choose another place with path="
    )


def free_space(folder: Path) -> int:
    """Return how many bytes may still be written below ``folder``, which need not exist yet; no limit where that can't be told."""
    there = next(
        (place for place in (folder, *folder.absolute().parents) if place.exists()), Path()
    )
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return sys.maxsize
    return usage.free if usage.total else sys.maxsize  # some network disks answer 0 of 0


def _refuse_full_disk(parent: Path, options: dict[str, Any]) -> None:
    stats_only = bool(options.get("stats_only"))
    free, need = free_space(parent), STATS_FLOOR if stats_only else FLOOR
    if free < need:
        less = (
            ""
            if stats_only
            else f", or record with stats_only=True, for which {STATS_FLOOR >> 20} MiB are enough"
        )
        raise DumpWriteError(
            f"not enough space for a dump in {parent}: {free >> 20:,} MiB are free and {need >> 20:,} MiB are needed;"
            f" free some, choose another place with path={less}"
        )


def create_run(parent: Path, name: str, details: dict[str, Any]) -> Path:
    """Make the folder of a new run below ``parent``: ``name``, or ``name.2``, ``.3`` … where that is taken.

    ``details``: what the marker says besides; by its ``options`` it is known whether payloads need room.

    Raises:
        DumpWriteError: the place can't be written to, or the disk is nearly full. Nothing was made then.
    """
    _refuse_full_disk(parent, details.get("options", {}))
    number = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / (name if number == 1 else f"{name}.{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                number += 1
        marker = {
            "format": fmt.FORMAT,
            "version": fmt.VERSION,
            "name": name,
            "id": uuid.uuid4().hex,
            "created": time.time(),
            **details,
        }
        (folder / fmt.MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _refusal(error, parent) from None
    return folder.resolve()


class Writer:
    """The files of one process in a run. Not thread-safe: the session holds the lock."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        """Raises DumpWriteError where the run's folder can't be written to."""
        self.folder = run / f"rank{rank}_{os.getpid()}"
        try:
            self.folder.mkdir()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.folder / fmt.PAYLOAD, flags, 0o644)
            self._held = bytearray()
            self._db = sqlite3.connect(
                self.folder / fmt.INDEX, check_same_thread=False, isolation_level=None
            )
            self._db.execute(
                "PRAGMA synchronous=OFF"
            )  # an empty index is not worth waiting for the disk
            self._db.executescript(fmt.SCHEMA)
            # the log is folded in once, at close: until then the file never changes under a reader
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=0"):
                self._db.execute(f"PRAGMA {pragma}")
            self.note({"rank": rank, "pid": os.getpid(), "begun": time.time(), "complete": False})
        except (OSError, sqlite3.Error) as error:
            raise _refusal(error, self.folder) from None

    def shortage(self, nbytes: int) -> str | None:
        """Say why the disk should not take so many more bytes of payload, or None. Asks the system: not for every tensor."""
        return (
            None
            if free_space(self.folder) - nbytes >= FLOOR
            else f"the disk has less than {FLOOR >> 20} MiB left"
        )

    def payload(self, row: Row, data: np.ndarray | memoryview) -> None:
        """Append ``uint8[n]`` as a frame and set the row's ``offset`` and ``length``.

        Raises:
            DumpWriteError: the disk is full, say; the file is cut back to its last whole frame.
        """
        header = fmt.encode_header(row, data.nbytes)
        held = bytes(self._held)
        start = self._append([held, header, data, bytes(-data.nbytes % fmt.ALIGN)])
        self._held.clear()
        row[AT["offset"]], row[AT["length"]] = start + len(held) + len(header), data.nbytes

    def duplicate(self, row: Row, offset: int, length: int) -> None:
        """Point the row at a payload that is already there, by a frame without one. Raises DumpWriteError.

        Such frames wait for the next payload, or until there is a page of them: a system call each would
        cost more than all the rest.
        """
        row[AT["offset"]], row[AT["length"]] = offset, length
        self._held += fmt.encode_header(row, None)
        if len(self._held) >= _PAGE:
            self._write_held()

    def _write_held(self) -> None:
        if self._held:
            self._append([bytes(self._held)])
            self._held.clear()

    def _append(self, parts: list[Any]) -> int:
        """Write the parts as one and return where they start: a multiple of 8, as every frame ends on one."""
        start = os.fstat(self._file).st_size
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            while views:
                whole = hasattr(os, "writev") and sum(map(len, views)) <= _MAX_WRITE
                done = (
                    os.writev(self._file, views)
                    if whole
                    else os.write(self._file, views[0][:_MAX_WRITE])
                )
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if views and done:
                    views[0] = views[0][done:]
        except OSError as error:
            os.ftruncate(self._file, start)
            raise _refusal(error, self.folder) from None
        return start

    def commit(
        self,
        rows: Iterable[Row] = (),
        calls: Iterable[RootCall] = (),
        scalars: Iterable[tuple[Any, ...]] = (),
        meta: dict[str, Any] | None = None,
        *,
        operators: Iterable[Row] = (),
        sources: Iterable[tuple[int, str]] = (),
        called: Iterable[tuple[int, str, int, str]] = (),
    ) -> None:
        """Make rows, root calls, scalars, operator calls, numbered call stacks (JSON) and the ids of calls part of the dump, all or none.

        Raises:
            DumpWriteError: they could not be written.
        """
        db = self._db
        with contextlib.suppress(
            DumpWriteError
        ):  # only there for a crash: what follows makes them part of the index
            self._write_held()
        try:
            db.execute("BEGIN")
            db.executemany(_INSERT, rows)
            db.executemany(
                "INSERT OR REPLACE INTO root_calls VALUES(?,?,?,?,?,?,?,?)",
                (tuple(asdict(c).values()) for c in calls),
            )
            db.executemany("INSERT INTO scalars VALUES(?,?,?,?,?,?,?)", scalars)
            db.executemany(_INSERT_OPERATOR, operators)
            db.executemany("INSERT INTO sources VALUES(?,?)", sources)
            db.executemany("INSERT INTO calls VALUES(?,?,?,?)", called)
            self._put_meta({"bytes": os.fstat(self._file).st_size, **(meta or {})})
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise _refusal(error, self.folder) from None

    def note(self, meta: dict[str, Any]) -> None:
        """Set metadata of the process: JSON values by name."""
        self.commit(meta=meta)

    def _put_meta(self, meta: dict[str, Any]) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO meta VALUES(?,?)", ((k, json.dumps(v)) for k, v in meta.items())
        )

    def nodes(self, nodes: Iterable[Node], start: int) -> None:
        """Add topology rows; ``start``: how many are there already."""
        rows = [
            (
                start + i,
                n.path,
                n.name,
                n.type,
                n.parent,
                json.dumps(n.params),
                json.dumps(n.aliases),
                n.root,
            )
            for i, n in enumerate(nodes)
        ]
        try:
            self._db.executemany("INSERT INTO nodes VALUES(?,?,?,?,?,?,?,?)", rows)
        except sqlite3.Error as error:
            raise _refusal(error, self.folder) from None

    def table(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows to a table of `format.LATER`."""
        try:
            self._db.executemany(
                f"INSERT INTO {name} VALUES({','.join('?' * len(fmt.LATER[name]))})", rows
            )
        except sqlite3.Error as error:
            raise _refusal(error, self.folder) from None

    def close(self, meta: dict[str, Any]) -> None:
        """Fold the log in and mark the process's dump as what ``meta`` says. The files are closed in any case."""
        try:
            self.commit(meta=meta)
            self._db.executescript(fmt.INDEXES)
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            raise _refusal(error, self.folder) from None
        finally:
            self._db.close()
            os.close(self._file)
