"""What differs at places of a batch that hold no token: what is computed there is no one's result.

Programs may compute anything there. Rows of scores that are all hidden become an even choice in one
way to write attention, and a choice among all in another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.measured import OfTokens
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import hides_tokens
from llmdebug_nb.core.kernels.padding import Blanks, Reading, are_marks, zeroed


def notes(differences: Sequence[Difference]) -> list[str]:
    """Return a sentence on what differs at blank places alone, or may, if there is any."""
    count = sum(d.rule is Rule.NO_TOKEN for d in differences)
    if count:
        return [f"Padding: {count:,} rows differ only where the batch has no token"]
    bad = (d.metrics for d in differences if d.verdict == "diverged")
    if not any("stat_error" in m and m.get("relative_euclidean_distance") is None for m in bad):
        return []
    given = [d.pair.golden.summary for d in differences if d.pair.golden is not None]
    marks = {s.shape[-1] for s in given if are_marks(s)}
    if not any(s.shape[-1] in marks for s in given if marks and hides_tokens(s)):
        return []
    return [
        "Padding: some places of the batch may hold no token; right programs may differ there, and"
        " statistics cover them. Values (stats_only=False) tell"
    ]


def of_tokens(
    golden: torch.Tensor, mine: torch.Tensor, blanks: Blanks, logits: bool
) -> OfTokens | None:
    """Return what two tensors of one shape differ by at tokens; None if no axis has these."""
    shape = tuple(golden.shape)
    best, least = None, (math.inf, math.inf)
    for reading in blanks.readings(shape):
        blank = (reading.blank(axes, shape) for axes in _axes(reading))
        whole, first = (_apart(golden, mine, places) for places in blank)
        if (whole, first) < least:
            best, least = reading, (whole, first)
    if best is None:
        return None
    if least[0] >= _apart(golden, mine, torch.zeros(1, dtype=torch.bool).expand(shape)):
        return OfTokens()
    whole_of, first_of = (
        _compared(golden, mine, best.blank(axes, shape), logits) for axes in _axes(best)
    )
    are_states = not (_has_two_values(golden) or _has_two_values(mine))
    return OfTokens(first_of, whole_of, are_states)


def _axes(reading: Reading) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return all axes of tokens, and the one alone."""
    return reading.axes, (reading.axis,)


def _has_two_values(x: torch.Tensor) -> bool:
    """Tell whether a tensor holds two values at most, as masks do, and states do not."""
    x = x.float() if x.is_floating_point() else x.double()  # of every dtype, these have an order
    return not x.numel() or bool(((x == x.amin()) | (x == x.amax())).all())


def _apart(golden: torch.Tensor, mine: torch.Tensor, blank: torch.Tensor) -> float:
    """Return the sum of the distances of elements that are not at blank places.

    What only one of two elements has no number for is far.
    """
    rows = max(1, constants.CHUNK * len(golden) // max(golden.numel(), 1))  # not all at once
    parts = (torch.split(x, rows) for x in (golden, mine, blank))
    return sum(_distance(*each) for each in zip(*parts, strict=True))


def _distance(golden: torch.Tensor, mine: torch.Tensor, blank: torch.Tensor) -> float:
    gap = (golden.double() - mine.double()).abs().nan_to_num(nan=torch.inf)
    same = (golden == mine) | (golden.isnan() & mine.isnan()) | blank
    return float(gap.clamp(max=torch.finfo(torch.float32).max).masked_fill(same, 0).sum())


def _compared(
    golden: torch.Tensor, mine: torch.Tensor, blank: torch.Tensor, logits: bool
) -> metrics.Metrics:
    return metrics.compare(zeroed(golden, blank), zeroed(mine, blank), logits)
