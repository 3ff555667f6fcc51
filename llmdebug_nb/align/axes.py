"""Propose how the axes of a tensor may lie in a larger one (or one of equal size), from the shapes.

Axes may be permuted, split in two, and merged. Each axis of the smaller tensor is a whole axis of
the larger one, or a part of it. Axes of size 1 play no role.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llmdebug_nb.core import constants

Shape = tuple[int, ...]
Group = tuple[int, ...]  # axes that are merged into one, in this order


@dataclass(frozen=True, slots=True)
class Part:
    """``share`` elements from ``start`` of each ``size`` along an axis; a block has one group."""

    share: int
    start: int
    size: int

    def at(self, index: np.ndarray) -> np.ndarray:
        """Return the places in the larger axis of places in the smaller one, int64."""
        places: np.ndarray = index // self.share * self.size + self.start + index % self.share
        return places


@dataclass(frozen=True)
class View:
    """Axes that are merged into groups. ``axes``: sizes, after splitting; ``groups``: of axes."""

    axes: Shape
    groups: tuple[Group, ...]

    @cached_property
    def order(self) -> Group:
        return tuple(axis for group in self.groups for axis in group)

    @cached_property
    def sizes(self) -> Shape:
        """The sizes of the groups."""
        return tuple(math.prod(self.axes[a] for a in group) for group in self.groups)

    @cached_property
    def _strides(self) -> Shape:
        return tuple(math.prod(self.axes[axis + 1 :]) for axis in range(len(self.axes)))

    def offsets(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """Return the offsets in the flat tensor of places along each group, int64."""
        total = np.zeros(1, np.int64)
        for group, index in zip(self.groups, places, strict=True):
            for axis in group[:0:-1]:
                index, place = np.divmod(index, self.axes[axis])
                total = total + place * self._strides[axis]
            if group:
                total = total + index * self._strides[group[0]]
        return total

    def places(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Return the places along each group of offsets in the flat tensor, int64."""
        along = [offsets // step % n for step, n in zip(self._strides, self.axes, strict=True)]
        places = []
        for group in self.groups:
            index = np.zeros_like(offsets)
            for axis in group:
                index = index * self.axes[axis] + along[axis]
            places.append(index)
        return places


@dataclass(frozen=True)
class Alignment:
    """The groups of both tensors, one to one. The small one's are as large, or part of them."""

    small: View
    large: View

    @cached_property
    def parts(self) -> Group:
        """The groups of which the small tensor has a part."""
        sizes = zip(self.small.sizes, self.large.sizes, strict=True)
        return tuple(i for i, (a, b) in enumerate(sizes) if a != b)

    def starts(self, group: int) -> np.ndarray:
        """Return where a block of a group may start, int64[n], rising.

        Where the large tensor merges axes, a block is a part of one inner axis or some whole ones:
        the end of one row and the beginning of the next one are no part of anything.
        """
        size, inner = self.small.sizes[group], self._inner(group)
        at = np.arange(self.large.sizes[group] - size + 1)
        is_block = (at % inner + size <= inner) | ((at % inner == 0) & (size % inner == 0))
        found: np.ndarray = at[is_block]
        return found

    def _inner(self, group: int) -> int:
        """Return how many elements of a group each index of its outermost axis has."""
        axes, whole = self.large.groups[group], self.large.sizes[group]
        return whole // self.large.axes[axes[0]] if len(axes) > 1 else whole

    def parts_of(self, group: int) -> list[Part]:
        """Return the regular parts of a group that the small tensor may have.

        A share of each of several parts is at the same places in each row.
        """
        if group not in self._parts_of:
            size, starts = self.small.sizes[group], set(self.starts(group).tolist())
            inner = self._inner(group)
            self._parts_of[group] = [
                part
                for part in parts(size, self.large.sizes[group])
                if (0 in (part.size % inner, inner % part.size) and part.share != size)
                or (part.share == size and part.start in starts)
            ]
        return self._parts_of[group]

    @cached_property
    def _parts_of(self) -> dict[int, list[Part]]:
        return {}

    @cached_property
    def orders(self) -> tuple[Group, Group]:
        """The axes of both in this order, but for those that the small tensor lacks."""
        pairs = zip(self.small.groups, self.large.groups, strict=True)
        return self.small.order, tuple(axis for own, axes in pairs if own for axis in axes)

    @cached_property
    def moved(self) -> bool:
        return any(list(order) != sorted(order) for order in self.orders)

    @property
    def cost(self) -> tuple[int, int, int]:
        """What makes it less simple: parts, then moved axes, then merged axes."""
        views = self.small, self.large
        merged = sum(max(len(group) - 1, 0) for view in views for group in view.groups)
        moved = sum(b < a for order in self.orders for a, b in itertools.pairwise(order))
        return len(self.parts), moved, merged


def alignments(small: Shape, large: Shape, split: bool) -> Iterator[Alignment]:
    """Yield the alignments of two shapes, the simple ones first. ``split``: an axis is split."""
    a, b = (tuple(n for n in shape if n != 1) for shape in (small, large))
    equal = math.prod(a) == math.prod(b)
    if not split:
        yield from _whole(a, b, 0 if equal else constants.PARTIAL_AXES)
        return
    pairs = [(a, shape) for shape in _splits(b, a)] + [(shape, b) for shape in _splits(a, b)]
    for left, right in pairs:
        yield from _whole(left, right, 0 if equal else constants.PARTIAL_AXES_OF_SPLIT)


@functools.lru_cache(maxsize=4096)
def _whole(small: Shape, large: Shape, parts: int) -> tuple[Alignment, ...]:
    """Return the alignments in which no axis is split."""
    found = set()
    for mapped in _matched(tuple(range(len(small))), tuple(range(len(large))), small, large,
                           parts):  # fmt: skip
        pairs = sorted(mapped, key=lambda pair: (pair[0] or (len(small),), pair[1]))
        found.add(Alignment(*(View(axes, tuple(pair[side] for pair in pairs))
                              for side, axes in enumerate((small, large)))))  # fmt: skip
    return tuple(sorted(found, key=lambda x: x.cost))


def _matched(
    left: Group, right: Group, small: Shape, large: Shape, parts: int
) -> Iterator[tuple[tuple[Group, Group], ...]]:
    """Yield pairs of groups that use up all axes; at most ``parts`` pairs differ in size."""
    if not left:
        if not right or parts:
            yield (((), right),) if right else ()
        return
    first, rest = left[0], left[1:]
    choices: list[tuple[Group, Group]] = [((first,), group) for group in _subsets(right)]
    choices += [((first, *more), (axis,)) for more in _subsets(rest) for axis in right]
    for own, other in choices:
        size, whole = math.prod(small[a] for a in own), math.prod(large[a] for a in other)
        if size > whole or (size < whole and not parts):
            continue
        remaining = (
            tuple(a for a in left if a not in own),
            tuple(a for a in right if a not in other),
        )
        for others in _matched(*remaining, small, large, parts - (size < whole)):
            yield ((own, other), *others)


def _subsets(axes: Group) -> Iterator[Group]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _splits(shape: Shape, other: Shape) -> Iterator[Shape]:
    """Yield the shape with one axis split in two, one of them as long as an axis of the other."""
    for place, n in enumerate(shape):
        inner = {k for m in other for k in (m, n // m if n % m == 0 else 0) if k and n % k == 0}
        for k in sorted(inner - {1, n}):
            yield (*shape[:place], n // k, k, *shape[place + 1 :])


def parts(small: int, large: int) -> Iterator[Part]:
    """Yield the regular parts of an axis: equal blocks, the last block, shares of each group."""
    step = math.gcd(small, large)
    starts = range(0, large - small + 1, step)[: constants.BLOCKS]
    for start in dict.fromkeys((*starts, large - small)):
        yield Part(small, start, large)
    for groups in range(2, min(step, constants.GROUPS) + 1):
        if step % groups == 0:
            size, share = large // groups, small // groups
            for start in range(0, size - share + 1, math.gcd(size, share))[: constants.BLOCKS]:
                yield Part(share, start, size)
