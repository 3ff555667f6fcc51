"""The views that every opened dump has, whoever wrote it. `store/queries.py` asks them.

``rows`` has the records, ``operator_rows``, ``scalar_rows`` and ``call_rows`` the calls and their
scalars, each with rank, generation and step; the others have the rows of a table as they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from llmdebug_nb.core import columns
from llmdebug_nb.core.columns import Table, insert
from llmdebug_nb.store.connection import Connection

STRIDE = 1 << 40  # ids of the n-th process start at n * STRIDE
Step: TypeAlias = tuple[int, int]  # generation and step
_STORED_ELSEWHERE = ("id", "root_call")  # the first column and the last one of a view


class View(NamedTuple):
    """``columns``: name -> expression over the table ``t`` and the root call ``c`` of a row.

    ``kinds``: the type of the values of each. ``{base}`` makes the ids of processes
    differ, ``{later}`` their generations.
    """

    table: Table
    columns: dict[str, str]
    kinds: dict[str, object]

    def row(self, *columns: str) -> Any:
        """Return the type of a row of some columns, or of all, for `Connection.rows`."""
        return tuple[tuple(self.kinds[name] for name in columns or self.columns)]  # type: ignore[misc]

    def select(self, number: int, rank: int, later: int, step: Step | None) -> str:
        """Return the SELECT for the n-th process; nothing is added where ids stay as they are.

        SQLite finds rows by an index only while a column is bare. ``step``: rows of it alone.
        """
        base = f" + {number * STRIDE}" if number else ""
        values = {"base": base, "rank": rank, "process": number}
        values["later"] = f" + {later}" if later else ""
        chosen = ", ".join(f'{value} AS "{name}"' for name, value in self.columns.items())
        source = f"{self.table.name} t"
        if "root_call" in self.table.at:
            source += " LEFT JOIN root_calls c ON c.idx = t.root_call"
        if step is not None and "step" in self.columns:
            here = zip(("generation", "step"), step, strict=True)
            source += " WHERE " + " AND ".join(f"{self.columns[at]} = {n:d}" for at, n in here)
        return f"SELECT {chosen} FROM {source}".format(**values)


def _own(table: Table, *left_out: str) -> dict[str, str]:
    return {name: f't."{name}"' for name in table.names if name not in left_out}


def _placed(table: Table, number: str) -> dict[str, str]:
    """Return a table's columns with rank, generation and step of each row. ``number``: its id."""
    place = {"rank": "{rank}", "generation": "c.generation{later}", "step": "c.step"}
    return {"id": f"t.{number}{{base}}", **place, **_own(table, *_STORED_ELSEWHERE)}


def _in_step(table: Table) -> dict[str, str]:
    return {"generation": "c.generation{later}", "step": "c.step", **_own(table, "root_call")}


_RECORDS = {
    **_placed(columns.RECORDS, "id"),
    "producer": "t.producer{base}",
    "payload": "CASE WHEN t.offset IS NULL THEN NULL "
    "ELSE {process} || ',' || t.offset || ',' || t.length END",
    "seq": "t.id",
    "kind": "c.kind",
    "root": "c.root",
    "root_call": "t.root_call",
}
# the chain itself, which needs no number that differs between processes
_RECORDS["views"] = "(SELECT chain FROM views WHERE idx = t.views)"
_RECORDS["placed"] = "(SELECT placement FROM placements WHERE idx = t.placed)"
del _RECORDS["offset"], _RECORDS["length"]
_CALLS = {"seq": "t.rowid{base}", "rank": "{rank}", **_in_step(columns.CALLS)}
_WITH_ROOT_CALL = {"root_call": "t.root_call"}
# the types of columns that no table declares
_KINDS = {
    **dict.fromkeys(("id", "rank", "generation", "step", "seq"), int),
    **dict.fromkeys(("kind", "root"), str),
    "payload": str | None,
}


def _view(table: Table, columns: dict[str, str], **kinds: object) -> View:
    return View(
        table, columns, {name: ({**_KINDS, **table.kinds, **kinds})[name] for name in columns}
    )


VIEWS = {
    "rows": _view(columns.RECORDS, _RECORDS, views=str | None, placed=str | None),
    "all_calls": _view(
        columns.ROOT_CALLS,
        {**_own(columns.ROOT_CALLS), "generation": "t.generation{later}"},
    ),
    "scalar_rows": _view(columns.SCALARS, {"rank": "{rank}", **_in_step(columns.SCALARS)}),
    "all_nodes": _view(columns.NODES, _own(columns.NODES)),
    "operator_rows": _view(
        columns.OPERATORS,
        {**_placed(columns.OPERATORS, "rowid"), "source": "t.source{base}"},
    ),
    "all_sources": _view(columns.SOURCES, {**_own(columns.SOURCES), "idx": "t.idx{base}"}),
    "all_functions": _view(columns.FUNCTIONS, _own(columns.FUNCTIONS)),
    "all_kernels": _view(columns.KERNELS, _own(columns.KERNELS)),
    "call_rows": _view(columns.CALLS, _CALLS),
    "all_timings": _view(columns.TIMINGS, {**_placed(columns.TIMINGS, "id"), **_WITH_ROOT_CALL}),
    "all_launches": _view(columns.LAUNCHES, {**_placed(columns.LAUNCHES, "id"), **_WITH_ROOT_CALL}),
    "all_tilings": _view(columns.TILINGS, _own(columns.TILINGS)),
    "all_token_rows": _view(
        columns.TOKEN_ROWS, {**_in_step(columns.TOKEN_ROWS), **_WITH_ROOT_CALL}
    ),
}
ROW_COLUMNS = tuple(VIEWS["rows"].columns)
OPERATOR_COLUMNS = tuple(VIEWS["operator_rows"].columns)


def create_views(
    db: Connection, number: int, rank: int, later: int, step: Step | None = None
) -> None:
    """Create the views over the tables of the n-th process.

    ``later`` is added to generations. ``step``: what belongs to a step is shown of this one alone.
    """
    for name, view in VIEWS.items():
        db.write(f"CREATE TEMP VIEW {name} AS {view.select(number, rank, later, step)}")


def create_tables(db: sqlite3.Connection) -> None:
    """Create empty tables in the place of the views."""
    for name, view in VIEWS.items():
        db.execute(f"CREATE TABLE {name}({quoted(view.columns)})")


def insert_rows(db: sqlite3.Connection, view: str, rows: Iterable[Sequence[object]]) -> None:
    """Insert rows into a table of `create_tables`."""
    db.executemany(insert(view, len(VIEWS[view].columns)), rows)


def quoted(names: Iterable[str]) -> str:
    """Return names of columns for SQL."""
    return ",".join(f'"{name}"' for name in names)  # newer SQLites reserve the word `within`
