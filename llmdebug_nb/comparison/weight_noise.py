"""Noise of weights that a program changes: what its optimizer makes of the rounding of gradients.

An optimizer that divides each gradient by its own size, as Adam does, turns those that are little
more than rounding anywhere. Their elements of a weight then differ by as much as it moves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

from llmdebug_nb.core import constants
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.records import Site, Summary

if TYPE_CHECKING:
    import torch

TURNED = "turned"  # the figure of a gradient: the error of `turned` as it may be `shown`

_Step: TypeAlias = tuple[int, int]  # generation and step
_Name: TypeAlias = tuple[str, str]  # path of a module, name of its weight


class Weights(Protocol):
    """What is known of golden's weights."""

    def moved(self, rank: int, name: _Name, step: _Step) -> float:
        """Return by how much of its size a weight moved behind a step."""

    def shared(self, rank: int, path: str) -> Collection[_Name]:
        """Return the weights of other modules that are weights of this one, too."""


class Still:
    """Weights that do not move."""

    def moved(self, rank: int, name: _Name, step: _Step) -> float:
        return 0.0

    def shared(self, rank: int, path: str) -> Collection[_Name]:
        return ()


def turned(golden: torch.Tensor, mine: torch.Tensor) -> tuple[float, float]:
    """Return the relative L2 error of the first step that Adam takes by a gradient.

    And how many elements carry it. 0 if the error is not finite: nothing is known of what an
    optimizer makes of that.
    D. P. Kingma, J. Ba: Adam, a method for stochastic optimization. 2015, algorithm 1.
    """
    steps = [g.double() / (g.double().abs() + constants.ADAM_EPSILON) for g in (golden, mine)]
    size = float(steps[0].norm())  # type: ignore[no-untyped-call]
    squares = (steps[0] - steps[1]).square_()
    off = float(squares.sum())
    if not size or not off or not math.isfinite(off):
        return 0.0, 0.0
    fourth = float(squares.norm())  # type: ignore[no-untyped-call]
    return math.sqrt(off) / size, (off / fourth) ** 2 if fourth else 1.0


def shown(error: float, carriers: float) -> float:
    """Return how large an error of a weight may show in what is made of it.

    That depends on what the elements meet that carry it: if these are few, chance has it.
    """
    return error * (1 + constants.CARRIER_ERRORS / math.sqrt(carriers)) if error else 0.0


def turned_by(error: float, gradient: Summary) -> float:
    """Return what `turned` may be of a gradient of which only statistics are known.

    ``error``: its relative L2 error. Of n normal elements, error * n * sqrt(2 / pi) are expected to
    be smaller than their errors, and may have any sign. If there are none, the smallest have most:
    Adam's step by one changes by eps / (its size + eps)^2 times its error.
    """
    n = gradient.numel - (gradient.zero or 0)
    if not n or not gradient.l2norm or not math.isfinite(gradient.l2norm):
        return 0.0
    size, density = gradient.l2norm / math.sqrt(n), n * math.sqrt(2 / math.pi)
    smaller, eps = min(error, 1.0) * density, constants.ADAM_EPSILON
    if smaller >= constants.SMALLEST_BY_CHANCE:
        return 2 * math.sqrt(max(smaller, 1.0) / n)
    smallest = constants.SMALLEST_BY_CHANCE * size / density
    step = min(2.0, error * size * eps / (smallest + eps) ** 2)
    return step * math.sqrt(max(eps / size * density, 1.0) / n)  # so many are smaller than eps


class WeightNoise:
    """The noise of weights in each step, from that of the gradients before it."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        # by rank and path of a module: by name and step
        self._turned: dict[tuple[int, str], dict[tuple[str, _Step], float]] = defaultdict(dict)
        self._known: dict[tuple[int, str, _Step], float] = {}
        self._first: dict[int, _Step] = {}  # by rank: the first step with noise in a gradient

    def add(self, site: Site, turned: float) -> None:
        """Take in a gradient of a weight that is right but for rounding."""
        key = unshared(site.slot), (site.generation, site.step)
        of_module = self._turned[site.rank, site.path]
        of_module[key] = max(turned, of_module.get(key, 0.0))
        if turned:
            self._first[site.rank] = min(key[1], self._first.get(site.rank, key[1]))

    def any_in(self, site: Site) -> bool:
        """Tell whether any weight has noise in the step of a site."""
        first = self._first.get(site.rank)
        return first is not None and first < (site.generation, site.step)

    def of(self, rank: int, path: str, step: _Step) -> float:
        """Return the relative error that the weights of a module may have in a step."""
        if not self._turned:
            return 0.0
        key = rank, path, step
        if key not in self._known:
            found: dict[_Name, float] = defaultdict(float)
            for weight, before, share in self._turned_of(rank, path):
                if before < step and share:
                    found[weight] += share * self._weights.moved(rank, weight, before)
            self._known[key] = max(found.values(), default=0.0)
        return self._known[key]

    def _turned_of(self, rank: int, path: str) -> Iterator[tuple[_Name, _Step, float]]:
        """Yield the gradients of a module's weights. That of a shared one is found elsewhere."""
        for (name, step), share in self._turned.get((rank, path), {}).items():
            yield (path, name), step, share
        for other, name in self._weights.shared(rank, path):
            for (own, step), share in self._turned.get((rank, other), {}).items():
                if own == name:
                    yield (other, name), step, share
