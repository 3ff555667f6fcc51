"""Root calls that leave an index while the recording goes on: what is of them leaves with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from llmdebug_nb.core import columns
from llmdebug_nb.store import format as fmt

BY_CALL = fmt.INDEXES.partition(";")[0].replace("INDEX", "INDEX IF NOT EXISTS")
_TABLES = [table.name for table in columns.TABLES if "root_call" in table.names]
# what is recorded once goes on; all else of a root call goes
_MOVES = [
    f"UPDATE {table.name} SET root_call = ? WHERE root_call = ? AND role IN ('attribute', 'weight')"
    for table in (columns.RECORDS, columns.SCALARS)
]
_DELETES = [f"DELETE FROM {name} WHERE root_call = ?" for name in _TABLES]
_DELETES += [f"DELETE FROM {columns.ROOT_CALLS.name} WHERE idx = ?"]
_LATE = " UNION ".join(
    f"SELECT root_call FROM {name} WHERE root_call NOT IN "
    f"(SELECT idx FROM {columns.ROOT_CALLS.name})"
    for name in _TABLES
)


def late(db: sqlite3.Connection) -> list[int]:
    """Return the root calls that are gone and have rows again.

    The backward pass of a step may come after other steps.
    """
    return [call for (call,) in db.execute(_LATE)]


def forget(db: sqlite3.Connection, calls: Iterable[int], into: int) -> list[tuple[int, int]]:
    """Delete the rows of root calls; return the first and the last offset of the values of each.

    Inside of a transaction. What is recorded once, such as weights, goes to the call ``into``.
    """
    numbers = [(call,) for call in calls]
    read = "SELECT min(offset), max(offset + length) FROM records WHERE root_call = ?"
    places = [row for number in numbers for row in db.execute(read, number) if row[0] is not None]
    for statement in _MOVES:
        db.executemany(statement, ((into, *number) for number in numbers))
    for statement in _DELETES:
        db.executemany(statement, numbers)
    return places
