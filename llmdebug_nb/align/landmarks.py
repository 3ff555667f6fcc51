"""Find tensors whose values lie in a larger tensor, whatever the layouts, before any is compared.

Heads, tokens, rows and parts of fused tensors may lie anywhere, but neighbours along the last axis
stay neighbours. So a tensor is known by **landmarks**: windows along its last axis around an
element that is the largest in its window. A larger tensor that holds the values has the same
landmarks, wherever they lie. The landmarks that are looked for are sorted into cells by their norm
and two projections. The larger tensors are read once, and nothing of them is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from llmdebug_nb.core import constants

_K = TypeVar("_K", bound=Hashable)
_L = TypeVar("_L", bound=Hashable)


def landmarks(tensors: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the windows of tensors (float32, any shape) around their landmarks, float32[n, 8].

    They come in their order, in pieces, with the number of the tensor of each, int64[n].
    """
    size = constants.LANDMARK
    flat = np.concatenate([values.ravel() for values in tensors])
    sizes = np.array([values.size for values in tensors])
    lengths = np.array([values.shape[-1] if values.ndim else 1 for values in tensors])
    ends = np.cumsum(sizes)
    for begin in range(0, len(flat) - size + 1, constants.CHUNK):
        piece = flat[begin : begin + constants.CHUNK + size - 1]
        at = _peaks(np.abs(piece))
        owners = np.searchsorted(ends, begin + at, "right")
        column = (begin + at - (ends - sizes)[owners]) % lengths[owners]
        is_row = column <= lengths[owners] - size  # and no end of one row and beginning of the next
        windows = np.lib.stride_tricks.sliding_window_view(piece, size)[at[is_row]]
        highest, lowest = (
            functools.reduce(most, np.abs(windows).T) for most in (np.maximum, np.minimum)
        )
        tells = (lowest < highest) & np.isfinite(highest)
        yield windows[tells], owners[is_row][tells]


