"""The rows of a comparison as columns, which makes filtering and sorting many rows fast."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import within
from llmdebug_nb.show.tensors import Array

_NUMBER = re.compile(r"\d+")
_WORST_FIRST = ("diverged", "unmatched", "expected", "within_noise", "match")


def _natural(text: str) -> str:
    """Return a sort key that puts layers.2 before layers.10."""
    return _NUMBER.sub(lambda digits: digits[0].zfill(12), text)


def figures(values: Iterable[float | None]) -> Array:
    """Return values as an array, with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], float)


def _ranks(values: Sequence[str], key: Callable[[str], int | str] = str) -> Array:
    """Return each value's place among the distinct ones."""
    place = {value: rank for rank, value in enumerate(sorted(set(values), key=key))}
    return np.array([place[value] for value in values], float)


def _path_ranks(paths: Sequence[str]) -> Array:
    """Return each path's place: layers.2 comes before layers.2.mlp and before layers.10."""
    if not paths:
        return np.empty(0)
    names: list[str] = []  # one flat list: thousands of small ones burden the garbage collector
    for path in paths:
        names += path.replace("/", ".").split(".")
    place = {name: rank for rank, name in enumerate(sorted(set(names), key=_natural), 1)}
    depth = np.array([path.count(".") + path.count("/") + 1 for path in paths], np.int64)
    levels = np.zeros((int(depth.max()), len(paths)), np.int32)  # 0: there is no further name
    owner = np.repeat(np.arange(len(paths)), depth)
    level = np.arange(len(owner)) - np.repeat(np.cumsum(depth) - depth, depth)
    levels[level, owner] = [place[name] for name in names]
    ranks = np.empty(len(paths))
    ranks[np.lexsort(levels[::-1])] = np.arange(len(paths))
    return ranks


class Columns:
    """``steps``: of each row, the index of its step in the stepper."""

    def __init__(self, differences: Sequence[Difference], steps: Sequence[int]) -> None:
        self._rows = differences
        self.step = np.array(steps, np.int32)
        self.mismatch = np.array([d.is_mismatch for d in differences], bool)
        place: dict[str, int] = {}
        rows = [place.setdefault(d.site.path, len(place)) for d in differences]
        self._paths, self._path_of = list(place), np.array(rows, np.int64)
        self.order = functools.lru_cache(maxsize=8)(self._order)
        self._column = functools.lru_cache(maxsize=8)(self._values)

    def under(self, path: str) -> Array:
        """Return for each row whether it is within the module at ``path``."""
        inside: Array = np.array([within(one, path) for one in self._paths], bool)[self._path_of]
        return inside

    def _order(self, name: str, descending: bool) -> Array:
        """Return the rows sorted by a column, or without a name in execution order.

        Equal rows stay in execution order; rows without a figure come last.
        """
        if not name:
            return np.arange(len(self._rows))
        values = self._column(name)
        keys = (-values if descending else values, np.isnan(values))
        order: Array = np.lexsort(keys)  # stable; the last key counts first
        return order

    def _values(self, name: str) -> Array:
        rows = self._rows
        if name == "path":
            ranks: Array = _path_ranks(self._paths)[self._path_of]
            return ranks
        columns: dict[str, Callable[[], Array]] = {
            "step": lambda: self.step.astype(float),
            "seq": lambda: np.array([d.pair.either.seq for d in rows], float),
            "op": lambda: _ranks([d.op for d in rows]),
            "dtype": lambda: _ranks([d.pair.either.summary.dtype for d in rows]),
            "shape": lambda: np.array([d.pair.either.summary.numel for d in rows], float),
            "error": lambda: figures(d.error for d in rows),
            "limit": lambda: figures(d.limit for d in rows),
            "verdict": lambda: _ranks([d.verdict for d in rows], _WORST_FIRST.index),
        }
        return columns[name]()
