"""The sizes of a tensor's rows: the L2 norm and the largest magnitude of each, two float32.

They are kept where values are not, so that no large row hides the others. A row is the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core import constants

OF_ROW = 8  # bytes


def count(shape: Sequence[int]) -> int:
    """Return of how many rows the sizes are kept: 0 of a single row, and of too many."""
    if len(shape) < 2 or min(shape) < 1:
        return 0
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows if 1 < rows <= constants.MOST_ROWS else 0


def are_of(sizes: bytes, shape: Sequence[int]) -> bool:
    """Tell whether these are as many sizes as the rows of a shape have."""
    rows = count(shape)
    return rows > 0 and len(sizes) == rows * OF_ROW
