"""Upstream's standards for one operator, by dtype: which share of the elements must be how near.

Upstream wants *more* than that share, so a bool, whose share is 100 %, can never pass there. Here
the share itself is enough. Upstream also takes an element as right wherever the reference is below
2**-23; here such an element must be as small itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmdebug_nb.comparison.sums import EPS
from llmdebug_nb.core.dtypes import DTYPE_NAMES


@dataclass(frozen=True)
class Standard:
    """``limit``: the largest error of an element, relative unless ``absolute``.

    ``share``: percentage of the elements that must keep it.
    """

    limit: float
    share: float
    absolute: bool = False

    def __str__(self) -> str:
        kind = "absolute" if self.absolute else "relative"
        return f"{kind} error up to {self.limit:g} in {self.share:g} % of the elements"


_FINE, _SMALL = Standard(1e-4, 99.99), Standard(1.0, 99.9, absolute=True)
STANDARDS: dict[str, Standard] = {
    "float32": Standard(2.0**-20, 99.99),
    "float16": Standard(2.0**-10, 99.9),
    "bfloat16": Standard(2.0**-8, 99.9),
    **dict.fromkeys(("float64", "int32", "int64", "uint32", "uint64"), _FINE),
    **dict.fromkeys(("int8", "int16", "uint16"), _SMALL),
    "uint8": Standard(1.0, 99.0, absolute=True),
    "bool": Standard(0.0, 100.0, absolute=True),
}


@dataclass(frozen=True)
class Rates:
    """Percentages of the elements within the standard's limit, by both kinds of error."""

    relative: float
    absolute: float
    max_relative: float
    max_absolute: float

    def meets(self, standard: Standard) -> bool:
        return (self.absolute if standard.absolute else self.relative) >= standard.share


def standard_of(dtype: torch.dtype) -> Standard | None:
    """Return upstream's standard for a dtype, None if it has none."""
    return STANDARDS.get(DTYPE_NAMES.get(dtype, ""))


def rates(reference: torch.Tensor, recorded: torch.Tensor, standard: Standard) -> Rates:
    """Return how many elements keep a limit. Equal elements do, NaN and infinities too.

    ``reference``: float64, of the same shape.
    """
    if not recorded.numel():
        return Rates(100.0, 100.0, 0.0, 0.0)
    g, m = reference.flatten(), recorded.flatten().double()
    same = (g == m) | (g.isnan() & m.isnan())
    difference = torch.where(same, 0.0, (m - g).abs().nan_to_num(nan=torch.inf))
    size = g.abs().nan_to_num(nan=0.0)
    relative = torch.where(same, 0.0, difference / size.clamp_min(EPS))

    def within(errors: torch.Tensor) -> float:
        return 100.0 * float((errors <= standard.limit).double().mean())

    return Rates(
        within(relative), within(difference), float(relative.max()), float(difference.max())
    )
