"""Angles in one program where the other one has their cosines or sines, as rotary embeddings do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmdebug_nb.align.fit import Fit, Move
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.records import Summary


def _computed(function: Move, x: torch.Tensor) -> torch.Tensor:
    """Return a function of the values; the places of elements, integers, stay."""
    return function(x) if x.is_floating_point() else x


_FUNCTIONS = {"cosines": partial(_computed, torch.cos), "sines": partial(_computed, torch.sin)}


def fits(golden: Summary, mine: Summary) -> Iterator[Fit]:
    """Yield the layouts of two tensors of which one may hold the angles of the other one."""
    for side, (waves, angles) in enumerate(((golden, mine), (mine, golden))):
        if not (_are_waves(waves) and _are_angles(angles)):
            continue
        owners = ("golden", "mine") if side == 0 else ("mine", "golden")
        for name, function in _FUNCTIONS.items():
            says = f"{owners[0]} has the {name} of {owners[1]}'s angles"
            yield Fit(says, mine=(function,)) if side == 0 else Fit(says, golden=(function,))


def _are_waves(s: Summary) -> bool:
    return _tells(s) and s.min is not None and s.max is not None and s.min >= -1 and s.max <= 1


def _are_angles(s: Summary) -> bool:
    return _tells(s) and s.max is not None and s.max > 1


def _tells(s: Summary) -> bool:
    return is_floating(s.dtype) and identifies_itself(s)
