"""Weights that a program changes between its root calls, as an optimizer does: a sample of each.

A sample is a few values of a weight, spread evenly over it. It tells whether two programs changed
the weight alike, and by how much they did not. It costs as much for a large weight as for a small
one.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
import struct
from typing import NamedTuple, TypeAlias

from llmdebug_nb.core.opened_run import Index

UPDATED = "updated"  # the role of the samples of weights: at first, and after each change
SAMPLES = 32  # values: half of them may miss a change, and it is seen

Step: TypeAlias = tuple[int, int]  # generation and step
Name: TypeAlias = tuple[str, str]  # path of a module, name of its weight


class Sample(NamedTuple):
    """A weight's dtype and shape, as text, and its sampled values."""

    kind: str
    values: tuple[float, ...]

    @property
    def longest(self) -> int:
        """The length of the weight's longest axis."""
        return max(map(int, re.findall(r"\b\d+\b", self.kind)), default=1)

    def error(self, mine: Sample) -> float | None:
        """Return the relative L2 error of mine's sample; None if it is of another weight."""
        if self.kind != mine.kind or len(self.values) != len(mine.values):
            return None
        off = math.dist(self.values, mine.values)
        size = math.hypot(*self.values)
        if off == 0.0:
            return 0.0
        return off / size if size and math.isfinite(off) else math.inf


def sample_of(kind: str, digits: str | None) -> Sample | None:
    """Read a sample of float32 in hexadecimal; None if it is none, as a damaged dump may have."""
    try:
        data = bytes.fromhex(digits or "")
        values = struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error):
        return None
    return Sample(kind, values) if 0 < len(values) <= SAMPLES else None


class History:
    """What the weights of one rank were, by name: step by step, where they had changed.

    Of ranks that were put together and differ, each one's counts.
    """

    def __init__(self, index: Index, rank: int) -> None:
        self.samples: dict[Name, list[tuple[Step, Sample]]] = {}
        for row in index.scalars(role=UPDATED, rank=rank):
            sample = sample_of(row.type, row.value)
            if sample is not None:
                several = self.samples.setdefault((row.path, row.slot), [])
                several.append(((row.generation, row.step), sample))
        for several in self.samples.values():
            several.sort(key=operator.itemgetter(0))

    def at(self, name: Name, step: Step) -> list[Sample]:
        """Return what a weight was in a step, on each rank; nothing if that is not known."""
        several = self._until(name, step)
        return [sample for found, sample in several if found == several[-1][0]]

    def changed(self, name: Name, step: Step) -> bool:
        """Tell whether a weight has changed by a step since it was first seen."""
        several = self._until(name, step)
        return bool(several) and several[0][0] < several[-1][0]

    def latest(self, step: Step) -> Step | None:
        """Return the last step, up to this one, before which a weight changed."""
        every = (self._until(name, step)[-1:] for name in self.samples if self.changed(name, step))
        return max((found for last in every for found, _ in last), default=None)

    def _until(self, name: Name, step: Step) -> list[tuple[Step, Sample]]:
        several = self.samples.get(name, [])
        return several[: bisect.bisect_right(several, step, key=operator.itemgetter(0))]
