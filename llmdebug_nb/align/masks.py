"""Masks by place: what a masked entry holds does not matter, only where it is."""

from __future__ import annotations

from functools import partial

import torch

from llmdebug_nb.align.fit import Fit
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import fill_count, hidden
from llmdebug_nb.core.records import Summary


def fill_for(shown: torch.Tensor) -> float:
    """Return a value that stands out from those shown: three standard deviations below, or -1."""
    spread = float(shown.double().std()) if shown.numel() > 1 else 0.0
    return float(shown.double().mean()) - 3 * spread if spread else -1.0


def are_masks(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors can only be compared by place: bool and additive masks, fills."""
    if golden.max != 0.0 and mine.max != 0.0:
        return False
    added = [_is_added(s) for s in (golden, mine)]
    bools = [s.dtype == "bool" for s in (golden, mine)]
    if all(added):
        return golden.min != mine.min
    return (bools[0] and added[1]) or (added[0] and bools[1])


def _is_added(s: Summary) -> bool:
    """Tell whether a tensor holds zeros and a fill alone, as a mask does that is added to scores.

    Masked scores less their maximum begin and end there, too.
    """
    if s.max != 0.0 or s.min is None or s.min > constants.MASK_FILL:
        return False
    return s.zero is None or s.zero + (s.inf or fill_count(s)) == s.numel


def fits() -> list[Fit]:
    """Return the ways to bring two masks to one form: 1.0 where they hide, 0.0 elsewhere."""
    return [
        Fit(f"masks by place, where True {word}", (move,), (move,), whole=True)
        for keeps, word in ((True, "shows"), (False, "hides"))
        for move in (partial(_places, keeps),)
    ]


def _places(keeps: bool, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bool:
        return (x != keeps).float()
    if not x.is_floating_point():
        return x  # places that `Fit.places` moves: no mask holds integers
    if x.is_meta:
        return x.float()
    places = hidden(x.float())
    return torch.zeros_like(x, dtype=torch.float32) if places is None else places.float()
