"""Masks by place: what a masked entry holds does not matter, only where it is."""

from __future__ import annotations

from functools import partial

import torch

from llmdebug_nb.align.fit import Fit, narrowed, span_text
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.kernels.masks import fill_count, hidden, is_added
from llmdebug_nb.core.records import Summary


def fill_for(shown: torch.Tensor) -> float:
    """Return a value that stands out from those shown: three standard deviations below, or -1."""
    spread = float(shown.double().std()) if shown.numel() > 1 else 0.0
    return float(shown.double().mean()) - 3 * spread if spread else -1.0


def are_masks(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors can only be compared by place: bool and additive masks, fills."""
    if golden.max != 0.0 and mine.max != 0.0:
        return False
    added = [is_added(s) for s in (golden, mine)]
    bools = [s.dtype == "bool" for s in (golden, mine)]
    if all(added):
        return golden.min != mine.min
    return (bools[0] and added[1]) or (added[0] and bools[1])


def may_be_longer(golden: Summary, mine: Summary) -> bool:
    """Tell whether one may be a mask that hides nothing, and the other hides what it has besides.

    So it is with caches of a fixed length.
    """
    few, many = sorted((golden, mine), key=lambda s: s.numel)
    if golden.shape[:-1] != mine.shape[:-1] or few.numel == many.numel:
        return False
    return _hides(few) == 0 and _hides(many) == many.numel - few.numel


def _hides(s: Summary) -> int | None:
    """Return how many places a mask hides, by the statistics; None if a tensor is no mask."""
    if s.dtype == "bool":
        return s.zero
    if is_floating(s.dtype) and s.min == s.max == 0.0:
        return 0
    return (s.inf or fill_count(s)) if is_added(s) else None


def cut(golden: torch.Tensor, mine: torch.Tensor) -> Fit | None:
    """Return the fit that leaves out what the longer one of such masks hides; None if none does."""
    count, length = sorted((golden.shape[-1], mine.shape[-1]))
    turned = golden.shape[-1] < length
    many, place = mine if turned else golden, partial(_places, True)
    for start in (0, length - count):
        if not bool(place(many.narrow(-1, start, count)).any()):
            moves = (narrowed(many.dim() - 1, start, count), place)
            says = f"masks by place: {span_text(start, count)} of {length}, the others are hidden"
            return Fit(says, (place,) if turned else moves, moves if turned else (place,))
    return None


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
