"""The rows of a comparison as columns, which makes filtering and sorting many rows fast."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmdebug_nb.comparison.differences import EXPECTED, MISMATCHES, Difference, RowVerdict
from llmdebug_nb.core.paths import within
from llmdebug_nb.show.row_columns import BY_NAME, SEARCHED, Column, differing_share
from llmdebug_nb.show.tensors import Array
from llmdebug_nb.store.row_filter import row_text

_NUMBER = re.compile(r"\d+")
# the worst first; those that may be a mismatch lead
VERDICTS: tuple[RowVerdict, ...] = (
    "diverged", "unmatched", EXPECTED, "within_noise", "match",
)  # fmt: skip


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
    """``steps``: of each row, the index of its step in the stepper.

    Of each row: ``sites``, ``verdict`` (an index of `VERDICTS`), ``mismatch``, and
    ``path_of``, an index of ``paths``.
    """

    def __init__(self, differences: Sequence[Difference], steps: Sequence[int]) -> None:
        self.rows = differences
        self.step = np.array(steps, np.int32)
        self._records = [d.pair.either for d in differences]
        self.sites = [record.site for record in self._records]
        self._place = place = dict[str, int]()
        rows = [place.setdefault(site.path, len(place)) for site in self.sites]
        self.paths, self.path_of = list(place), np.array(rows, np.int64)
        code = {verdict: i for i, verdict in enumerate(VERDICTS)}
        self.verdict = np.array([code[d.verdict] for d in differences], np.uint8)
        self.mismatch = np.zeros(len(differences), bool)
        for i in np.flatnonzero(self.verdict < len(MISMATCHES)).tolist():
            self.mismatch[i] = differences[i].is_mismatch
        self.order = functools.lru_cache(maxsize=8)(self._order)
        self.values = functools.lru_cache(maxsize=8)(self._values)

    @functools.cached_property
    def texts(self) -> list[str]:
        """The texts in which the words of a filter are searched."""
        words = zip(*(map(str, self._cells(column)) for column in SEARCHED), strict=True)
        return [
            row_text(s.path, s.role, s.slot, *found)
            for s, found in zip(self.sites, words, strict=True)
        ]

    def holding(self, word: str) -> Array:
        """Return for each row whether its text has a word, in lower case."""
        found: Array = np.array([word in text for text in self.texts], bool)
        return found

    def of(self, verdict: RowVerdict) -> Array:
        """Return the indices of the rows with a verdict."""
        found: Array = np.flatnonzero(self.verdict == VERDICTS.index(verdict))
        return found

    def at(self, path: str) -> Array:
        """Return the indices of the rows of a path."""
        found: Array = np.flatnonzero(self.path_of == self._place.get(path, -1))
        return found

    def count_paths(self, rows: Array | None = None) -> Counter[str]:
        """Count rows, by default all, by their path."""
        of = self.path_of if rows is None else self.path_of[rows]
        counts = np.bincount(of, minlength=len(self.paths)).tolist()
        return Counter({path: n for path, n in zip(self.paths, counts, strict=True) if n})

    def count_steps(self, rows: Array | None = None) -> Counter[int]:
        """Count rows, by default all, by their step."""
        return Counter((self.step if rows is None else self.step[rows]).tolist())

    def under(self, path: str) -> Array:
        """Return for each row whether it is within the module at ``path``."""
        inside: Array = np.array([within(one, path) for one in self.paths], bool)[self.path_of]
        return inside

    def _order(self, name: str, descending: bool) -> Array:
        """Return the rows sorted by a column, or without a name in execution order.

        Equal rows stay in execution order; rows without a figure come last.
        """
        if not name:
            return np.arange(len(self.rows))
        values = self.values(name)
        keys = (-values if descending else values, np.isnan(values))
        order: Array = np.lexsort(keys)  # stable; the last key counts first
        return order

    def _values(self, name: str) -> Array:
        """Return a column as numbers that sort as its values do."""
        own: dict[str, Callable[[], Array]] = {
            "step": lambda: self.step.astype(float),
            "path": lambda: _path_ranks(self.paths)[self.path_of],
            "shape": lambda: figures(record.summary.numel for record in self._records),
            "verdict": lambda: self.verdict.astype(float),
            "which": lambda: figures(map(differing_share, self.rows)),
        }
        if name in own:
            return own[name]()
        column = BY_NAME[name]
        values: list[Any] = list(self._cells(column))
        return _ranks(values) if column.kind is str else figures(values)

    def _cells(self, column: Column) -> Iterable[object]:
        if column.of_difference is not None:
            return map(column.of_difference, self.rows)
        return map(column.of_record, self._records)


def element_limit(d: Difference) -> float | None:
    """Return the root mean square error that a row's limit allows.

    It is None if the row was not judged by the errors of the tensor's rows.
    """
    golden, rows = d.pair.golden, d.metrics.get("row_error")
    if golden is None or golden.summary.l2norm is None:
        return None
    if d.limit is None or d.error is None or rows is None:
        return None
    worst = max(rows, d.metrics.get("worst_row_error") or 0)
    if d.error != math.inf and not rows <= d.error <= worst:
        return None
    return d.limit * golden.summary.l2norm / math.sqrt(golden.summary.numel or 1)
