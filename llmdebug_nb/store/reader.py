"""Opening a dump as a Run: the native format, whole or cut short, and foreign layouts.

Nothing here executes code from a dump, leaves its folder or changes it: an index that was not
closed is copied aside before SQLite touches it, and its payload tail is read from the frames.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.columns import (
    AT,
    COLUMNS,
    LAUNCH_COLUMNS,
    OPERATOR_COLUMNS,
    ROW_COLUMNS,
    TIMING_COLUMNS,
)
from llmdebug_nb.core.errors import CorruptDumpError, NotADumpError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record
from llmdebug_nb.store import catalog, layouts
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.layouts import Contents
from llmdebug_nb.store.rows import STRIDE, quoted, row_of
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.source import Source

if TYPE_CHECKING:
    import torch

_ROWS = """SELECT {id} AS id, {rank} AS rank, c.generation{later} AS generation, c.step, c.kind, c.root, r.path, r.call, r.phase, r.role,
 r.slot, r.op, r.id AS seq, r.dtype, r.shape, r.min, r.max, r.mean, r.l2norm, r.nan, r.inf, r.zero, r.fingerprint, r.device,
 {producer} AS producer, CASE WHEN r.offset IS NULL THEN NULL ELSE {process} || ',' || r.offset || ',' || r.length END
 AS payload, r.lost, r.kept, r.kept_shape, r.root_call FROM main.records r LEFT JOIN main.root_calls c ON c.idx = r.root_call"""
_CALLS = "SELECT idx, generation{later} AS generation, step, kind, query, total, batch, root FROM main.root_calls"
_SCALARS = """SELECT c.generation{later} AS generation, c.step, s.path, s.call, s.role, s.slot, s.type, s.value
 FROM main.scalars s LEFT JOIN main.root_calls c ON c.idx = s.root_call"""
_NODES = "SELECT idx, path, name, type, parent, params, aliases, root FROM main.nodes"
_OPERATORS = """SELECT o.rowid + {base} AS id, {rank} AS rank, c.generation{later} AS generation, c.step, o.path, o.call, o.phase, o.level, o.op,
 o.source + {base} AS source, o."within", o.within_call, o.forward_path, o.forward_call
 FROM main.operators o LEFT JOIN main.root_calls c ON c.idx = o.root_call"""
_SOURCES = "SELECT idx + {base} AS idx, frames FROM main.sources"
_KERNELS = "SELECT name, nodes, source FROM kernels"
_CALLED = """SELECT i.rowid + {base} AS seq, {rank} AS rank, c.generation{later} AS generation, c.step, i.path, i.call, i.id
 FROM calls i LEFT JOIN main.root_calls c ON c.idx = i.root_call"""
_TIMINGS = """SELECT t.id + {base} AS id, {rank} AS rank, c.generation{later} AS generation, c.step, t.path, t.call, t.phase, t.level, t.op, t.thread, t.start,
 t.duration, t.gap, t.root_call FROM timings t LEFT JOIN main.root_calls c ON c.idx = t.root_call"""
_LAUNCHES = """SELECT l.id + {base} AS id, {rank} AS rank, c.generation{later} AS generation, c.step, l.path, l.call, l.phase, l.op, l.kernel, l.code, l.device,
 l.stream, l.start, l.duration, l.inputs, l.outputs, l.root_call FROM launches l LEFT JOIN main.root_calls c ON c.idx = l.root_call"""
_TILINGS = "SELECT name, configuration FROM tilings"
_VIEWS = {
    "rows": _ROWS,
    "all_calls": _CALLS,
    "scalar_rows": _SCALARS,
    "all_nodes": _NODES,
    "operator_rows": _OPERATORS,
    "all_sources": _SOURCES,
    "all_kernels": _KERNELS,
    "call_rows": _CALLED,
    "all_timings": _TIMINGS,
    "all_launches": _LAUNCHES,
    "all_tilings": _TILINGS,
}
# of several processes the first one's stand for all; of the others what is not there yet
_NEW = ("all_calls", "all_nodes")


def open_run(where: str | os.PathLike[str] | Run) -> Run:
    """Open a dump by name, path, or foreign dump folder; a Run is returned as it is.

    Raises:
        UnknownRunError, NotADumpError, CorruptDumpError: each says what was seen and what to do.
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
            f"{path} is no dump: no {fmt.MARKER} in it, and no layout matches (known: {known})"
        )
    run = Run(path.name, path, lambda: _foreign(layout, path))
    run.source  # noqa: B018 - what can't be read is said now, not at the first look
    return run


