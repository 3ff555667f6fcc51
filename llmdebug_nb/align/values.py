"""The values of a pair, how far they are apart, and whether chance explains that they are near.

A tensor is compared with several others, so what is computed of it alone is computed once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from llmdebug_nb.align import masks
from llmdebug_nb.align.batch_layout import Load
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.masks import hidden
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.core.records import Record

Spread = tuple[float, float]
# what reading a damaged or unusual tensor raises
_UNREADABLE = (CorruptDumpError, TensorLookupError, RuntimeError)


class Tensor:
    """A tensor, and what is computed of it alone. ``read``: as recorded; ``real``: in float32."""

    def __init__(self, read: torch.Tensor) -> None:
        self.read, self.real = read, real(read)

    @property
    def nbytes(self) -> int:
        return self.read.nbytes + (self.real.nbytes if self.real is not self.read else 0)

    @functools.cached_property
    def hidden(self) -> torch.Tensor | None:
        return hidden(self.real)

    @functools.cached_property
    def spread(self) -> Spread:
        return _spread(self.real)


class Tensors:
    """Reads the tensors of two runs, and keeps those that it read last."""

    def __init__(self, load: tuple[Load, Load] | None) -> None:
        self._load = load
        self._kept: dict[tuple[int, int], Tensor] = {}  # by side and record, the last one read last
        self._room = constants.KEPT_BYTES

    def of(self, record: Record, side: int) -> Tensor | None:
        """Return golden's (0) or mine's (1) tensor; None if all its values are not there."""
        if self._load is None or record.payload is None or record.kept:
            return None
        key = side, record.id
        found = self._kept.pop(key, None)
        if found is None:
            try:
                found = Tensor(self._load[side](record))
            except _UNREADABLE:
                return None
            self._room -= found.nbytes
        self._kept[key] = found
        while self._room < 0:
            self._room += self._kept.pop(next(iter(self._kept))).nbytes
        return found

    def both(self, golden: Record, mine: Record) -> tuple[Tensor, Tensor] | None:
        """Return both tensors of a pair, None if one of them is not there."""
        if any(record.payload is None or record.kept for record in (golden, mine)):
            return None
        g = self.of(golden, 0)
        m = None if g is None else self.of(mine, 1)
        return None if g is None or m is None else (g, m)


@dataclass(frozen=True)
class Values:
    """Both tensors in float32, masked entries filled; and the masked places (bool) if any.

    ``golden``: the first one, if it is as it was read.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    golden: Tensor | None = None

    @classmethod
    def of(cls, golden: torch.Tensor, mine: torch.Tensor) -> Values:
        return cls.between(Tensor(golden), Tensor(mine))

    @classmethod
    def between(cls, golden: Tensor, mine: Tensor) -> Values:
        g, m = golden.real, mine.real
        own, other = golden.hidden, mine.hidden
        if own is None and other is None:
            return cls((g, m), None, golden)
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
    def _spread(self) -> Spread:
        return _spread(self._shown[0]) if self.golden is None else self.golden.spread

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
        error = max(apart, ratio(_norm(m - g), self._spread[0]))
        return math.inf if math.isnan(error) else error

    @property
    def whole_numbers(self) -> bool:
        """Whether golden's are whole numbers alone: counts and indices are equal by chance."""
        return bool((self.tensors[0] == self.tensors[0].round()).all())

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


def _spread(x: torch.Tensor) -> Spread:
    """Return the norm of values less their mean, and how many elements carry it.

    Values around 1 are near each other in any order; what tells them apart is the rest.
    """
    squares = (x - x.mean()).square_()
    total, fourth = float(squares.sum()), _norm(squares)
    return math.sqrt(total), (total / fourth) ** 2 if fourth else 0.0


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x))  # as `Tensor.norm`, without its Python


def real(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32; of complex numbers, the sum of both parts."""
    return (x.real + x.imag if x.is_complex() else x).to(torch.float32)
