"""Noise of weights that a program changes: what its optimizer makes of the rounding of gradients.

An optimizer that divides each gradient by its own size, as Adam does, turns those that are little
more than rounding anywhere. Their elements of a weight then differ by as much as it moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.core import constants
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.records import Site

if TYPE_CHECKING:
    import torch

TURNED = "turned"  # the figure of a gradient

_Step: TypeAlias = tuple[int, int]  # generation and step
# by rank, path, name and step: by how much of its size the weight moved behind that step
Moved: TypeAlias = Callable[[int, str, str, _Step], float]


def stays(rank: int, path: str, name: str, step: _Step) -> float:
    """Return that a weight did not move."""
    return 0.0


def turned(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the relative L2 error of the first step that Adam takes by a gradient.

    0 if it is not finite: nothing is known of what an optimizer makes of that.
    D. P. Kingma, J. Ba: Adam, a method for stochastic optimization. 2015, algorithm 1.
    """
    steps = [g.double() / (g.double().abs() + constants.ADAM_EPSILON) for g in (golden, mine)]
    size = float(steps[0].norm())  # type: ignore[no-untyped-call]
    off = float((steps[0] - steps[1]).norm())  # type: ignore[no-untyped-call]
    return off / size if size and math.isfinite(off) else 0.0


def turned_by(error: float) -> float:
    """Return what `turned` is of gradients of whose values only the relative L2 error is known.

    Two normal variables whose correlation is the cosine of an angle differ in sign with the
    probability angle / pi (W. F. Sheppard, 1899), and the error is that angle, if it is small. An
    element that is turned is off by twice its size.
    """
    return math.sqrt(4 * min(error, 1.0) / math.pi)


class WeightNoise:
    """The noise of weights in each step, from that of the gradients before it."""

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        # by rank and path of a module: by name and step
        self._turned: dict[tuple[int, str], dict[tuple[str, _Step], float]] = defaultdict(dict)
        self._known: dict[tuple[int, str, _Step], float] = {}

    def add(self, site: Site, turned: float) -> None:
        """Take in a gradient of a weight that is right but for rounding."""
        key = unshared(site.slot), (site.generation, site.step)
        of_module = self._turned[site.rank, site.path]
        of_module[key] = max(turned, of_module.get(key, 0.0))

    def of(self, rank: int, path: str, step: _Step) -> float:
        """Return the relative error that the weights of a module may have in a step."""
        if (rank, path) not in self._turned:
            return 0.0
        key = rank, path, step
        if key not in self._known:
            found: dict[str, float] = defaultdict(float)
            for (name, before), share in self._turned[rank, path].items():
                if before < step and share:
                    found[name] += share * self._moved(rank, path, name, before)
            self._known[key] = max(found.values(), default=0.0)
        return self._known[key]