def native(path: Path) -> Run:
    """Return the Run of a native dump folder; it may still be recorded. Raises CorruptDumpError."""
    marker = catalog.read_marker(path)
    return Run(str(marker.get("name", path.name)), path, lambda: _open_native(path, marker))


class Process:
    """The files of one recording process, opened read-only."""

    def __init__(self, folder: Path, number: int) -> None:
        """``number``: its place among the processes of the run. ``later``: how far its generations are counted on from an earlier one's."""
        self.folder, self.number, self.later = folder, number, 0
        self.settled = not _log_of(folder / fmt.INDEX).is_file()
        self._seen = self._state()
        self.db = _connect(folder / fmt.INDEX, self.settled)
        try:
            tables = {
                row[0]
                for row in self.db.execute("SELECT name FROM sqlite_master WHERE type != 'index'")
            }
            if not tables >= fmt.TABLES - fmt.LATER.keys() or tables - fmt.TABLES:
                raise CorruptDumpError(
                    f"{folder / fmt.INDEX}: expected the tables {', '.join(sorted(fmt.TABLES))}"
                )
            self._absent = fmt.LATER.keys() - tables
            self.stand_in(self.db)
            self.meta = {
                key: json.loads(value)
                for key, value in self.db.execute("SELECT key, value FROM meta")
            }
            self.rank, self._covered = int(self.meta.get("rank", 0)), int(self.meta.get("bytes", 0))
            self.begun = float(self.meta.get("begun", 0.0))
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
        self.missing = self._missing_values() if self.nbytes < self._covered else 0
        self.complete = bool(self.meta.get("complete")) and not self.missing
        if not self.settled:
            try:
                self._add_tail()
            except (sqlite3.Error, OverflowError, TypeError) as error:
                raise CorruptDumpError(f"{payload}: a payload frame is damaged ({error})") from None

    def stand_in(self, db: sqlite3.Connection) -> None:
        """Give the index, or a copy of it, empty tables in the place of those that an older dump does not have."""
        for table in self._absent:
            columns = ", ".join(f"NULL AS {c}" for c in ("rowid", *fmt.LATER[table]))
            db.execute(f"CREATE TEMP VIEW {table} AS SELECT {columns} WHERE 0")

    def _missing_values(self) -> int:
        """Count the records whose bytes the payload file, cut short since, no longer has."""
        sql = "SELECT count(*) FROM records WHERE offset + length > ?"
        return int(self.db.execute(sql, (self.nbytes,)).fetchone()[0])

    def _state(self) -> list[tuple[int, int]]:
        """Return size and time of change of each file: what tells that the recording went on."""
        files = (
            self.folder / fmt.INDEX,
            _log_of(self.folder / fmt.INDEX),
            self.folder / fmt.PAYLOAD,
        )
        return [
            (stat.st_size, stat.st_mtime_ns)
            for stat in (file.stat() for file in files if file.is_file())
        ]

    def outdated(self) -> bool:
        """Tell whether more was recorded since this was opened."""
        return not self.settled and self._state() != self._seen

    def _add_tail(self) -> None:
        """Add the payload frames that were written after the last commit."""
        with open(self.folder / fmt.PAYLOAD, "rb") as file:
            rows = list(fmt.scan_frames(file, self._covered, self.nbytes))
        known = {row[0] for row in self.db.execute("SELECT idx FROM root_calls")}
        for row in rows:
            if row[AT["root_call"]] not in known:
                last = self.db.execute(
                    "SELECT max(generation), max(step) FROM root_calls"
                ).fetchone()
                step = 0 if last[1] is None else last[1] + 1
                call = (row[AT["root_call"]], last[0] or 0, step, "forward", None, None, None, "")
                self.db.execute("INSERT INTO root_calls VALUES(?,?,?,?,?,?,?,?)", call)
                known.add(row[AT["root_call"]])
            if row[AT["length"]] is not None and row[AT["kept"]] is None:
                tensor = self.read(
                    *(row[AT[name]] for name in ("offset", "length", "dtype", "shape"))
                )
                summary = summarize(tensor)
                for name in ("min", "max", "mean", "l2norm", "nan", "inf", "zero"):
                    row[AT[name]] = getattr(summary, name)
            self.db.execute(
                f"INSERT OR IGNORE INTO records VALUES({','.join('?' * len(COLUMNS))})", row
            )

    def read(
        self,
        offset: int,
        length: int,
        dtype: str,
        shape: str | tuple[int, ...],
        kept: str | None = None,
    ) -> torch.Tensor:
        """Read one payload: ``kept`` of a ``dtype`` tensor, of ``shape``.

        Offset and length are checked against the file before anything is allocated.
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


def _log_of(index: Path) -> Path:
    return index.with_name(index.name + "-wal")


def _connect(index: Path, settled: bool) -> sqlite3.Connection:
    """Open an index: in place when it was closed, from a private copy when it was not."""
    if not index.is_file():
        raise CorruptDumpError(f"{index} is missing")
    try:
        if settled:
            db = sqlite3.connect(
                f"{index.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
        else:
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / fmt.INDEX
                shutil.copyfile(index, copy)
                if _log_of(index).is_file():
                    shutil.copyfile(_log_of(index), _log_of(copy))
                with sqlite3.connect(copy) as torn:
                    db = sqlite3.connect(":memory:", check_same_thread=False)
                    torn.backup(db)
                torn.close()
        db.execute("PRAGMA trusted_schema=OFF")
    except (sqlite3.DatabaseError, OSError) as error:
        raise CorruptDumpError(f"{index} is damaged: {error}") from None
    return db


def processes(path: Path) -> list[Process]:
    """Return what each process recorded of a native run. Raises CorruptDumpError."""
    folders = sorted(
        child for child in path.iterdir() if child.is_dir() and (child / fmt.INDEX).exists()
    )
    folders = [folder for folder in folders if path.resolve() in folder.resolve().parents]
    if not folders:
        raise CorruptDumpError(f"{path} holds no recording: no rank*/{fmt.INDEX} in it")
    found = sorted(
        (Process(folder, 0) for folder in folders), key=lambda p: (p.rank, p.begun, p.folder.name)
    )
    for number, process in enumerate(found):
        process.number = number
    _count_on(found)
    return found


def _count_on(processes: list[Process]) -> None:
    """Have processes of one rank, which were one after the other or apart from each other, count generations on."""
    free: dict[int, int] = {}
    for process in processes:
        low, high = process.db.execute(
            "SELECT min(generation), max(generation) FROM root_calls"
        ).fetchone()
        if process.rank in free and low is not None:
            process.later = free[process.rank] - min(low, 0)
        free[process.rank] = max(
            free.get(process.rank, 0), (high if high is not None else -1) + 1 + process.later
        )


def _open_native(path: Path, marker: dict[str, Any]) -> Source:
    found = processes(path)
    db = found[0].db if len(found) == 1 else _merged(found)
    if len(found) == 1:
        _make_views(db, found[0])

    def load(record: Record) -> torch.Tensor:
        number, offset, length = (int(part) for part in str(record.payload).split(","))
        return found[number].read(
            offset, length, record.summary.dtype, record.payload_shape, record.kept
        )

    missing = sum(p.missing for p in found)
    meta = {
        **marker,
        **{k: v for k, v in found[0].meta.items() if k not in ("rank", "pid", "bytes")},
    }
    if missing:
        meta["ended_by"] = f"{fmt.PAYLOAD} is cut short, {missing:,} tensors have lost their values"
    return Source(
        db,
        load,
        layout=fmt.FORMAT,
        nbytes=sum(p.nbytes for p in found),
        complete=all(p.complete for p in found),
        processes=[
            {"rank": p.rank, "folder": p.folder.name, "later": p.later, **p.meta} for p in found
        ],
        meta=meta,
        outdated=lambda: any(p.outdated() for p in found),
    )


def _make_views(db: sqlite3.Connection, process: Process) -> None:
    base = process.number * STRIDE
    number, producer = (
        f"r.{name} + {base}" if base else f"r.{name}" for name in ("id", "producer")
    )  # bare: found by index
    for name, query in _VIEWS.items():
        later = f" + {process.later}" if process.later else ""  # bare: found by index
        values = {
            "id": number,
            "producer": producer,
            "base": base,
            "rank": process.rank,
            "process": process.number,
        }
        query = query.format(**values, later=later)
        db.execute(f"CREATE TEMP VIEW {name} AS {query}")


def _merged(processes: list[Process]) -> sqlite3.Connection:
    """Return one index in memory over several processes; topology and root calls are those of the first, and what others have besides."""
    db = sqlite3.connect(":memory:", check_same_thread=False)
    for process in processes:
        scratch = sqlite3.connect(":memory:", check_same_thread=False)
        process.db.backup(scratch)
        process.stand_in(scratch)
        _make_views(scratch, process)
        for name in _VIEWS:
            rows = scratch.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in rows.description]
            if process.number == 0:
                db.execute(f"CREATE TABLE {name}({quoted(columns)})")
            values = (
                _further(db, name, list(rows), process) if name in _NEW and process.number else rows
            )
            db.executemany(f"INSERT INTO {name} VALUES({','.join('?' * len(columns))})", values)
        scratch.close()
    db.execute("CREATE INDEX by_id ON rows(id)")
    return db


def _further(
    db: sqlite3.Connection, name: str, rows: list[tuple[Any, ...]], process: Process
) -> list[tuple[Any, ...]]:
    """Return the root calls, or the modules, of a further process that those before it do not have, numbered on."""
    if name == "all_calls":
        known = set(db.execute("SELECT generation, step FROM all_calls"))
        return [
            (row[0] + process.number * STRIDE, *row[1:]) for row in rows if row[1:3] not in known
        ]
    places = {
        path: place
        for place, (path,) in enumerate(db.execute("SELECT path FROM all_nodes ORDER BY idx"))
    }
    new = []
    for _, path, label, kind, parent, *rest in rows:
        if path not in places:
            above = places.get(rows[parent][1], -1) if 0 <= parent < len(rows) else -1
            places[path] = len(places)
            new.append((places[path], path, label, kind, above, *rest))
    return new


def _foreign(layout: Any, path: Path) -> Source:
    """Read another tool's dump."""
    contents = layout.read(path)
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return _indexed(contents, layout.NAME, sum(file.stat().st_size for file in files))


