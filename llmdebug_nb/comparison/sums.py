"""The sums that the figures of two tensors are made of, in C where that is possible.

The C kernel (`core/kernels/difference.c`) adds up in NumPy's order, so both give the same bits.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES, SINGLE, is_floating
from llmdebug_nb.core.kernels import difference
from llmdebug_nb.core.kernels.difference import ROW_SUMS, Found, Sums

EPS = SINGLE  # values of golden up to this have no relative error


def of(golden: torch.Tensor, mine: torch.Tensor, unit: str, width: int, chunk: int) -> Found:
    """Return the sums of two flat tensors, and those of each row, None without rows.

    ``unit``: the dtype of ulps and of what counts as infinite. ``width``: of a row, 0 for none.
    ``chunk``: elements that are added up at once, whole rows.
    """
    kernel, huge = difference.kernel(), _huge(unit)
    line = DTYPES[unit] if has_ulp(unit) else None
    found = None
    if kernel is not None:
        found = kernel(golden, mine, line, width, chunk, huge, EPS)
    return found or _by_numpy(golden, mine, line, width, chunk, huge)


def broken_rows(
    golden: torch.Tensor, mine: torch.Tensor, unit: str, width: int, chunk: int
) -> np.ndarray:
    """Return of each row whether one side has NaN or an infinity that the other has not.

    The arguments are those of `of`. Such positions are in no sum.
    """
    huge, found = _huge(unit), [np.empty(0, bool)]
    for g, m in zip(torch.split(golden, chunk), torch.split(mine, chunk), strict=True):
        nan, inf = _broken(g.double().numpy(), m.double().numpy(), huge)
        found.append((nan | inf).reshape(-1, width).any(axis=1))
    return np.concatenate(found)


def _broken(g: np.ndarray, m: np.ndarray, huge: float) -> tuple[np.ndarray, np.ndarray]:
    """Return where one side alone is NaN, and where else an infinity has not its like."""
    a, b = (np.where(np.abs(x) >= huge, np.copysign(math.inf, x), x) for x in (g, m))
    nan = np.isnan(a) ^ np.isnan(b)
    infinite = np.isinf(a) | np.isinf(b)
    return nan, infinite & (a != b) & ~nan


@functools.cache
def _huge(unit: str) -> float:
    """Return from which size on a number of a dtype counts as infinite."""
    largest = torch.finfo(DTYPES[unit]).max if is_floating(unit) else math.inf
    return constants.INFINITE_SHARE * largest


def has_ulp(unit: str) -> bool:
    """Tell whether a dtype is an IEEE floating dtype, whose numbers can be counted."""
    return DTYPES.get(unit) in _ORDERED


def _by_numpy(
    golden: torch.Tensor,
    mine: torch.Tensor,
    unit: torch.dtype | None,
    width: int,
    chunk: int,
    huge: float,
) -> Found:
    running = _Running(huge, width)
    for g, m in zip(torch.split(golden, chunk), torch.split(mine, chunk), strict=True):
        running.add(g.double().numpy(), m.double().numpy(), _ulps(g, m, unit))
    return running.sums(), running.rows()


# floating dtype -> integers of the same size
_ORDERED = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _ulps(g: torch.Tensor, m: torch.Tensor, dtype: torch.dtype | None) -> np.ndarray | None:
    """Return the distance in representable numbers of a dtype, as float64; None for no dtype."""
    if dtype is None:
        return None
    a, b = (_line(x.to(dtype).view(_ORDERED[dtype])) for x in (g, m))
    return np.asarray(np.maximum(a, b) - np.minimum(a, b), dtype=np.float64)


def _line(bits: torch.Tensor) -> np.ndarray:
    """Map IEEE bit patterns to uint64 in the order of their values, -0 and +0 alike."""
    wide = bits.to(torch.int64).numpy()
    low = np.int64(-(1 << (bits.dtype.itemsize * 8 - 1)))  # the sign bit: -0
    middle = np.uint64(1 << 63)
    # a negative pattern is the sign bit plus a magnitude
    return np.where(
        wide < 0, middle - (wide - low).astype(np.uint64), middle + wide.astype(np.uint64)
    )


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sum of products, in one order; BLAS's, ``a @ b``, depends on its threads."""
    return float((a * b).sum())


class _Running:
    """The running sums of one pass, see `Sums`."""

    def __init__(self, huge: float, width: int) -> None:
        self.huge, self.width = huge, width
        self._of_rows: list[np.ndarray] = []
        self.found: dict[str, float | int] = dict(Sums()._asdict())

    def sums(self) -> Sums:
        return Sums(**self.found)  # type: ignore[arg-type]

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self.found[name] += value

    def _most(self, name: str, values: np.ndarray) -> None:
        self.found[name] = max(self.found[name], float(values.max()))

    def add(self, g: np.ndarray, m: np.ndarray, ulp: np.ndarray | None) -> None:
        fine = (np.abs(g) < self.huge) & (np.abs(m) < self.huge)  # False for NaN too
        if self.width:
            self._add_rows(g, m, fine)
        if not fine.all():
            g, m, ulp = self._strike(g, m, ulp, fine)
        if not g.size:
            return
        d = m - g
        even, square = g * d, g * g
        self._add(gd=float(even.sum()), gd_gd=dot(even, even))
        self._add(gg=float(square.sum()), gg_gg=dot(square, square))
        d, size = np.abs(d), np.abs(g)
        self._add(mm=dot(m, m), gm=dot(g, m), dd=dot(d, d))
        self._add(abs_d=float(d.sum()), abs_g=float(size.sum()), abs_m=float(np.abs(m).sum()))
        self._add(finite=g.size, mismatched=int(np.count_nonzero(d)))
        self._most("most", d)
        self._relative(d, size)
        if ulp is not None:
            self._most("most_ulps", ulp)
            self._add(ulps=float(ulp.sum()))

    def _strike(
        self, g: np.ndarray, m: np.ndarray, ulp: np.ndarray | None, fine: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Remove the positions that are not finite on both sides, and count them."""
        nan, inf = (int(found.sum()) for found in _broken(g[~fine], m[~fine], self.huge))
        self._add(nan=nan, inf=inf, mismatched=nan + inf)
        return g[fine], m[fine], None if ulp is None else ulp[fine]  # type: ignore[return-value]

    def _add_rows(self, g: np.ndarray, m: np.ndarray, fine: np.ndarray) -> None:
        """Take the sums of whole rows, without the positions that are not finite."""
        g, d = (
            np.where(fine, x, 0.0).reshape(-1, self.width)
            for x in (g, np.where(fine, m, 0.0) - np.where(fine, g, 0.0))
        )
        gg, gd = g * g, g * d
        self._of_rows.append(np.stack([x.sum(axis=1) for x in (gg, d * d, gd, gg * gg)], 1))

    def rows(self) -> np.ndarray | None:
        if not self.width:
            return None
        return np.concatenate([np.empty((0, ROW_SUMS)), *self._of_rows])

    def _relative(self, d: np.ndarray, size: np.ndarray) -> None:
        sizeable = size > EPS
        if not sizeable.any():
            return
        rel = d[sizeable] / size[sizeable]
        self._most("most_relative", rel)
        self._add(
            relative=float(rel.sum()),
            sizeable=rel.size,
            within_1=int((rel < 1e-3).sum()),
            within_5=int((rel < 5e-3).sum()),
        )
