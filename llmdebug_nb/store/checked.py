"""Rows and texts of a dump, checked against the types that they must have.

A dump may come from a stranger or be damaged. What passes here can be used without asking again.
"""

from __future__ import annotations

import functools
import json
import math
import sqlite3
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec

from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import DEEPEST

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
# what hostile content can cause; msgspec's errors are ValueErrors
DAMAGE = (sqlite3.Error, ValueError, OverflowError, MemoryError, RecursionError)
# Seconds since 1970, before the year 9999, the last one that Python's dates have.
MOMENT = Annotated[float, msgspec.Meta(ge=0, lt=253_370_764_800)]
MOST_NESTED = DEEPEST  # modules, calls or objects in one another
SIZE = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]


def rows_of(kind: type[T], rows: Iterable[Sequence[object]]) -> list[T]:
    """Return rows as ``kind``, such as ``tuple[int, str]``. Raises ValueError if they are none."""
    found: Any = msgspec.convert({"rows": rows}, _list_of(cast(Hashable, kind)))
    return list(found.rows)


@functools.cache
def _list_of(kind: Hashable) -> type[msgspec.Struct]:
    """Return a type that msgspec prepares once: doing so for each query would take most time."""
    return msgspec.defstruct("Rows", [("rows", list[kind])])  # type: ignore[valid-type]


def json_of(kind: type[T], text: str | bytes) -> T:
    """Read JSON as ``kind``; half of a surrogate pair, which no file can hold, becomes ``?``.

    Raises:
        ValueError, RecursionError: it is no such JSON; NaN and infinity are no numbers.
    """
    if isinstance(text, str) and "\\ud" in text.lower():
        text = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")
    return msgspec.json.decode(text, type=kind)


def check_tree(parents: Mapping[K, K | None]) -> None:
    """Check that each way from child to parent ends. ``parents``: of each child, None for a root.

    Raises:
        ValueError: it leads in a circle, out of the tree, or through too many.
    """
    depths: dict[K | None, int] = {None: 0}
    for child in parents:
        way: list[K] = []
        at: K | None = child
        while at is not None and at not in depths:
            if at not in parents:
                raise ValueError(f"the parent {at!r:.80} is not there")
            way.append(at)
            if len(way) > MOST_NESTED:
                break
            at = parents[at]
        depth = depths.get(at, 0)
        if depth + len(way) > MOST_NESTED:
            raise ValueError(f"more than {MOST_NESTED} lie in one another, or lie in a circle")
        depths.update({each: depth + n for n, each in enumerate(reversed(way), 1)})


def check_nested(parents: Sequence[int]) -> None:
    """Check a tree in which parents come before children. ``parents``: their places, -1 for none.

    Raises:
        ValueError: a parent comes after its child, or too many lie in one another.
    """
    depths = [0] * (len(parents) + 1)  # the last one, at -1, is that of no parent
    for place, parent in enumerate(parents):
        if not -1 <= parent < place:
            raise ValueError("a parent comes after its child")
        depths[place] = depths[parent] + 1
        if depths[place] > MOST_NESTED:
            raise ValueError(f"more than {MOST_NESTED} lie in one another")


@functools.lru_cache(1024)  # a run has few shapes
def shape_of(text: str) -> tuple[int, ...]:
    """Read a shape; -1 is a size that is not one number.

    Raises:
        ValueError, RecursionError: it is no JSON list of sizes, or no tensor can have it.
    """
    return shape_of_sizes(tuple(json_of(list[SIZE], text)))


def shape_of_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes that a tensor can have. Raises ValueError for any others."""
    if len(sizes) > constants.MOST_DIMENSIONS:
        raise ValueError(f"no tensor has {len(sizes):,} dimensions")
    if math.prod(size for size in sizes if size > 0) >= 1 << 63:
        raise ValueError(f"no tensor has so many elements: {str(sizes)[:80]}")
    return sizes
