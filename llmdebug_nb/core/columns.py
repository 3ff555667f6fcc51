"""The tables of a recording: every column is declared here, once.

Capture hands rows of these tables to the store as lists in the order of the columns. The schema,
the statements that insert rows and the views that readers query are derived from them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from llmdebug_nb.core import paths

Row = list[Any]


_KINDS: dict[str, Any] = {
    "TEXT": str,
    "INT": int,
    "INTEGER": Annotated[int, msgspec.Meta(ge=0)],
    "REAL": float,
    "BLOB": bytes,
}


class Column(NamedTuple):
    """``type``: in SQL. ``meaning``: where the name alone does not say it.

    ``added_later``: older dumps do not have it. Such columns are the last ones of their table.
    ``optional``: it may be NULL. ``one_of``: the only texts that it may be.
    ``longest``: how many characters it may have.
    """

    name: str
    type: str
    meaning: str = ""
    added_later: bool = False
    optional: bool = False
    one_of: tuple[str, ...] = ()
    longest: int | None = None

    @property
    def kind(self) -> object:
        """The type of its values in Python, as msgspec checks it."""
        plain: Any = _KINDS[self.type.partition(" ")[0]]
        kind = Literal[self.one_of] if self.one_of else plain
        if self.longest is not None:
            kind = Annotated[plain, msgspec.Meta(max_length=self.longest)]
        return kind | None if self.optional or self.added_later else kind


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

    @property
    def has_id(self) -> bool:
        """Whether its rows come with their ids."""
        return "PRIMARY KEY" in self.columns[0].type

    @cached_property
    def at(self) -> dict[str, int]:
        """The place of each column in a row."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def kinds(self) -> dict[str, object]:
        """The type of each column's values."""
        return {column.name: column.kind for column in self.columns}

    @cached_property
    def row(self) -> Any:
        """The type of a row, as msgspec checks it."""
        return tuple[tuple(self.kinds.values())]  # type: ignore[misc]

    def span(self, first: str, last: str) -> slice:
        """Return the slice of a row from one column to another, both included."""
        return slice(self.at[first], self.at[last] + 1)

    @property
    def create(self) -> str:
        """The statement that creates the table."""
        return self.create_with(len(self.columns))

    def create_with(self, columns: int) -> str:
        """Return the statement that creates the table with its first columns."""
        declared = ", ".join(f'"{column.name}" {column.type}' for column in self.columns[:columns])
        return f"CREATE TABLE {self.name}({declared})"

    @cached_property
    def insert(self) -> str:
        """The statement that inserts a row."""
        return insert(self.name, len(self.columns))


def insert(table: str, columns: int) -> str:
    """Return the statement that inserts a row of so many columns."""
    return f"INSERT INTO {table} VALUES({','.join('?' * columns)})"


# the call that a row belongs to
_ROOT_CALL = Column("root_call", "INT", "the root call that it ran in")
_PATH = Column("path", "TEXT", "of the module or operator", longest=paths.LONGEST)
_CALL = Column("call", "INT", "n-th call of this path in the step")
_PHASE = Column("phase", "TEXT", one_of=("forward", "backward"))
_ROLE = Column("role", "TEXT")
_SLOT = Column("slot", "TEXT")
_LEVEL = Column("level", "TEXT")
_OP = Column("op", "TEXT", "class of the module, or name of the operator")
_START = Column("start", "INT", "nanoseconds of the program's clock, see capture/timing")
_DURATION = Column("duration", "INT", "nanoseconds")
_ID = Column("id", "INTEGER PRIMARY KEY", "counts up in execution order")
_INDEX = Column("idx", "INTEGER PRIMARY KEY")
# of what is timed, which may belong to no call
_TIMED = [each._replace(optional=True) for each in (_ROOT_CALL, _PATH, _CALL, _PHASE)]

