"""Weights that a program changes between its root calls, as an optimizer does: a sample of each.

A sample is a few values of a weight, spread evenly over it. It tells whether two programs changed
the weight alike, and by how much they did not. It costs as much for a large weight as for a small
one.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
import re
import struct
from typing import NamedTuple, TypeAlias

from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.updates import SAMPLES, UPDATED
from llmdebug_nb.store.queries import Index

Step: TypeAlias = tuple[int, int]  # generation and step
Name: TypeAlias = tuple[str, str]  # path of a module, name of its weight


class Sample(NamedTuple):
    """A weight's dtype and shape, as text, and its sampled values."""

    kind: str
    values: tuple[float, ...]

    @property
    def size(self) -> float:
        """The L2 norm of the values, NaN left out."""
        return math.hypot(*(each for each in self.values if not math.isnan(each)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(map(int, re.findall(r"\d+", self.kind.partition(" ")[2])))

    def is_of(self, other: Sample) -> bool:
        """Tell whether another sample has the values of the same places, in whatever dtype."""
        shapes = [each.kind.partition(" ")[2] for each in (self, other)]
        return shapes[0] == shapes[1] and len(self.values) == len(other.values)

    def off(self, other: Sample) -> float:
        """Return the L2 norm of the difference."""
        pairs = [(a, b) for a, b in zip(self.values, other.values, strict=True) if not _same(a, b)]
        if not all(math.isfinite(a - b) for a, b in pairs):
            return math.inf
        return math.hypot(*(a - b for a, b in pairs))

    def distance(self, other: Sample) -> float:
        """Return the same; 0 if rounding to the coarser dtype explains it."""
        off = self.off(other)
        eps = max(epsilon(each.kind.partition(" ")[0]) for each in (self, other))
        return off if off > eps * max(self.size, other.size) else 0.0

    def share(self, first: Sample) -> float:
        """Return the share of values that are no longer what they were at first."""
        if not self.is_of(first):
            return 1.0
        pairs = zip(self.values, first.values, strict=True)
        return sum(not _same(a, b) for a, b in pairs) / len(self.values)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def sample_of(kind: str, digits: str | None) -> Sample | None:
    """Read a sample of float32 in hexadecimal; None if it is none, as a damaged dump may have."""
    try:
        data = bytes.fromhex(digits or "")
        values = struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error):
        return None
    return Sample(kind, values) if 0 < len(values) <= SAMPLES else None


class _Noted(NamedTuple):
    """A sample as it was recorded. ``times``: how often the weight had changed."""

    step: Step
    times: int
    kind: str
    digits: str | None


class History:
    """What the weights of one rank were, by name: step by step, where they had changed.

    Of ranks that were put together and differ, each one's counts.
    """

    def __init__(self, index: Index, rank: int) -> None:
        self._noted: dict[Name, list[_Noted]] = {}
        steps: set[Step] = set()
        for row in index.scalars(role=UPDATED, rank=rank):
            noted = _Noted((row.generation, row.step), row.call, row.type, row.value)
            self._noted.setdefault((row.path, row.slot), []).append(noted)
            if noted.times:
                steps.add(noted.step)
        for several in self._noted.values():
            several.sort(key=operator.itemgetter(0, 1))
        self._changes = sorted(steps)

    @property
    def names(self) -> list[Name]:
        """The weights that were followed."""
        return [*self._noted]

    def at(self, name: Name, step: Step) -> list[Sample]:
        """Return what a weight was in a step, on each rank; nothing if that is not known.

        Of a step with several root calls, before the last one.
        """
        noted = self._noted.get(name, [])
        end = bisect.bisect_right(noted, step, key=operator.attrgetter("step"))
        last = noted[end - 1][:2] if end else None
        start = next((at for at in range(end, 0, -1) if noted[at - 1][:2] != last), 0)
        found = (sample_of(each.kind, each.digits) for each in noted[start:end])
        return [sample for sample in found if sample is not None]

    def began(self, name: Name) -> Sample | None:
        """Return the sample of a weight that nothing had changed yet, if there is one."""
        first = self._noted.get(name, [])[:1]
        return sample_of(first[0].kind, first[0].digits) if first and not first[0].times else None

    def changed(self, name: Name, step: Step) -> bool:
        """Tell whether a weight had changed by a step since it was first seen."""
        noted = self._noted.get(name, [])
        end = bisect.bisect_right(noted, step, key=operator.attrgetter("step"))
        return end > 0 and noted[end - 1].times > 0

    def moved(self, name: Name, step: Step) -> float:
        """Return how far a weight moved behind a step, of its size; 0 if that is not known.

        Of its size before the next step that it was sampled in.
        """
        before = self.at(name, step)
        noted = self._noted.get(name, [])
        at = bisect.bisect_right(noted, step, key=operator.attrgetter("step"))
        after = self.at(name, noted[at].step) if at < len(noted) else []
        if not before or not after or not before[0].is_of(after[0]):
            return 0.0
        return after[0].distance(before[0]) / (after[0].size or 1.0)

    def shared(self, path: str) -> list[Name]:
        """Return the weights of other modules that are weights of this one: always the same.

        A weight that never changed may just look the same.
        """
        own = [self._alike[tuple(self._noted[name])] for name in self._by_path.get(path, ())]
        return [name for names in own for name in names if name[0] != path]

    @functools.cached_property
    def _alike(self) -> dict[tuple[_Noted, ...], list[Name]]:
        found: dict[tuple[_Noted, ...], list[Name]] = {}
        for name, noted in self._noted.items():
            found.setdefault(tuple(noted), []).append(name)
        return found

    @functools.cached_property
    def _by_path(self) -> dict[str, list[Name]]:
        """The weights that ever changed."""
        found: dict[str, list[Name]] = {}
        for name, noted in self._noted.items():
            if noted[-1].times:
                found.setdefault(name[0], []).append(name)
        return found

    def latest(self, step: Step) -> Step | None:
        """Return the last step, up to this one, before which a weight changed."""
        at = bisect.bisect_right(self._changes, step)
        return self._changes[at - 1] if at else None
