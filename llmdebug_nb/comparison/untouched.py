"""After a near tie, compare only the tokens that the different choice cannot have influenced.

Rounding may choose other experts, or another token, rightly. What is computed of that token differs
from then on, and what attends to it. Where a token sees only those before it, these stay what they
were; and so do the other rows of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeGuard

import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.choices import by_token
from llmdebug_nb.comparison.jobs import Outcome
from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.core.kernels.padding import Blanks
from llmdebug_nb.core.records import RootCall, Site

_Step = tuple[int, int]  # generation and step
_NONE = torch.iinfo(torch.int64).max  # no token of a row is touched


class Values(Protocol):
    """Reads the values of pairs once more."""

    def padding(self, site: Site) -> Blanks | None:
        """Return the places of a step that hold no token; None if there are none."""

    def measured(self, pair: Pair, blanks: Blanks) -> Outcome:
        """Return how a pair compares but for some places."""

    def differ(self, pair: Pair) -> torch.Tensor | None:
        """Return where two tensors differ, bool in golden's shape; None if they can't be read."""


class _Batch(NamedTuple):
    """The rows of a step, how many tokens each is fed, and how many it has then, at least.

    ``may_see_more``: what earlier steps were fed, by a cache of which nothing is known.
    """

    rows: int
    fed: int
    total: int
    may_see_more: bool


class Steps:
    """The batches of golden's steps.

    ``is_causal``: a token sees only those before it; None: so it does if there is a cache.
    """

    def __init__(self, calls: Iterable[RootCall] = (), is_causal: bool | None = None) -> None:
        found: defaultdict[_Step, set[_Batch]] = defaultdict(set)
        cached = False
        for call in calls:
            if call.batch and call.query:
                total = call.total or call.query
                batch = _Batch(call.batch, call.query, total, not call.total)
                found[call.generation, call.step].add(batch)
                cached |= call.kind == "decode" or batch.fed < total
        self._batches = {step: next(iter(own)) for step, own in found.items() if len(own) == 1}
        self.is_causal = cached if is_causal is None else is_causal

    def of(self, site: Site) -> _Batch | None:
        """Return the batch of a step; None if it is unknown, or has several."""
        return self._batches.get((site.generation, site.step))


class Untouched:
    """Follows near ties in execution order. ``values``: None where values can't be read again."""

    def __init__(self, steps: Steps, values: Values | None) -> None:
        self._steps, self._values = steps, values
        # by rank and generation: the place of the first touched token of each row; None: unknown
        self._first: dict[tuple[int, int], list[int] | None] = {}
        self._begun: dict[tuple[int, int], int] = {}  # likewise: the step of the first near tie

    def add_tie(self, m: Measured) -> None:
        """Take note of a choice that was made differently: of tokens, or for each token."""
        site, batch = m.pair.either.site, self._steps.of(m.pair.either.site)
        key = site.rank, site.generation
        self._begun.setdefault(key, site.step)
        if self._values is None or batch is None:
            self._first[key] = None
            return
        moved = self._values.differ(m.pair)
        first = self._first.setdefault(key, [_NONE] * batch.rows)
        if first is None or len(first) != batch.rows or not _is_by_token(moved, batch):
            self._first[key] = None
            return
        moved = moved.reshape(batch.rows, batch.fed, -1).any(-1)
        padding = self._values.padding(site)
        if padding is not None and padding.of_fed.places.shape == moved.shape:
            moved &= ~padding.of_fed.places
        for row, tokens in enumerate(moved):
            if bool(tokens.any()):
                place = batch.total - batch.fed + int(tokens.byte().argmax())
                first[row] = min(first[row], place)

    def reading(self, m: Measured) -> Measured | None:
        """Return a pair as it is measured at untouched tokens; None if it shows none of them."""
        golden, mine = m.pair.golden, m.pair.mine
        if self._values is None or golden is None or mine is None or m.certain:
            return None
        if golden.site.phase == "backward":  # it sums over all tokens, and so do weights then
            self._first[golden.site.rank, golden.site.generation] = None
            return None
        fit, shape = m.pair.fit, golden.summary.shape
        unread = not (golden.payload and mine.payload) or golden.kept or mine.kept
        if unread or len(shape) < 2 or m.pair.other_batch or (fit is not None and fit.shared):
            return None
        blanks = self._touched(golden.site)
        if blanks is not None and (padding := self._values.padding(golden.site)) is not None:
            blanks = blanks.joined(padding)
        if blanks is None:
            return None
        outcome = self._values.measured(m.pair, blanks)
        if outcome.of_tokens is None and blanks.fed < blanks.tokens:
            outcome = self._values.measured(m.pair, blanks.of_fed)
        if outcome.of_tokens is None:
            return None
        metrics = outcome.of_tokens.whole or outcome.metrics
        return replace(
            m, metrics=metrics, gap=outcome.gap, in_any_order=outcome.in_any_order,
            in_one_order=outcome.in_one_order, of_tokens=None, rows=None,
        )  # fmt: skip

    def _touched(self, site: Site) -> Blanks | None:
        """Return the touched places of a step; None if these are all, or unknown."""
        key = site.rank, site.generation
        first, batch = self._first.get(key), self._steps.of(site)
        if first is None or batch is None or len(first) != batch.rows:
            return None
        begin = torch.tensor(first)[:, None]
        is_cached = batch.fed < batch.total
        is_cached |= batch.may_see_more and site.step > self._begun[key]
        if is_cached or not self._steps.is_causal:
            begin = torch.where(begin < _NONE, 0, begin)  # what the cache holds tells no more
        places = torch.arange(batch.total) >= begin
        if bool(places.all()):
            return None
        return Blanks(batch.rows, batch.total, batch.fed, bytes(places.flatten().tolist()))


def _is_by_token(x: torch.Tensor | None, batch: _Batch) -> TypeGuard[torch.Tensor]:
    """Tell whether a tensor has a row for each token that a step is fed."""
    return x is not None and by_token(x, batch.rows, batch.fed) is not None