META = Table("meta", [Column("key", "TEXT PRIMARY KEY"), Column("value", "TEXT NOT NULL", "JSON")])
ROOT_CALLS = Table(
    "root_calls",  # in the order of `records.RootCall`
    [
        _INDEX,
        Column("generation", "INT"),
        Column("step", "INT"),
        Column("kind", "TEXT"),
        Column("query", "INT", optional=True),
        Column("total", "INT", optional=True),
        Column("batch", "INT", optional=True),
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
        Column("min", "REAL", optional=True),
        Column("max", "REAL", optional=True),
        Column("mean", "REAL", optional=True),
        Column("l2norm", "REAL", optional=True),
        Column("nan", "INT", optional=True),
        Column("inf", "INT", optional=True),
        Column("zero", "INT", optional=True),
        Column("fingerprint", "TEXT", optional=True),
        Column("device", "TEXT"),
        Column("producer", "INT", "id of the record whose storage it is", optional=True),
        Column("offset", "INT", "of the values in the payload file", optional=True),
        Column("length", "INT", "of the values, in bytes", optional=True),
        Column("lost", "TEXT", "why the values are not there", optional=True),
        Column(
            "kept",
            "TEXT",
            "the part or figures that the values are; NULL: the whole tensor",
            optional=True,
        ),
        Column("kept_shape", "TEXT", "JSON", optional=True),
        Column("argument", "TEXT", "the parameter's name", added_later=True),
        Column("views", "INT", "number of its chain of views", added_later=True),
        Column("placed", "INT", "number of its placement over ranks", added_later=True),
        Column("row_sizes", "BLOB", "norm and largest magnitude of each row", added_later=True),
    ],
)
SCALARS = Table(
    "scalars",
    [
        _ROOT_CALL,
        _PATH,
        _CALL,
        _ROLE,
        _SLOT,
        Column("type", "TEXT"),
        Column("value", "TEXT", optional=True),
        _PHASE._replace(added_later=True),
    ],
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
        Column("source", "INT", "number of its call stack", optional=True),
        Column("within", "TEXT", "the module or api operator that called it", optional=True),
        Column("within_call", "INT", optional=True),
        Column(
            "forward_path", "TEXT", "of the forward call whose gradient it computes", optional=True
        ),
        Column("forward_call", "INT", optional=True),
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
FUNCTIONS = Table(
    "functions",
    [
        Column("file", "TEXT"),
        Column("line", "INT", "of the first line of the text"),
        Column("function", "TEXT", "its name, with its class if that is known"),
        Column("text", "TEXT", "its lines"),
    ],
    added_later=True,
)
CHAINS = Table(
    "views",
    [_INDEX, Column("chain", "TEXT", "JSON: op, source and arguments of each `records.View`")],
    added_later=True,
)
PLACEMENTS = Table(
    "placements",
    [_INDEX, Column("placement", "TEXT", "JSON: `placement.Placement`")],
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
        *_TIMED,
        _LEVEL._replace(meaning="module | op | recording"),
        _OP._replace(optional=True),
        Column("thread", "INT", optional=True),
        _START._replace(optional=True),
        _DURATION._replace(optional=True),
        Column("gap", "INT", "nanoseconds since the operator before it ended", optional=True),
    ],
    added_later=True,
)
LAUNCHES = Table(
    "launches",
    [
        _ID,
        *_TIMED,
        _OP._replace(optional=True),
        Column("kernel", "TEXT", optional=True),
        Column("code", "TEXT", "its name in `kernels`", optional=True),
        Column("device", "TEXT", optional=True),
        Column("stream", "INT", optional=True),
        _START._replace(optional=True),
        _DURATION._replace(optional=True),
        Column("inputs", "TEXT", "JSON: dtype and shape of each tensor", optional=True),
        Column("outputs", "TEXT", "JSON: dtype and shape of each tensor", optional=True),
    ],
    added_later=True,
)
TILINGS = Table(
    "tilings",
    [Column("name", "TEXT"), Column("configuration", "TEXT", "JSON")],
    added_later=True,
)
TOKEN_ROWS = Table(
    "token_rows",  # `records.TokenRow`
    [
        _ROOT_CALL,
        Column("row", "INT", "of a flat tensor; NULL: from the engine's cache", optional=True),
        Column("request", "TEXT", "the engine's id", longest=paths.LONGEST),
        Column("position", "INT", "in the request's tokens"),
        Column("token", "INT", "NULL where the model is given no ids", optional=True),
        Column("attempt", "INT", "how often the request was preempted before"),
        Column("sampled", "INT", "0: of the prompt, 1: behind it; NULL: not known", optional=True),
    ],
    added_later=True,
)
WAITING = Table(
    "waiting",
    [Column("rows", "BLOB", "msgpack: rows of records, scalars, operators and calls")],
    added_later=True,
)
TABLES = (
    META, ROOT_CALLS, NODES, RECORDS, SCALARS, OPERATORS, SOURCES, CHAINS, KERNELS, CALLS, TIMINGS,
    LAUNCHES, TILINGS, FUNCTIONS, TOKEN_ROWS, PLACEMENTS,
    WAITING,
)  # fmt: skip

COLUMNS, AT = RECORDS.names, RECORDS.at
