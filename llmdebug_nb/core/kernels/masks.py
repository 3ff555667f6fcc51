"""The masked entries of a tensor: what they hold does not matter, only where they are."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core.records import Summary

FILL = -1e4  # the mildest fill in use; softmax gives 0 for all that is 104 below the largest score


def hidden(x: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor is masked (bool), or None if it is nowhere.

    Masked are entries that are not finite, and the fill: what is below half of the least entry, as
    scores may be added to it.
    """
    least, most = (float(each) for each in x.aminmax()) if x.numel() else (0.0, 0.0)
    if least > FILL and most < math.inf:  # false for NaN
        return None
    places = ~x.isfinite()
    least = float(x.masked_fill(places, 0.0).min())
    return places | (x <= least / 2) if least <= FILL else places


def may_hide(summary: Summary) -> bool:
    """Tell by the statistics whether a tensor may have masked entries."""
    s = summary
    return bool(s.nan or s.inf) or s.min is None or s.min <= FILL


def without_hidden(
    golden: torch.Tensor, mine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two floating tensors of one shape with zeros where both are masked.

    NaN is never masked here, and an entry that only one side masks stays as it is.
    """
    own, other = hidden(golden), hidden(mine)
    if own is None or other is None:
        return golden, mine
    both = own & other & ~golden.isnan() & ~mine.isnan() & (golden < 0) & (mine < 0)
    return golden.masked_fill(both, 0.0), mine.masked_fill(both, 0.0)
