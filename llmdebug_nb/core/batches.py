"""The rows that a recording commits together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.records import RootCall

SourceRow: TypeAlias = tuple[int, str, str, int | None]  # of `columns.SOURCES`
FunctionRow: TypeAlias = tuple[str, int, str, str]  # of `columns.FUNCTIONS`
ScalarRow: TypeAlias = tuple[int, str, int, str, str, str, str | None, str]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows that are written together: all of them, or none. Each part is read once.

    ``records``, ``scalars``, ``operators``, ``sources``, ``functions``: rows of the tables of these
    names in `columns`. ``calls``: root calls, new or changed. ``chains``: numbered chains of views.
    ``called``: execution ids of calls. ``written``: they are in the index.
    """

    records: Iterable[Row] = ()
    calls: Iterable[RootCall] = ()
    scalars: Iterable[ScalarRow] = ()
    operators: Iterable[Row] = ()
    sources: Iterable[SourceRow] = ()
    chains: Iterable[tuple[int, str]] = ()
    called: Iterable[tuple[int, str, int, str]] = ()
    functions: Iterable[FunctionRow] = ()
    written: bool = False
