"""Choices among scores, such as the experts of a token: how much worse mine's are than golden's.

Rounding may choose otherwise only where the scores are about the same. Whether they are is told by
golden's own scores, at its places and at mine's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.findings import Pair
from llmdebug_nb.core.records import CallKey, Record


class Scores:
    """Golden's tensors that may be what a call chooses by: numbers that it takes or gives."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._of_calls: defaultdict[CallKey, list[Record]] = defaultdict(list)
        for record in (pair.golden for pair in pairs):
            if record is not None and is_floating(record.summary.dtype) and record.kept is None:
                self._of_calls[record.site.key].append(record)

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


def _are_best(made: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> bool:
    """Tell whether no score is above one that was chosen; of all, whether they fall."""
    if index.shape[-1] == scores.shape[-1]:
        return bool((made.diff() <= 0).all())
    others = scores.scatter(-1, index, -torch.inf).amax(-1)
    return bool((made.amin(-1) >= others).all())
