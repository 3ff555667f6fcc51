"""Copying a dump without what it tells about a text, a program or a person.

What stays: module paths, names of operators and arguments, shapes, statistics of floats, numbers
among the arguments. Two such copies still compare by statistics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmdebug_nb.core.columns import (
    AT,
    CHAINS,
    FUNCTIONS,
    KERNELS,
    OPERATORS,
    SCALARS,
    SOURCES,
    TOKEN_ROWS,
    Row,
    Table,
)
from llmdebug_nb.core.records import Node
from llmdebug_nb.store import catalog
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.copying import Copy, Rows, copied
from llmdebug_nb.store.rows import views_of

REDACTED = "removed by llmdebug redact"  # why values are missing
_NOT_KEPT = "not kept"  # in place of a reason in the words of an exception
_OFFSET, _LOST, _DTYPE, _ROLE = AT["offset"], AT["lost"], AT["dtype"], AT["role"]
_VALUES = ("offset", "length", "kept", "kept_shape")
_STATISTICS = (
    "min", "max", "mean", "l2norm", "nan", "inf", "zero", "fingerprint", "row_sizes",
)  # fmt: skip
_INTEGER = re.compile(r"u?int\d+")
_TYPE, _VALUE = SCALARS.at["type"], SCALARS.at["value"]
_NUMBERS = ("bool", "int", "float", "complex", "dtype", "device", "None")
_OF_TEXT = re.compile(r"tok|prompt|text|word|(?<![a-z])ids?(?![a-z])")  # numbers that are ids
# arguments of views: numbers, slices and keywords, but no texts
_PLAIN = re.compile(r"(?:[a-z_]{1,30}=|None|True|False|tensor|torch\.\w{1,20}|[-\d\s,.:()\[\]])*")
_NAME = re.compile(r"\w{1,60}")
# options whose texts are the user's own
_OWN_WORDS = ("name", "control", "path", "fusion_switch", "compiler_config")


def redacted(run: Path, folder: Path, progress: Callable[[int], None]) -> Path:
    """Write a copy of ``run`` without values, sources and strings to ``folder``; return that.

    ``progress`` and what is raised: as in `copying.copied`.
    """
    marker = catalog.read_marker(run)
    options = {k: v for k, v in (marker.get("options") or {}).items() if k not in _OWN_WORDS}
    details = {
        "options": options,
        "environment": marker.get("environment", {}),
        "redacted": True,
    }
    return copied(run, (folder.parent, folder.name), details, _Redacted, progress)


class _Redacted(Copy):
    def record(self, row: Row) -> None:
        """Take the values away. Whole numbers lose their statistics too: they may be tokens."""
        if row[_OFFSET] is not None:
            row[_LOST] = REDACTED
        elif row[_LOST] not in (None, REDACTED):
            row[_LOST] = _NOT_KEPT
        names: tuple[str, ...] = _VALUES
        if row[_ROLE] != "weight" and (_INTEGER.fullmatch(row[_DTYPE] or "") or _whole(row)):
            names += _STATISTICS
        for name in names:
            row[AT[name]] = None

    def rows(self, table: Table, rows: Rows) -> Rows:
        if table in (SOURCES, FUNCTIONS):
            return []
        change = {
            SCALARS.name: _scalar, OPERATORS.name: _without("source", OPERATORS),
            CHAINS.name: _chain, KERNELS.name: _without("source", KERNELS, ""),
            TOKEN_ROWS.name: _without("token", TOKEN_ROWS),
        }.get(table.name)  # fmt: skip
        return rows if change is None else [change(list(row)) for row in rows]

    def nodes(self, nodes: list[Node]) -> list[Node]:
        return [replace(node, source=None) for node in nodes]

    def meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        ended_by = meta.get("ended_by")
        if ended_by is not None and not _NAME.fullmatch(str(ended_by)):
            ended_by = "an error"
        kept = ("begun", "complete", "recorded", "determinism")
        return {key: meta[key] for key in kept if key in meta} | {"ended_by": ended_by}


def _whole(row: Row) -> bool:
    """Tell whether floats are whole numbers other than 0 and 1, so that they may be tokens.

    Least, greatest, sum and sum of squares of whole numbers are whole. Of other floats they are so
    by a chance of 10^-8, where the sums stay below 10^8.
    """
    low, high, mean, norm = (row[AT[name]] for name in ("min", "max", "mean", "l2norm"))
    if None in (low, high, mean, norm) or max(abs(low), abs(high)) <= 1:
        return False
    try:
        count = math.prod(shape_of(row[AT["shape"]]))
    except (ValueError, RecursionError):
        return True  # a damaged row: nothing is known of it
    return all(map(_is_whole, (low, high, mean * count, norm * norm)))


def _is_whole(value: float) -> bool:
    """Tell whether a figure is a whole number, up to the rounding of a sum in float64."""
    return math.isfinite(value) and abs(value - round(value)) <= 1e-9 + 1e-12 * abs(value)


def _scalar(row: Row) -> Row:
    """Take the text of a scalar away, if it is none of a number, a weight or a graph's node."""
    role, slot = row[SCALARS.at["role"]], row[SCALARS.at["slot"]]
    if role == "weight" or role.startswith("graph"):
        return row
    if row[_TYPE] not in _NUMBERS or (row[_TYPE] != "bool" and _OF_TEXT.search(slot.lower())):
        row[_VALUE] = None
    return row


def _chain(row: Row) -> Row:
    """Take the sources of views away, and arguments that are texts."""
    chain = [
        [op, "", arguments if _PLAIN.fullmatch(arguments) else ""]
        for op, _, arguments in views_of(None, row[1])
    ]
    return [row[0], json.dumps(chain)]


def _without(name: str, table: Table, value: object = None) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        row[table.at[name]] = value
        return row

    return change