def held(name: str, contents: Contents, nbytes: int) -> Run:
    """Return a run of tensors that are in memory. ``meta["code"]``: the Python that gives one, by role, with ``{slot!r}``."""
    return Run(name, None, lambda: _indexed(contents, "memory", nbytes))


def _indexed(contents: Contents, layout: str, nbytes: int) -> Source:
    """Put contents into an index in memory, so that every query works on them alike."""
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.execute(f"CREATE TABLE rows({','.join(ROW_COLUMNS)})")
    db.execute("CREATE TABLE all_calls(idx, generation, step, kind, query, total, batch, root)")
    db.execute("CREATE TABLE all_nodes(idx, path, name, type, parent, params, aliases, root)")
    db.execute("CREATE TABLE scalar_rows(generation, step, path, call, role, slot, type, value)")
    db.execute(f"CREATE TABLE operator_rows({quoted(OPERATOR_COLUMNS)})")
    db.execute("CREATE TABLE all_sources(idx, frames)")
    db.execute("CREATE TABLE call_rows(seq, rank, generation, step, path, call, id)")
    for name, columns in (
        ("all_kernels", fmt.KERNEL),
        ("all_timings", TIMING_COLUMNS),
        ("all_launches", LAUNCH_COLUMNS),
        ("all_tilings", fmt.TILING),
    ):
        db.execute(f"CREATE TABLE {name}({quoted(columns)})")
    calls = {(call.generation, call.step): call for call in reversed(contents.calls)}
    by_id = {record.id: record for record in contents.records}
    db.executemany(
        f"INSERT INTO rows VALUES({','.join('?' * len(ROW_COLUMNS))})",
        (row_of(record, calls) for record in contents.records),
    )
    db.executemany(
        "INSERT INTO all_calls VALUES(?,?,?,?,?,?,?,?)",
        (
            (c.index, c.generation, c.step, c.kind, c.query, c.total, c.batch, c.root)
            for c in contents.calls
        ),
    )
    db.executemany(
        "INSERT INTO all_nodes VALUES(?,?,?,?,?,?,?,?)",
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
            )
            for i, n in enumerate(contents.nodes)
        ),
    )
    sites = dict.fromkeys(
        (s.rank, s.generation, s.step, s.path, s.call) for s in (r.site for r in contents.records)
    )
    called = [(*site, contents.ids[site[3]]) for site in sites if contents.ids.get(site[3])]
    called.sort(key=lambda row: (row[:3], [int(number) for number in row[5].split("_")]))
    db.executemany(
        "INSERT INTO call_rows VALUES(?,?,?,?,?,?,?)", ((i, *row) for i, row in enumerate(called))
    )
    load: Callable[[Record], torch.Tensor] = lambda record: contents.load(by_id[record.id])  # noqa: E731
    return Source(
        db,
        load,
        layout=layout,
        nbytes=nbytes,
        complete=bool(contents.meta.get("complete", True)),
        meta=contents.meta,
        processes=[{"rank": rank} for rank in sorted({r.site.rank for r in contents.records})]
        or [{"rank": 0}],
    )
