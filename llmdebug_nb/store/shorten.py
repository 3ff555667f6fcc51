"""Shortening a recording: what came after a tensor is taken out of its index."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from llmdebug_nb.core import columns
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.store import catalog
from llmdebug_nb.store import format as fmt

# What is said of a call goes with its last tensor; times have no call that could tell.
_OF_CALLS = (columns.SCALARS, columns.OPERATORS, columns.CALLS)
_CALL = ("root_call", "path", "call")
_STATEMENTS = [
    f"DELETE FROM {table.name} WHERE ({', '.join(_CALL)}) NOT IN"
    f" (SELECT {', '.join(_CALL)} FROM {columns.RECORDS.name})"
    for table in _OF_CALLS
]


def shorten(run: Path, last: int) -> None:
    """Forget the tensors with larger ids than ``last``, and calls of which no tensor is left.

    The run has one process, which has closed its index. Raises DumpWriteError.
    """
    for process in catalog.process_folders(run):
        try:
            with contextlib.closing(sqlite3.connect(process / fmt.INDEX)) as db, db:
                db.execute(f"DELETE FROM {columns.RECORDS.name} WHERE id > ?", (last,))
                for statement in _STATEMENTS:
                    db.execute(statement)
        except sqlite3.Error as error:
            raise DumpWriteError(f"can't write {process / fmt.INDEX}: {error}") from None
