"""Tokens that a program sorts, as by their experts: rows of a tensor that say nothing of places.

A tensor of one row a token looks the same whether its rows are in the order of the batch or sorted.
Where the runs were given other batches, or padding, sorted rows lie in other places. So they are
known by what they hold. Whether all is put back is judged where places show again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import Measured, error_of
from llmdebug_nb.comparison.nearest_rows import nearest_rows
from llmdebug_nb.comparison.taint import Followed
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, sorts
from llmdebug_nb.core.records import CallKey


def in_any_order(
    golden: torch.Tensor, mine: torch.Tensor, count: int, in_place: metrics.Metrics
) -> metrics.Metrics | None:
    """Return what two matrices differ by in the rows that are nearest to each other.

    ``count``: the tokens that both have. ``in_place``: what they differ by row for row; None if
    that is no other order.
    """
    if error_of(in_place) <= constants.CERTAIN_LAYOUT:
        return None
    rows = nearest_rows(golden, mine, count)
    return None if rows is None else metrics.compare(*rows)


class Sorted:
    """Follows what is sorted, and the order, through the calls of two programs, as they ran.

    ``counts``: places without a token count as others.
    """

    def __init__(self, counts: bool = False) -> None:
        self._counts, self._sorted = counts, Followed()
        self._misled: set[CallKey] = set()  # calls that take what has diverged

    def is_order(self, pair: Pair) -> bool:
        """Tell whether a pair has one number a place, and is an order or sorted by one; note it.

        An operator gives it that sorts what has one axis. One that chooses for each token does not.
        """
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            return False
        s = golden.summary
        if s.numel >= constants.FEWEST_ELEMENTS * max(s.shape[:1], default=1):
            return False
        sorting = len(s.shape) == 1 and golden.op == mine.op and sorts(golden.op)
        found = (sorting and golden.site.role == "output") or self._sorted.make(pair)
        if found:
            self._sorted.add(pair)
        return found

    def make(self, pair: Pair) -> bool:
        """Tell whether a pair is made of what is sorted, or by an order."""
        return self._sorted.make(pair)

    def readings(self, m: Measured) -> Iterator[Measured]:
        """Yield a pair as it is measured in any order of its rows, if they may be sorted.

        They are made of sorted ones or by an order, of what agrees; or a module inside another one
        is given them by code that was not seen.
        """
        golden = m.pair.golden
        if m.in_any_order is None or golden is None or (self._counts and m.of_tokens is not None):
            return
        site = golden.site
        if site.role == "output" and site.key in self._misled:
            return
        inside = site.role == "input" and "." in site.path and not is_operator(site.path)
        if (inside and golden.producer is None) or self._sorted.make(m.pair):
            yield replace(m, metrics=m.in_any_order)

    def add(self, pair: Pair) -> None:
        """Take note of a pair that agrees so."""
        self._sorted.add(pair)

    def differ(self, pair: Pair) -> None:
        """Take note of a pair that has diverged."""
        if pair.either.site.role == "input":
            self._misled.add(pair.either.site.key)
