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


def width(shape: tuple[int, ...]) -> int:
    """Return the elements of a row of a tensor, 0 if all of it is one row."""
    return shape[-1] if len(shape) > 1 else 0


@dataclass(frozen=True, slots=True)
class RowFigures:
    """The figures of golden's rows g and their differences d, each divided by the row's size.

    The size of a row is its norm, or that of the median row, whichever is more: where the terms of
    a row cancel, their rounding does not. ``errors``: |d| of each row, so 1 is
    an error as large as the row. ``error``: their root mean square over the rows that are not zero
    on both sides. ``worst``: the largest. ``scale_error``: the common factor of all, less 1.
    ``scale_t``: the mean of the rows' scale errors in standard errors, 0 for few rows: the errors
    of one token have one origin, so that they may well be even; those of many tokens do not.
    ``carriers``: so many equal elements would carry the norm.
    """

    errors: np.ndarray
    error: float
    worst: float
    scale_error: float
    scale_t: float
    carriers: float


def figures(rows: np.ndarray) -> RowFigures:
    """Return the figures of rows by their sums, float64 [rows, `difference.ROW_SUMS`]."""
    with np.errstate(all="ignore"):
        used = (rows[:, 0] > 0) | ~(rows[:, 1] == 0)
        gg, dd, gd, gg_gg = rows[used].T
        size = np.maximum(gg, np.median(np.sqrt(gg[gg > 0])) ** 2 if gg.any() else 0.0)
        errors = np.zeros(len(rows))
        errors[used] = np.nan_to_num(np.sqrt(dd / size), nan=math.inf)
        scales, weight = gd / size, float((gg / size).sum())
        return RowFigures(
            errors.astype(np.float32),
            float(np.sqrt((errors[used] ** 2).mean())) if used.any() else 0.0,
            float(errors.max(initial=0.0)),
            _over(float(scales.sum()), weight),
            _standard_errors(scales),
            _over(weight**2, float((gg_gg / size**2).sum())),
        )


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
