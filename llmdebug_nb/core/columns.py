"""The tables of a recording: every column is declared here, once.

Capture hands rows of these tables to the store as lists in the order of the columns. The schema,
the statements that insert rows and the views that readers query are derived from them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

Row = list[Any]


class Column(NamedTuple):
    """``type``: in SQL. ``meaning``: where the name alone does not say it.

    ``added_later``: older dumps do not have it. Such columns are the last ones of their table.
    """

    name: str
    type: str
    meaning: str = ""
    added_later: bool = False


class Table:
    """A table of the index. ``added_later``: older dumps do not have it."""

    def __init__(self, name: str, columns: list[Column], added_later: bool = False) -> None:
        self.name, self.columns, self.added_later = name, columns, added_later

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def first_names(self) -> tuple[str, ...]:
        """The names of the columns that every dump has."""
        return tuple(column.name for column in self.columns if not column.added_later)

    @cached_property
    def at(self) -> dict[str, int]:
        """The place of each column in a row."""
        return {name: place for place, name in enumerate(self.names)}

    def span(self, first: str, last: str) -> slice:
        """Return the slice of a row from one column to another, both included."""
        return slice(self.at[first], self.at[last] + 1)

    @property
    def create(self) -> str:
        """The statement that creates the table."""
        columns = ", ".join(f'"{column.name}" {column.type}' for column in self.columns)
        return f"CREATE TABLE {self.name}({columns})"

    @cached_property
    def insert(self) -> str:
        """The statement that inserts a row."""
        return insert(self.name, len(self.columns))


def insert(table: str, columns: int) -> str:
    """Return the statement that inserts a row of so many columns."""
    return f"INSERT INTO {table} VALUES({','.join('?' * columns)})"


# the call that a row belongs to
_ROOT_CALL = Column("root_call", "INT", "the root call that it ran in")
_PATH = Column("path", "TEXT", "of the module or operator")
_CALL = Column("call", "INT", "n-th call of this path in the step")
_PHASE = Column("phase", "TEXT", "forward | backward")
_ROLE = Column("role", "TEXT")
_SLOT = Column("slot", "TEXT")
_LEVEL = Column("level", "TEXT")
_OP = Column("op", "TEXT", "class of the module, or name of the operator")
_START = Column("start", "INT", "nanoseconds of the program's clock, see capture/timing")
_DURATION = Column("duration", "INT", "nanoseconds")
_ID = Column("id", "INTEGER PRIMARY KEY", "counts up in execution order")
_INDEX = Column("idx", "INTEGER PRIMARY KEY")

META = Table("meta", [Column("key", "TEXT PRIMARY KEY"), Column("value", "TEXT NOT NULL", "JSON")])
ROOT_CALLS = Table(
    "root_calls",  # in the order of `records.RootCall`
    [
        _INDEX,
        Column("generation", "INT"),
        Column("step", "INT"),
        Column("kind", "TEXT"),
        Column("query", "INT"),
        Column("total", "INT"),
        Column("batch", "INT"),
        Column("root", "TEXT"),
    ],
)
NODES = Table(
    "nodes",  # `records.Node`
    [
        _INDEX,
        _PATH,
        Column("name", "TEXT"),
        Column("type", "TEXT"),
        Column("parent", "INT"),
        Column("params", "TEXT", "JSON"),
        Column("aliases", "TEXT", "JSON"),
        Column("root", "TEXT"),
        Column("source", "TEXT", "file:line function of its forward", added_later=True),
    ],
)
RECORDS = Table(
    "records",  # `records.Record`
    [
        _ID,
        _ROOT_CALL,
        _PATH,
        _CALL,
        _PHASE,
        _ROLE,
        _SLOT,
        _OP,
        Column("dtype", "TEXT"),
        Column("shape", "TEXT", "JSON"),
        Column("min", "REAL"),
        Column("max", "REAL"),
        Column("mean", "REAL"),
        Column("l2norm", "REAL"),
        Column("nan", "INT"),
        Column("inf", "INT"),
        Column("zero", "INT"),
        Column("fingerprint", "TEXT"),
        Column("device", "TEXT"),
        Column("producer", "INT", "id of the record whose storage it is"),
        Column("offset", "INT", "of the values in the payload file"),
        Column("length", "INT", "of the values, in bytes"),
        Column("lost", "TEXT", "why the values are not there"),
        Column("kept", "TEXT", "the part or figures that the values are; NULL: the whole tensor"),
        Column("kept_shape", "TEXT", "JSON"),
        Column("argument", "TEXT", "the parameter's name", added_later=True),
        Column("views", "INT", "number of its chain of views", added_later=True),
    ],
)
SCALARS = Table(
    "scalars",
    [_ROOT_CALL, _PATH, _CALL, _ROLE, _SLOT, Column("type", "TEXT"), Column("value", "TEXT")],
)
OPERATORS = Table(
    "operators",
    [
        _ROOT_CALL,
        _PATH,
        _CALL,
        _PHASE,
        _LEVEL._replace(meaning="api | aten"),
        _OP,
        Column("source", "INT", "number of its call stack"),
        Column("within", "TEXT", "the module or api operator that called it"),
        Column("within_call", "INT"),
        Column("forward_path", "TEXT", "of the forward call whose gradient it computes"),
        Column("forward_call", "INT"),
    ],
)
SOURCES = Table(
    "sources",
    [
        _INDEX,
        Column("frames", "TEXT", "a call stack as JSON"),
        Column("code", "TEXT", "JSON: the line of code of each frame", added_later=True),
        Column("inside", "INT", "how many frames, to the module's forward", added_later=True),
    ],
)
CHAINS = Table(
    "views",
    [_INDEX, Column("chain", "TEXT", "JSON: op, source and arguments of each `records.View`")],
    added_later=True,
)
KERNELS = Table(
    "kernels",
    [
        Column("name", "TEXT"),
        Column("nodes", "TEXT", "the graph nodes that it computes"),
        Column("source", "TEXT"),
    ],
    added_later=True,
)
CALLS = Table(
    "calls", [_ROOT_CALL, _PATH, _CALL, Column("id", "TEXT", "execution id")], added_later=True
)
TIMINGS = Table(
    "timings",
    [
        _ID,
        _ROOT_CALL,
        _PATH,
        _CALL,
        _PHASE,
        _LEVEL._replace(meaning="module | op | recording"),
        _OP,
        Column("thread", "INT"),
        _START,
        _DURATION,
        Column("gap", "INT", "nanoseconds since the operator before it ended"),
    ],
    added_later=True,
)
LAUNCHES = Table(
    "launches",
    [
        _ID,
        _ROOT_CALL,
        _PATH,
        _CALL,
        _PHASE,
        _OP,
        Column("kernel", "TEXT"),
        Column("code", "TEXT", "its name in `kernels`"),
        Column("device", "TEXT"),
        Column("stream", "INT"),
        _START,
        _DURATION,
        Column("inputs", "TEXT", "JSON: dtype and shape of each tensor"),
        Column("outputs", "TEXT", "JSON: dtype and shape of each tensor"),
    ],
    added_later=True,
)
TILINGS = Table(
    "tilings",
    [Column("name", "TEXT"), Column("configuration", "TEXT", "JSON")],
    added_later=True,
)
TABLES = (
    META, ROOT_CALLS, NODES, RECORDS, SCALARS, OPERATORS, SOURCES, CHAINS, KERNELS, CALLS, TIMINGS,
    LAUNCHES, TILINGS,
)  # fmt: skip

COLUMNS, AT = RECORDS.names, RECORDS.at
