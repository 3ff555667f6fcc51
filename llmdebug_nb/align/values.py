"""The values of a pair, how far they are apart, and whether chance explains that they are near."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from llmdebug_nb.align import masks
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import hidden
from llmdebug_nb.core.kernels.relative import ratio


@dataclass(frozen=True)
class Values:
    """Both tensors in float32, masked entries filled; and the masked places (bool) if any."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, golden: torch.Tensor, mine: torch.Tensor) -> Values:
        g, m = real(golden), real(mine)
        own, other = hidden(g), hidden(m)
        if own is None and other is None:
            return cls((g, m))
        own = torch.zeros_like(g, dtype=torch.bool) if own is None else own
        other = torch.zeros_like(m, dtype=torch.bool) if other is None else other
        fill = masks.fill_for(g[~own])
        return cls((g.masked_fill(own, fill), m.masked_fill(other, fill)), (own, other))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.tensors[0].shape), tuple(self.tensors[1].shape)

    def after(self, fit: Fit) -> Values:
        """Return both in a layout."""
        return Values(fit(*self.tensors), self.hidden and fit(*self.hidden))

    @functools.cached_property
    def _shown(self) -> tuple[torch.Tensor, torch.Tensor]:
        g, m = self.tensors
        if self.hidden is None:
            return g, m
        places = ~(self.hidden[0] | self.hidden[1])
        return g[places], m[places]

    @functools.cached_property
    def _spread(self) -> tuple[float, float]:
        """The norm of golden's values less their mean, and how many elements carry it.

        Values around 1 are near each other in any order; what tells them apart is the rest.
        """
        g = self._shown[0]
        squares = (g - g.mean()).square_()
        total, fourth = float(squares.sum()), float(squares.norm())
        return math.sqrt(total), (total / fourth) ** 2 if fourth else 0.0

    @functools.cached_property
    def error(self) -> float:
        """Relative L2 of what both show, or of the places that only one of them hides."""
        if self.tensors[0].shape != self.tensors[1].shape:
            return math.inf
        apart = 0.0
        if self.hidden is not None:
            own, other = self.hidden
            apart = math.sqrt(ratio(float((own ^ other).sum()), float(own.sum())))
        g, m = self._shown
        error = max(apart, ratio(float((m - g).norm()), self._spread[0]))
        return math.inf if math.isnan(error) else error

    @functools.cached_property
    def confirmed(self) -> bool:
        """Whether the two are near each other, and not by chance."""
        if self.error > constants.WRONG_LAYOUT:
            return False
        if self.hidden is not None and bool(self.hidden[0].any()) and self._spread[0] == 0.0:
            return True
        return self._spread[1] * math.log(max(self.error, constants.FINEST)) <= math.log(
            constants.LAYOUT_CHANCE
        )


def real(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32; of complex numbers, the sum of both parts."""
    return (x.real + x.imag if x.is_complex() else x).to(torch.float32)
