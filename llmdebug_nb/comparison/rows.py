"""The figures of two tensors, row by row: each row is divided by its own size first.

A row is what belongs to one token, or to one channel of a weight: the last axis. In a trained model
a few rows, that of the first token above all, are thousands of times as large as the others. Over
all elements they alone would be the norm, and hide each error elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmdebug_nb.core import constants

_FLOAT = np.dtype("<f4")


def width(shape: tuple[int, ...]) -> int:
    """Return the elements of a row of a tensor, 0 if all of it is one row."""
    return shape[-1] if len(shape) > 1 else 0


@dataclass(frozen=True, slots=True)
class RowFigures:
    """The figures of golden's rows g and their differences d, each divided by the row's size.

    The size of a row is its norm, or that of the median row, whichever is more: where the terms of
    a row cancel, their rounding does not. ``error``: the L2 norm of all d over that of all g, so
    that a factor shows as it is. ``worst``: the largest |d| of a row, so 1 is an error as large as
    the row. ``scale_error``: the common factor of all, less 1.
    ``scale_t``: the mean of the rows' scale errors in standard errors, 0 for few rows: the errors
    of one token have one origin, so that they may well be even; those of many tokens do not.
    ``carriers``: so many equal elements would carry the norm. ``squares``: of each row |d|^2, 0
    where it is zero on both sides.
    """

    error: float
    worst: float
    scale_error: float
    scale_t: float
    carriers: float
    squares: np.ndarray


def figures(rows: np.ndarray) -> RowFigures:
    """Return the figures of rows by their sums, float64 [rows, `difference.ROW_SUMS`]."""
    used = (rows[:, 0] > 0) | ~(rows[:, 1] == 0)  # not zero on both sides
    squares = np.zeros(len(rows))
    with np.errstate(all="ignore"):
        gg, dd, gd, gg_gg = rows[used].T
        known = gg[gg > 0]
        size = np.maximum(gg, np.median(np.sqrt(known)) ** 2 if len(known) else 0.0)
        squares[used] = errors = np.nan_to_num(dd / size, nan=math.inf, posinf=math.inf)
        scales, weight = gd / size, float((known / size[gg > 0]).sum())
        return RowFigures(
            math.sqrt(_over(float(errors.sum()), weight)),
            math.sqrt(float(errors.max(initial=0.0))),
            _over(float(scales.sum()), weight),
            _standard_errors(scales),
            _over(weight**2, float((gg_gg / size**2).sum())),
            squares,
        )


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The errors of a tensor's rows, in little space: of each index of an axis, the largest.

    ``axes``: the sizes of all axes but the last. ``errors``: for each of them float32, one for an
    index, or for a block of indices, as there are `constants.TOLD_ROWS` of them at most; none for
    an axis of one index.
    """

    axes: tuple[int, ...]
    errors: tuple[bytes, ...]

    def along(self, axis: int) -> np.ndarray:
        """Return the largest error at each index, or in each block, of an axis."""
        return np.frombuffer(self.errors[axis], _FLOAT)

    def block(self, axis: int) -> int:
        """Return how many indices of an axis have one error."""
        return _block(self.axes[axis])


def folded(errors: np.ndarray, axes: tuple[int, ...]) -> RowErrors:
    """Return the errors of rows, which lie along some axes, as those of the indices."""
    with np.errstate(all="ignore"):
        short = errors.astype(_FLOAT)
    short[(short == 0) & (errors > 0)] = np.finfo(_FLOAT).tiny  # an error is not lost
    long = [axis for axis, size in enumerate(axes) if size > 1]
    grid, found = short.reshape([axes[axis] for axis in long]), [b""] * len(axes)
    for at, axis in enumerate(long):
        largest = grid.max(tuple(other for other in range(len(long)) if other != at))
        found[axis] = _in_blocks(largest).tobytes()
    return RowErrors(axes, tuple(found))


def _block(size: int) -> int:
    return -(-size // constants.TOLD_ROWS) or 1


def _in_blocks(errors: np.ndarray) -> np.ndarray:
    block = _block(len(errors))
    if block == 1:
        return errors
    return np.maximum.reduceat(errors, np.arange(0, len(errors), block))


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """What the sizes of rows tell of their errors, each divided by golden's as in `RowFigures`.

    ``error``: at most what is judged of values. A norm changes by a draw of the row's error, and so
    does a magnitude; the largest of n normal draws is sqrt(2 ln n).
    ``size``: the root of the sum of the squares of golden's sizes. By Cauchy's inequality, the
    difference of the means over ``size`` / sqrt(elements) is at most the rows' root mean square.
    """

    error: float
    size: float


Sizes = tuple[np.ndarray, np.ndarray]  # norms and largest magnitudes


def size_figures(golden: Sizes, mine: Sizes) -> SizeFigures:
    """Return the figures of the sizes of two tensors' rows."""
    norms, size = _size_errors(golden[0], mine[0])
    largest, _ = _size_errors(golden[1], mine[1])
    norms, largest = _used(norms, golden[0], mine[0]), _used(largest, golden[1], mine[1])
    chance = max(1.0, math.sqrt(2 * math.log(len(norms))))
    error = max(
        _root_mean_square(norms),
        float(norms.max()) / (constants.WORST_ROW * chance),
        _root_mean_square(largest) / (1 + constants.CARRIER_ERRORS),
    )
    return SizeFigures(error, float(np.sqrt((size**2).sum())))


def errors_by_size(golden: Sizes, mine: Sizes, axes: tuple[int, ...]) -> RowErrors:
    """Return what the sizes of rows, which lie along some axes, tell of the errors of each.

    It is little: a row that is turned keeps its size.
    """
    norms, _ = _size_errors(golden[0], mine[0])
    largest, _ = _size_errors(golden[1], mine[1])
    return folded(np.maximum(norms, largest / (1 + constants.CARRIER_ERRORS)), axes)


def _size_errors(golden: np.ndarray, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors of rows, and golden's sizes of them.

    NaN agrees with NaN. Golden's sizes that are not finite count as the median one.
    """
    finite = np.isfinite(golden)
    known = golden[finite & (golden > 0)]
    size = np.maximum(np.where(finite, golden, 0.0), np.median(known) if len(known) else 0.0)
    same = (golden == mine) | (np.isnan(golden) & np.isnan(mine))
    with np.errstate(all="ignore"):
        errors = np.where(same, 0.0, np.abs(mine - golden) / size)
    errors[np.isnan(errors)] = math.inf
    return errors, size


def _used(errors: np.ndarray, golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return the errors of rows that are not zero on both sides; 0 for none."""
    used = (golden != 0) | (mine != 0)
    return errors[used] if used.any() else np.zeros(1)


def _root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt((errors**2).mean()))


def _standard_errors(scales: np.ndarray) -> float:
    """Return the mean of some numbers in standard errors of it, 0 for few of them."""
    if len(scales) <= constants.FEW_ROWS:
        return 0.0
    spread = float(scales.std(ddof=1))
    return abs(_over(float(scales.mean()), spread / math.sqrt(len(scales))))


def _over(part: float, whole: float) -> float:
    """Return a quotient; 0 / 0 is 0, and anything else over 0 is inf."""
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.copysign(math.inf, part)
