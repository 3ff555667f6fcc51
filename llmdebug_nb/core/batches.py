"""The rows that a recording commits together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.records import RootCall

SourceRow: TypeAlias = tuple[int, str, str, int | None]  # of `columns.SOURCES`
FunctionRow: TypeAlias = tuple[str, int, str, str]  # of `columns.FUNCTIONS`
ScalarRow: TypeAlias = tuple[int, str, int, str, str, str, str | None, str]


class Frames(NamedTuple):
    """Frames of values that wait to be written with the next ones, see store/format.py.

    ``stored``: by dtype, its name in the header of a frame.
    """

    waiting: bytearray
    stored: Mapping[str, str]


NO_FRAMES = Frames(bytearray(), {})
NO_ROWS = b"\xdd\0\0\0\0"  # packed: an array of MessagePack that begins with its count, 32 bits


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows that are written together: all of them, or none. Each part is read once.

    ``records``, ``scalars``, ``operators``, ``sources``, ``functions``: rows of the tables of these
    names in `columns`. ``calls``: root calls, new or changed. ``chains``: numbered chains of views.
    ``called``: execution ids of calls. ``written``: they are in the index.
    ``packed``: further records, an array of MessagePack as `NO_ROWS` is one.
    """

    records: Iterable[Row] = ()
    packed: bytes | bytearray = NO_ROWS
    calls: Iterable[RootCall] = ()
    scalars: Iterable[ScalarRow] = ()
    operators: Iterable[Row] = ()
    sources: Iterable[SourceRow] = ()
    chains: Iterable[tuple[int, str]] = ()
    called: Iterable[tuple[int, str, int, str]] = ()
    functions: Iterable[FunctionRow] = ()
    written: bool = False


def count_packed(packed: bytes | bytearray) -> int:
    """Return how many rows are packed."""
    return int.from_bytes(packed[1 : len(NO_ROWS)], "big")
