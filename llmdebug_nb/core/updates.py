"""Weights that a program changes between its root calls, as an optimizer does: a sample of each.

A sample is a few values of a weight, spread evenly over it. It tells whether two programs changed
the weight alike, and by how much they did not. It costs as much for a large weight as for a small
one.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

UPDATED = "updated"  # the role of the samples of weights: at first, and after each change
SAMPLES = 32  # values: half of them may miss a change, and it is seen


class Sample(NamedTuple):
    """A weight's dtype and shape, as text, and its sampled values."""

    kind: str
    values: tuple[float, ...]

    @property
    def text(self) -> str:
        return f"{self.kind} {array('f', self.values).tobytes().hex()}"


def sample_of(text: str | None) -> Sample | None:
    """Read the text of a sample; None if it is none, as a damaged dump may have."""
    kind, _, digits = (text or "").rpartition(" ")
    values = array("f")
    try:
        values.frombytes(bytes.fromhex(digits))
    except ValueError:
        return None
    return Sample(kind, tuple(values)) if 0 < len(values) <= SAMPLES else None


def error(golden: Sample, mine: Sample) -> float | None:
    """Return the relative L2 error of mine's sample; None if the weights can't be compared."""
    if golden.kind != mine.kind or len(golden.values) != len(mine.values):
        return None
    off = math.dist(golden.values, mine.values)
    if off == 0.0:
        return 0.0
    size = math.hypot(*golden.values)
    return off / size if size and math.isfinite(off) else math.inf
