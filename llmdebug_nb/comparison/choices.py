"""Choices among scores, such as the experts of a token: how much worse mine's are than golden's.

Rounding may choose otherwise only where the scores are about the same. Whether they are is told by
golden's own scores, at its places and at mine's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.kernels.padding import Blanks
from llmdebug_nb.core.records import CallKey, Record, Summary


class Scores:
    """Golden's tensors that may be what a call chooses by: numbers that it takes or gives."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._of_calls: defaultdict[CallKey, list[Record]] = defaultdict(list)
        # golden's and mine's places that calls of golden give
        self._places: dict[tuple[CallKey, tuple[int, ...]], tuple[Record, Record]] = {}
        for pair in pairs:
            record = pair.golden
            if record is None or record.kept is not None:
                continue
            if is_floating(record.summary.dtype):
                self._of_calls[record.site.key].append(record)
            elif record.site.role == "output" and pair.mine is not None and pair.fit is None:
                self._places[record.site.key, record.summary.shape] = record, pair.mine

    def places(self, chosen: Pair) -> tuple[Record, Record] | None:
        """Return golden's and mine's places of the values that a call gives, if it gives both."""
        golden, mine = chosen.golden, chosen.mine
        if golden is None or mine is None or golden.site.role != "output" or chosen.fit is not None:
            return None
        if not is_floating(golden.summary.dtype):
            return None
        found = self._places.get((golden.site.key, golden.summary.shape))
        if found is None or found[1].site.key != mine.site.key:
            return None
        return found if found[0].payload and found[1].payload else None

    def of(self, chosen: Record) -> tuple[Record, ...]:
        """Return those from whose last axis a call may have chosen; none if it did not choose."""
        if chosen.site.role != "output" or is_floating(chosen.summary.dtype):
            return ()
        found = self._of_calls.get(chosen.site.key, ())
        return tuple(r for r in found if r.payload and _fits(chosen.summary.shape, r.summary.shape))


def _fits(chosen: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Tell whether a tensor has places of the last axis of another one."""
    if not scores or chosen == scores[:-1]:
        return bool(scores)
    return chosen[:-1] == scores[:-1] and chosen[-1] <= scores[-1]


def in_one_order(
    golden: torch.Tensor, mine: torch.Tensor, places: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values that two programs chose, those of each token in one order of its places.

    A choice that is not told to sort gives its best in any order. A token that has other places is
    left out: its values are those of other scores, and its places tell. The values are [..., k],
    ``places`` golden's and mine's; returned are two [n, k] for n tokens.
    """
    orders = [each.long().sort(-1) for each in places]
    same = (orders[0].values == orders[1].values).all(-1)
    both = [
        x.gather(-1, order.indices)[same] for x, order in zip((golden, mine), orders, strict=True)
    ]
    return both[0], both[1]


def by_token(x: torch.Tensor, rows: int, tokens: int) -> torch.Tensor | None:
    """Return a tensor with one axis for the tokens of a batch in front; None if it has none."""
    if x.shape[:1] == (rows * tokens,):
        return x
    return x.flatten(0, 1) if x.shape[:2] == (rows, tokens) else None


def without(x: torch.Tensor, blanks: Blanks) -> torch.Tensor:
    """Return the rows of the tokens that a step is fed, but for blank ones; else all."""
    found = by_token(x, blanks.rows, blanks.fed)
    return x if found is None else found[~blanks.of_fed.places.flatten()]


def gap(golden: torch.Tensor, mine: torch.Tensor, scores: torch.Tensor) -> float | None:
    """Return by how much two choices differ in score: the most, over the RMS of a row's scores.

    ``golden``, ``mine``: int[..., k], places of the best k, or int[...] of the best one; of all n
    in order if k = n. ``scores``: golden's, float[..., n]. Infinite if mine's are no places, or one
    of them twice. None if golden's are not the best, nor the least, of these scores.
    """
    n = scores.shape[-1]
    index, other = (x.reshape(*scores.shape[:-1], -1).long() for x in (golden, mine))
    if int(index.min()) < 0 or int(index.max()) >= n:
        return None
    scores = scores.double()
    made = scores.gather(-1, index)
    if not (_are_best(made, index, scores) or _are_best(-made, index, -scores)):
        return None
    once = bool((other.sort().values.diff() > 0).all())
    if not once or int(other.min()) < 0 or int(other.max()) >= n:
        return torch.inf
    theirs = scores.gather(-1, other)
    if index.shape[-1] < n:
        made, theirs = made.sort().values, theirs.sort().values
    off = torch.where(made == theirs, 0.0, (made - theirs).abs())
    finite = scores.isfinite()
    squares = torch.where(finite, scores, 0.0).square().sum(-1, keepdim=True)
    rms = (squares / finite.sum(-1, keepdim=True).clamp(min=1)).sqrt()
    most = (off / rms.clamp(min=torch.finfo(rms.dtype).tiny)).nan_to_num(torch.inf, torch.inf)
    return float(most.max())


def moved(golden: Summary, mine: Summary) -> float:
    """Return how many places are others, by their sum and that of their squares.

    A place that moves by chance is off by sqrt(2) times the spread of places, up or down; their
    squares spread as if all were the largest or none, at most. Infinite if the statistics don't
    tell.
    """
    means, norms, size = (golden.mean, mine.mean), (golden.l2norm, mine.l2norm), golden.numel
    if None in (*means, *norms, golden.min, golden.max):
        return math.inf
    largest = max(abs(golden.min or 0.0), abs(golden.max or 0.0))
    squares = [(norm or 0.0) * (norm or 0.0) / size for norm in norms]
    mean, square = means[0] or 0.0, squares[0]
    spreads = square - mean * mean, (largest * largest - square) * square
    offs = (means[1] or 0.0) - mean, squares[1] - square
    found = [
        off * size * off * size / (2 * spread) if spread > 0.0 else math.inf if off else 0.0
        for off, spread in zip(offs, spreads, strict=True)
    ]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def near_ties(chosen: Summary, gap: float) -> float:
    """Return how many places rounding may choose otherwise, that moves scores by a gap, over RMS.

    Of n normal scores, the next one is nearer than a gap for 0.4 n gap tokens at most: that is
    their density where it is highest. One place may be off in any case, from end to end.
    """
    end_to_end = 6.0  # (n - 1)^2, over twice the variance (n^2 - 1) / 12 of n places
    scores = (chosen.max or 0.0) + 1.0
    tokens = scores * gap / math.sqrt(2 * math.pi) * _tokens(chosen)
    return max(end_to_end, min(tokens, constants.NEAR_TIES * chosen.numel))


def moved_norm(chosen: Summary, places: float) -> float:
    """Return by how much so many other places may move the norm of what follows, relative.

    A token that goes on otherwise has up to twice its square, or nothing of it, by chance.
    """
    return min(1.0, math.sqrt(places) / 2 / _tokens(chosen))


def _tokens(chosen: Summary) -> float:
    """Return for how many tokens a choice is made: int[..., k], or int[...] of the best one."""
    return chosen.numel / (chosen.shape[-1] if len(chosen.shape) > 1 else 1)


def _are_best(made: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> bool:
    """Tell whether no score is above one that was chosen; of all, whether they fall."""
    if index.shape[-1] == scores.shape[-1]:
        return bool((made.diff() <= 0).all())
    others = scores.scatter(-1, index, -torch.inf).amax(-1)
    return bool((made.amin(-1) >= others).all())
