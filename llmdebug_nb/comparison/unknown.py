"""What two programs computed that can't be compared place by place, followed through their calls.

There are four sources. At places of a batch without a token (*blank* ones) programs may compute
anything. Runs that were given other rows or tokens have other values wherever all of a batch is put
together. Tokens that are sorted, as by their experts, lie in other places then. And of memory that
was not written to, chance tells what it holds (`uninitialised_memory.py`). What a choice touched
that rounding decides is followed by tokens, in `untouched.py`.

A pair that differs is read without what is unknown of it. If it shows no places to leave out, and
is made of something unknown, it is unknown itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.differences import MISMATCHES, Difference
from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.taint import Followed
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, sorts
from llmdebug_nb.core.records import CallKey


class Unknown:
    """Follows what is unknown, in execution order. ``counts_blank``: blank places count, too."""

    def __init__(self, counts_blank: bool = False) -> None:
        self._counts_blank = counts_blank
        self._blank = Followed()  # they differ at blank places alone
        self._mixed = Followed()  # they are made of all places of such
        self._whole = Followed()  # they are made of all of another batch
        self._moved = Followed()  # their rows may lie at other places of another batch
        self._sorted = Followed()  # their rows are sorted, or they are the order
        self._diverged: set[tuple[int | None, int | None]] = set()  # ids of outputs
        self._misled: set[CallKey] = set()  # calls that take what has diverged

    def sorts(self, pair: Pair) -> bool:
        """Tell whether a pair is sorted, an order, or made of such."""
        return self._sorted.make(pair)

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

    def readings(self, m: Measured) -> Iterator[tuple[Measured, Rule]]:
        """Yield a pair without what is unknown of it, in the ways that are allowed, and why."""
        yield from ((reading, Rule.NO_TOKEN) for reading in self._at_tokens(m))
        if m.in_any_order is not None and self._may_be_sorted(m):
            yield replace(m, metrics=m.in_any_order), Rule.SORTED
        if m.in_one_order is not None:
            yield replace(m, metrics=m.in_one_order), Rule.SAME_PLACES

    def _at_tokens(self, m: Measured) -> Iterator[Measured]:
        """Yield a pair without blank places.

        A difference begins there in the rows of states. Keys at blank places differ if the states
        do: a mask that hides other places is no such difference.
        """
        found = m.of_tokens
        if found is None or found.first is None or self._counts_blank:
            return
        site = m.pair.either.site
        given = self._blank.are_given_to(site) or self._mixed.are_given_to(site)
        follows = given or self._blank.hold(m.pair)
        if found.are_states or follows:
            yield replace(m, metrics=found.first)
        if follows:
            yield replace(m, metrics=found.whole)

    def _may_be_sorted(self, m: Measured) -> bool:
        """Tell whether the rows of a pair may be sorted: they are made of such, of what agrees.

        Or a module inside another one is given them by code that was not seen.
        """
        golden = m.pair.golden
        if golden is None or (self._counts_blank and m.of_tokens is not None):
            return False
        site = golden.site
        if site.role == "output" and site.key in self._misled:
            return False
        inside = site.role == "input" and "." in site.path and not is_operator(site.path)
        return (inside and golden.producer is None) or self._sorted.make(m.pair)

    def why(self, m: Measured, row: Difference, is_order: bool, tied: bool) -> Rule | None:
        """Return why a pair that differs is unknown, None if it is not; and note it.

        ``is_order``: see there. ``tied``: blank places were left out already, behind a near tie.
        """
        if row.verdict in MISMATCHES and not tied and self._is_mixed(m, is_order):
            self._mixed.add(m.pair)
            return Rule.MIXED
        differs = row.verdict == "diverged" or row.rule is Rule.NEAR_TIE
        if differs and self._is_of_whole(m.pair, is_order):
            self._whole.add(m.pair)
            return Rule.OTHER_BATCH
        return None

    def unmeasured(self, pair: Pair) -> None:
        """Take note of a pair that could not be measured."""
        if pair.other_batch:
            self._whole.add(pair)

    def judged(self, m: Measured, row: Difference, is_order: bool, tied: bool) -> None:
        """Take note of the verdict on a pair of which enough is known."""
        pair, site = m.pair, m.pair.either.site
        if row.rule is Rule.SORTED:
            self._sorted.add(pair)
        elif row.verdict not in MISMATCHES and not tied:
            self._agrees(m, is_order)
        if row.verdict == "diverged":
            if site.role == "output" and pair.golden is not None and pair.mine is not None:
                self._diverged.add((pair.golden.id, pair.mine.id))
            if site.role == "input":
                self._misled.add(site.key)
        elif pair.fit is not None and pair.fit.shared:
            self._moved.add(pair)

    def _agrees(self, m: Measured, is_order: bool) -> None:
        """Take note of a pair that agrees at tokens; elsewhere it may differ.

        Orders and counts may agree within noise: what is made of them does not.
        """
        if m.error and (self._is_of_places(m, is_order) or self._is_made_of(m, self._mixed)):
            self._mixed.add(m.pair)
        elif m.of_tokens is not None and m.of_tokens.first is not None:
            self._blank.add(m.pair)

    def _is_mixed(self, m: Measured, is_order: bool) -> bool:
        """Tell whether a pair is made of all places at once: no axis of it shows tokens."""
        of_places = self._is_of_places(m, is_order)
        return of_places or any(self._is_made_of(m, kind) for kind in (self._mixed, self._blank))

    def _is_of_places(self, m: Measured, is_order: bool) -> bool:
        return is_order and m.of_tokens is not None and not self._counts_blank

    def _is_made_of(self, m: Measured, tensors: Followed) -> bool:
        if not tensors:
            return False  # nearly always: few batches have padding
        golden, mine = m.pair.golden, m.pair.mine
        at_tokens = m.of_tokens is not None or (m.pair.fit is not None and m.pair.fit.shared)
        if self._counts_blank or at_tokens or m.certain or golden is None or mine is None:
            return False
        return tensors.make(m.pair)

    def _is_of_whole(self, pair: Pair, is_order: bool) -> bool:
        """Tell whether a pair is made of all of another batch.

        Or it is an order of all tokens of it, or a view of what has not diverged in which rows and
        tokens no longer show.
        """
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            return False
        if is_order and pair.fit is not None and pair.fit.shared:
            return True
        if not pair.other_batch:
            return False
        kinds = self._whole, self._moved
        if golden.site.role == "output":
            made = any(kind.are_given_to(golden.site) for kind in kinds)
        elif golden.producer is not None and mine.producer is not None:
            made = (golden.producer, mine.producer) not in self._diverged
        else:
            made = any(kind.are_viewed(golden, mine) for kind in kinds)
        return made or self._whole.hold(pair)
