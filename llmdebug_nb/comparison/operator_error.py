"""Is the recorded output of one operator what rounding explains of its reference in float64?

Five figures, each in units of its limit: the relative L2 error, that of the worst row, the worst
element, the common factor of all elements, and that of the worst lane. A lane is every n-th
element: one of a vector register's, or one channel of the last axis. A common factor is a fault far
below rounding, as rounding varies from element to element.

A result that cancels may show far more than that. So a suspect is measured once more: how far does
the reference move if each input moves by as much as rounding may move it? That is explained too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from llmdebug_nb.comparison import noise
from llmdebug_nb.core import constants


class Figures(NamedTuple):
    """Errors, relative to the reference. ``l2`` is that of the whole tensor."""

    l2: float = 0.0
    row: float = 0.0
    element: float = 0.0
    factor: float = 0.0
    lane: float = 0.0


# the figures in words, in the same order
WORDS = (
    "relative L2",
    "its worst row",
    "its worst element",
    "a common factor",
    "a common factor of one lane",
)


class Bound(NamedTuple):
    """What the rounding of one operator explains. ``error``: relative L2. ``factor``: common."""

    error: float
    factor: float

    @classmethod
    def of(
        cls, dtype: torch.dtype, length: int, one: bool = True, sums_narrow: bool = False
    ) -> Bound:
        """Return it for a result of a floating dtype. ``length``: of the axis that is summed over.

        ``one``: one operator computes it. ``sums_narrow``: each term of a sum is rounded.
        """
        eps = torch.finfo(dtype).eps
        error = noise.floor(eps, length)
        if sums_narrow:
            error += constants.SUM_SHARE * math.sqrt(length) * eps
        floors = 1.0 if one else constants.GLUE_FLOORS
        return cls(floors * error, floors * noise.scale_floor(eps, length))

    def with_other(self, other: Bound) -> Bound:
        """Return what the rounding of two results explains of their difference."""
        return Bound(*map(math.hypot, self, other))

    def units(self, figures: Figures) -> Figures:
        """Return figures in units of their limits."""
        rows = constants.WORST_ROW * self.error
        return Figures(
            figures.l2 / self.error, figures.row / rows, figures.element / rows,
            figures.factor / self.factor, figures.lane / self.factor,
        )  # fmt: skip


def figures(
    reference: torch.Tensor, made: torch.Tensor, dtype: torch.dtype, terms: float = 1.0
) -> Figures:
    """Return the errors of a tensor, both float64 and finite where they are compared.

    They are relative to the reference; absolute if that is all zero.

    ``dtype``: of the recorded tensor. What it can't hold, below its smallest number, is no error.
    ``terms``: so many such numbers may have been added up.
    """
    width = reference.shape[-1] if reference.dim() else 1
    g, m = reference.reshape(-1, max(width, 1)), made.reshape(-1, max(width, 1))
    finite = g.isfinite() & m.isfinite()
    if not bool(finite.all()):
        g, m = torch.where(finite, g, 0.0), torch.where(finite, m, 0.0)
    if not g.numel() or torch.equal(g, m):
        return Figures()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * math.sqrt(terms)
    d = m - g
    d = d.sign() * (d.abs() - least).clamp_min(0.0)
    row_g, row_d = g.norm(dim=1), d.norm(dim=1)
    size = float(row_g.norm())
    if not size:
        return Figures(float(row_d.norm()), float(row_d.max()), float(d.abs().max()))
    rows = row_g.clamp_min(size / math.sqrt(len(g)))
    spread = (rows / math.sqrt(width))[:, None] + g.norm(dim=0) / math.sqrt(len(g))
    return Figures(
        float(row_d.norm()) / size,
        float((row_d / rows).max()),
        float((d.abs() / (g.abs() + spread)).max()),
        *_factors(g, m, dtype),
    )


def _factors(g: torch.Tensor, m: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the significant common factors, less 1: of all elements, and of the worst lane.

    The reference is rounded first: regular values may all be rounded one way.
    """
    fits = g.abs() < torch.finfo(dtype).max
    d = torch.where(fits, m - g.to(dtype).double(), 0.0)
    if not bool(d.any()):
        return 0.0, 0.0
    sums = _sums(g, d)
    columns = sums.sum(1)
    whole = _factor(columns.sum(1, keepdim=True), g.reshape(-1, 1), d.reshape(-1, 1))
    lane = _factor(columns, g, d) if len(g) > 1 else 0.0
    most = constants.MOST_LANES
    padding = -g.numel() % most
    flat, flat_d = (torch.nn.functional.pad(x.flatten(), (0, padding)) for x in (g, d))
    lanes = torch.nn.functional.pad(sums.flatten(1), (0, padding)).view(len(sums), -1, most).sum(1)
    count = most
    while count > 1:
        if g.numel() > count:
            of_count = lanes.view(len(sums), -1, count).sum(1)
            lane = max(lane, _factor(of_count, flat.view(-1, count), flat_d.view(-1, count)))
        count //= 2
    return whole, lane


def _sums(g: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return what is added up for a factor: g·d, g², (g·d)², the signs of g·d, and their number."""
    even = g * d
    signs = even.sign()
    return torch.stack([even, g * g, even * even, signs, signs.abs()])


def _factor(sums: torch.Tensor, g: torch.Tensor, d: torch.Tensor) -> float:
    """Return the largest significant common factor of a column, less 1.

    ``sums``: the `_sums` of each column. Equal values of a column have equal errors, so they count
    once.
    """
    factors = torch.where(_is_sure(sums) & (sums[1] > 0), sums[0].abs() / sums[1], 0.0)
    for column in factors.argsort(descending=True)[: constants.NAMES_SHOWN].tolist():
        found = float(factors[column])
        if not found:
            break
        own_g, order = torch.unique(g[:, column], return_inverse=True)
        own_d = torch.zeros_like(own_g).scatter_(0, order, d[:, column])
        if bool(_is_sure(_sums(own_g, own_d).sum(1))):
            return found
    return 0.0


def _is_sure(sums: torch.Tensor) -> torch.Tensor:
    """Tell for each column whether its sum of g·d is beyond chance: by size, or by signs alone.

    A small factor in a narrow dtype changes few elements, by a whole step, all the same way.
    """
    total, _, squares, signs, count = sums
    by_size = total.abs() >= constants.EVEN_ERRORS * squares.sqrt()
    by_sign = signs.abs() >= constants.EVEN_ERRORS * count.sqrt()
    sure: torch.Tensor = (by_size | by_sign) & (count > 0)
    return sure


def differs(reference: torch.Tensor, recorded: torch.Tensor) -> str:
    """Tell where a recorded tensor is NaN or infinite and the reference is not, or the reverse.

    A reference that the dtype can't hold is infinite there. "" if they agree.
    """
    held = reference.to(recorded.dtype).double() if recorded.is_floating_point() else reference
    made = recorded.double()
    nan = int((held.isnan() != made.isnan()).sum())
    both = ~(held.isnan() | made.isnan())
    infinite = int((((held.isinf() | made.isinf()) & (held != made)) & both).sum())
    if infinite:  # the largest number and infinity are neighbours
        limit = constants.INFINITE_SHARE * torch.finfo(recorded.dtype).max
        near = (held.abs() >= limit) & (made.abs() >= limit) & (held.sign() == made.sign())
        infinite = int((((held.isinf() | made.isinf()) & (held != made)) & both & ~near).sum())
    words = [f"{nan} elements are NaN on one side only"] if nan else []
    return "; ".join([*words, *([f"{infinite} are infinite on one side only"] if infinite else [])])