def _peaks(size: np.ndarray) -> np.ndarray:
    """Return where windows begin that have their largest element in the middle, int64[n]."""
    highest, width = size, 1  # of each window: first of two elements, then of four, eight
    while width < constants.LANDMARK:
        highest, width = np.maximum(highest[:-width], highest[width:]), 2 * width
    middle = size[constants.LANDMARK // 2 :][: len(highest)]
    return np.flatnonzero(middle == highest)


def _together(
    tensors: Iterable[tuple[_K, np.ndarray]],
) -> Iterator[tuple[list[_K], list[np.ndarray]]]:
    """Yield tensors with their keys, small ones together; without those that have no window."""
    keys: list[_K] = []
    some: list[np.ndarray] = []
    size = 0
    for key, values in tensors:
        if values.size < constants.LANDMARK:
            continue
        keys.append(key)
        some.append(values)
        size += values.size
        if size >= constants.CHUNK:
            yield keys, some
            keys, some, size = [], [], 0
    if some:
        yield keys, some


class Landmarks(Generic[_K]):
    """The landmarks of tensors that are looked for in larger ones, by their keys.

    ``tolerance``: the relative L2 error of equal windows.
    """

    def __init__(self, tensors: Iterable[tuple[_K, np.ndarray]], tolerance: float) -> None:
        tried: dict[_K, tuple[np.ndarray, np.ndarray]] = {}
        for keys, some in _together(tensors):
            windows, owners = map(np.concatenate, zip(*landmarks(some), strict=True))
            parts = np.split(windows, np.searchsorted(owners, np.arange(1, len(keys))))
            tried |= {key: _tried(part) for key, part in zip(keys, parts, strict=True)}
        self.keys = [key for key, (windows, _) in tried.items() if len(windows)]
        counts = [len(tried[key][0]) for key in self.keys]
        self._owners, self._count = np.repeat(np.arange(len(counts)), counts), np.array(counts)
        if self.keys:
            self._copies = np.concatenate([tried[key][1] for key in self.keys])
            self._table = _Table(np.concatenate([tried[key][0] for key in self.keys]), tolerance)

    def holders(self, large: Iterable[tuple[_L, np.ndarray]]) -> Iterator[tuple[_K, _L]]:
        """Yield each tensor with each of some larger ones that has most of its landmarks.

        The larger ones are read in the order given, and only if there is something to look for.
        """
        for keys, tensors in _together(large if self.keys else ()):
            near: list[np.ndarray] = []
            for windows, owners in landmarks(tensors):
                near += [place * len(keys) + owners[at] for place, at in self._table.near(windows)]
            pairs, copies = np.unique(np.concatenate(near), return_counts=True)
            place, owner = np.divmod(pairs, len(keys))
            found = copies >= self._copies[place]
            both = self._owners[place[found]] * len(keys) + owner[found]
            pairs, counts = np.unique(both, return_counts=True)
            small, owner = np.divmod(pairs, len(keys))
            most = counts >= constants.LANDMARKS_FOUND * self._count[small]
            for one, other in zip(small[most].tolist(), owner[most].tolist(), strict=True):
                yield self.keys[one], keys[other]


class _Table:
    """Some windows, by cells of their norm and two projections: what is near lies in few cells."""

    def __init__(self, windows: np.ndarray, tolerance: float) -> None:
        self._windows, self._side = windows, tolerance * constants.LANDMARK_CELL
        self._reach = tolerance * _norms(windows)
        corner = np.floor(_features(windows) / self._side - 0.5).astype(np.int64)
        around = [_slots(corner + step) for step in np.ndindex(2, 2, 2)]
        each = np.unique(np.stack(around) * len(windows) + np.arange(len(windows)))
        slots, self._places = np.divmod(each, len(windows))
        self._begins = np.searchsorted(slots, np.arange(constants.SCORE_ENTRIES + 1))

    def near(self, windows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield which of these are near which of some windows, int64[n] and int64[n], in pieces."""
        slots = _slots(np.floor(_features(windows) / self._side).astype(np.int64))
        first = self._begins[slots]
        counts = self._begins[slots + 1] - first
        all_at = np.repeat(np.arange(len(windows)), counts)
        skipped = first - (np.cumsum(counts) - counts)
        for begin in range(0, max(len(all_at), 1), constants.CHUNK):
            at = all_at[begin : begin + constants.CHUNK]
            place = self._places[np.arange(begin, begin + len(at)) + skipped[at]]
            near = _norms(self._windows[place] - windows[at]) <= self._reach[place]
            yield place[near], at[near]


def _tried(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the landmarks that are looked up, and how often the tensor has each of them."""
    if len(windows) < constants.FEWEST_ELEMENTS:
        return windows[:0], np.zeros(0, np.int64)
    # what repeats heads is no part of what has each of them once
    windows, copies = np.unique(windows, axis=0, return_counts=True)
    some = np.unique(np.linspace(0, len(windows) - 1, constants.LANDMARKS_TRIED).astype(np.int64))
    return windows[some], copies[some]


@functools.cache
def _directions(width: int) -> np.ndarray:
    """Return two directions in which windows are projected, float64[width, 2], of length 1."""
    drawn = np.random.default_rng(0).standard_normal((width, 2))
    directions: np.ndarray = np.linalg.qr(drawn)[0]
    return directions


def _features(windows: np.ndarray) -> np.ndarray:
    """Return float64[n, 3]: each changes by at most the relative L2 change of a window."""
    windows = windows.astype(np.float64)
    norms = _norms(windows)
    along = windows @ _directions(windows.shape[-1])
    return np.column_stack((np.log(norms), along / norms[:, None]))


def _norms(windows: np.ndarray) -> np.ndarray:
    """Return the norms of vectors [..., 8], float64[...]."""
    windows = windows.astype(np.float64, copy=False)
    norms: np.ndarray = np.sqrt(np.einsum("...i,...i", windows, windows))
    return norms


def _slots(cells: np.ndarray) -> np.ndarray:
    """Return a place for each cell [n, 3] in a table of SCORE_ENTRIES: other cells may share it."""
    mixed = cells @ np.array([1_500_450_271, 2_860_486_313, 5_915_587_277])  # any large primes
    places: np.ndarray = (mixed >> 20) % constants.SCORE_ENTRIES
    return places
