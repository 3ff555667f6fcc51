"""What differs at places of a batch that hold no token: what is computed there is no one's result.

Programs may compute anything there. Rows of scores that are all hidden become an even choice in one
way to write attention, and a choice among all in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import Measured, OfTokens
from llmdebug_nb.core.findings import Difference, Pair
from llmdebug_nb.core.kernels.padding import Blanks
from llmdebug_nb.core.records import CallKey

NO_TOKEN = "differs only where the batch has no token (padding)"


def notes(differences: Iterable[Difference]) -> list[str]:
    """Return a sentence on the rows that differ at blank places alone, if there are any."""
    count = sum(d.reason == NO_TOKEN for d in differences)
    return [f"Padding: {count:,} rows differ only where the batch has no token"] if count else []


def of_tokens(
    golden: torch.Tensor, mine: torch.Tensor, blanks: Blanks, logits: bool
) -> OfTokens | None:
    """Return what two floating tensors of one shape differ by at tokens.

    None if they differ at no other place, or if the shape has no axis of tokens.
    """
    shape, apart = tuple(golden.shape), _apart(golden, mine)
    best, least = None, float(apart.sum())
    for reading in blanks.readings(shape):
        left = float(apart.masked_fill(reading.blank(reading.tokens, shape), 0).sum())
        if left < least:
            best, least = reading, left
    if best is None:
        return None
    first, whole = (best.blank(axes, shape) for axes in (best.tokens[:1], best.tokens))
    return OfTokens(
        _compared(golden, mine, first, logits),
        _compared(golden, mine, whole, logits),
        best.varies(golden) or best.varies(mine),
    )


def _apart(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return how far elements are apart, float64; what only one of them has no number for, far."""
    gap = (golden.double() - mine.double()).abs().nan_to_num(nan=torch.inf)
    same = (golden == mine) | (golden.isnan() & mine.isnan())
    return gap.clamp(max=torch.finfo(torch.float32).max).masked_fill(same, 0)


def _compared(
    golden: torch.Tensor, mine: torch.Tensor, blank: torch.Tensor, logits: bool
) -> metrics.Metrics:
    return metrics.compare(golden.masked_fill(blank, 0), mine.masked_fill(blank, 0), logits)


class Unasked:
    """Tells of rows in execution order whether they differ only at blank places.

    A difference begins there in the rows of states. Keys at blank places differ if the states do:
    a mask that hides other places is no such difference. ``counts``: blank places count as others.
    """

    def __init__(self, counts: bool = False) -> None:
        self._counts = counts
        self._calls: set[CallKey] = set()  # with an input that differs so
        self._contents: set[object] = set()

    def readings(self, m: Measured) -> Iterator[Measured]:
        """Yield a pair as it is measured without blank places, where that is allowed."""
        found = m.of_tokens
        if found is None or self._counts:
            return
        follows = m.pair.either.site.key in self._calls or _contents(m.pair) in self._contents
        if found.varies or follows:
            yield replace(m, metrics=found.first)
        if follows:
            yield replace(m, metrics=found.whole)

    def add(self, pair: Pair) -> None:
        """Take note of a pair that differs at blank places, and within noise at tokens."""
        site = pair.either.site
        self._contents.add(_contents(pair))
        if site.role == "input":
            self._calls.add(site.key)


def _contents(pair: Pair) -> object:
    """Return what both tensors hold, in any step: caches hold the states of steps before."""
    prints = [r and r.summary.fingerprint for r in (pair.golden, pair.mine)]
    return tuple(prints) if all(prints) else pair
