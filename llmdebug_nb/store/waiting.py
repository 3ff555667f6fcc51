"""Rows that wait for the end of a recording, packed: while the program runs, they cost little.

SQLite takes ten times as long for a row as it takes to pack one. So the rows of a root call are
written as one value, in the same transaction as ever, and become rows when the writer closes the
index. Who reads an index before that does so in its copy.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from llmdebug_nb.core import columns
from llmdebug_nb.core.batches import count_packed
from llmdebug_nb.core.columns import CALLS, OPERATORS, RECORDS, SCALARS, Table
from llmdebug_nb.store.utf8 import storable

TABLES = (RECORDS, SCALARS, OPERATORS, CALLS)  # whose rows may wait
_MOST = 4 << 20  # bytes that wait together, of 16 MiB that a reader takes
_pack = msgspec.msgpack.Encoder().encode


def add(db: sqlite3.Connection, rows: Sequence[Sequence[Sequence[object]]]) -> None:
    """Let rows of `TABLES` wait, inside of a transaction. A great many do not wait."""
    if not any(rows):
        return
    try:
        packed = _pack(rows)
    except UnicodeEncodeError:
        packed = _pack([[*storable(of_table)] for of_table in rows])
    if len(packed) > _MOST:
        insert_all(db, _unpack(packed))
    else:
        db.execute(columns.WAITING.insert, (packed,))


def add_packed(db: sqlite3.Connection, records: bytes | bytearray) -> None:
    """Let records wait that are packed already, as `Batch` says."""
    packed = _pack((msgspec.Raw(records), (), (), ()))
    if len(packed) > _MOST:
        insert_all(db, _unpack(packed))
    elif count_packed(records):
        db.execute(columns.WAITING.insert, (packed,))


def batches(db: sqlite3.Connection) -> list[int]:
    """Return the numbers of what waits, in order. An older index has no place for it."""
    there = "SELECT 1 FROM main.sqlite_master WHERE type = 'table' AND name = 'waiting'"
    if db.execute(there).fetchone() is None:
        return []
    return [number for (number,) in db.execute("SELECT rowid FROM main.waiting ORDER BY rowid")]


def settle(db: sqlite3.Connection, batch: int) -> None:
    """Turn a batch into rows, inside of a transaction.

    Raises:
        ValueError: they are none of ours.
    """
    (packed,) = db.execute("SELECT rows FROM main.waiting WHERE rowid = ?", (batch,)).fetchone()
    if not isinstance(packed, bytes):
        raise ValueError("rows that wait are no bytes")
    insert_all(db, _unpack(packed))
    db.execute("DELETE FROM main.waiting WHERE rowid = ?", (batch,))


def settle_all(db: sqlite3.Connection) -> None:
    """Turn all that waits into rows. Raises ValueError."""
    for batch in batches(db):
        settle(db, batch)


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    kinds = tuple(list[table.row] for table in TABLES)  # type: ignore[name-defined]
    return msgspec.msgpack.Decoder(tuple[kinds])  # type: ignore[valid-type]


def _unpack(packed: bytes) -> Sequence[list[Sequence[object]]]:
    rows: Sequence[list[Sequence[object]]] = _decoder().decode(packed)
    return rows


def insert_new(db: sqlite3.Connection, rows: Sequence[Sequence[Sequence[object]]]) -> None:
    """Insert rows of `TABLES` that a program has just made: their texts may be anything."""
    insert_all(db, [[*storable(of_table)] for of_table in rows])


def insert_all(db: sqlite3.Connection, rows: Sequence[Sequence[Sequence[object]]]) -> None:
    """Insert rows of `TABLES`."""
    for table, each in zip(TABLES, rows, strict=True):
        if each:
            insert(db, table, each)


def insert(db: sqlite3.Connection, table: Table, rows: Iterable[Sequence[object]]) -> None:
    """Insert rows of a table in their order: each with the columns that it has.

    Python takes seven times as long to bind None as to bind a number.
    """
    names = table.names
    if not table.has_id:
        last = f"SELECT coalesce(max(rowid), 0) FROM main.{table.name}"
        first = db.execute(last).fetchone()[0] + 1
        names, rows = ("rowid", *names), ((n, *row) for n, row in enumerate(rows, first))
    may_lack = itemgetter(*_optional(names, table))
    alike: dict[tuple[type, ...], list[Sequence[object]]] = {}
    for row in rows:
        kinds = tuple(map(type, may_lack(row)))
        known = alike.get(kinds)
        if known is None:
            known = alike[kinds] = []
        known.append(row)
    for group in alike.values():
        there = [place for place, value in enumerate(group[0]) if value is not None]
        statement = _statement(table.name, tuple(names[place] for place in there))
        db.executemany(statement, map(itemgetter(*there), group))


@functools.cache
def _optional(names: tuple[str, ...], table: Table) -> tuple[int, ...]:
    """Return the places of columns that a row may lack, and two more, so that there are several."""
    optional = {column.name for column in table.columns if column.optional or column.added_later}
    return (0, 1, *(place for place, name in enumerate(names) if name in optional))


@functools.lru_cache(256)
def _statement(table: str, names: tuple[str, ...]) -> str:
    chosen = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO main.{table}({chosen}) VALUES({','.join('?' * len(names))})"
