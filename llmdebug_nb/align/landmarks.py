"""Find tensors whose values lie in a larger tensor, whatever the layouts, before any is compared.

Heads, tokens, rows and parts of fused tensors may lie anywhere, but neighbours along the last axis
stay neighbours. So a tensor is known by **landmarks**: windows along its last axis around an
element that is the largest in its window. A larger tensor that holds the values has the same
landmarks, wherever they lie. All landmarks are sorted into cells by their norm and two projections,
so that looking one up costs the logarithm of their number.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from llmdebug_nb.core import constants

_K = TypeVar("_K", bound=Hashable)
_L = TypeVar("_L", bound=Hashable)


def landmarks(tensors: Iterable[tuple[_K, np.ndarray]]) -> dict[_K, np.ndarray]:
    """Return the windows of tensors (float32, any shape) around their landmarks, float32[n, 8].

    Tensors are taken together if they have rows of one length: most are small.
    """
    found: dict[_K, np.ndarray] = {}
    waiting: dict[int, dict[_K, np.ndarray]] = defaultdict(dict)  # by the length of their rows
    sizes: Counter[int] = Counter()  # of those that wait
    for key, values in tensors:
        length = values.shape[-1] if values.ndim else 0
        if length < constants.LANDMARK:
            found[key] = np.empty((0, constants.LANDMARK), np.float32)
            continue
        waiting[length][key] = values.reshape(-1, length)
        sizes[length] += values.size
        if sizes.total() >= constants.CHUNK:
            ((most, _),) = sizes.most_common(1)
            found |= _of_rows(waiting.pop(most))
            del sizes[most]
    for alike in waiting.values():
        found |= _of_rows(alike)
    return found


def _of_rows(tensors: Mapping[_K, np.ndarray]) -> dict[_K, np.ndarray]:
    """Return the landmarks of tensors [rows, length] of one length, in each in their order."""
    values = np.concatenate([*tensors.values()])
    size = np.abs(values)
    highest, lowest = _in_windows(np.maximum, size), _in_windows(np.minimum, size)
    middle = constants.LANDMARK // 2
    centre = size[:, middle : middle + highest.shape[1]]
    is_landmark = (centre == highest) & (lowest < highest) & np.isfinite(highest)
    windows = np.lib.stride_tricks.sliding_window_view(values, constants.LANDMARK, axis=1)
    counts = np.count_nonzero(is_landmark, axis=1)
    before = np.concatenate([[0], np.cumsum(counts)])  # each row
    ends = np.cumsum([len(rows) for rows in tensors.values()])
    parts = np.split(windows[is_landmark], before[ends[:-1]])
    return dict(zip(tensors, parts, strict=True))


def _in_windows(most: np.ufunc, rows: np.ndarray) -> np.ndarray:
    """Return the maximum (or minimum) of each window of rows: first of two, then four, eight."""
    width = 1
    while width < constants.LANDMARK:
        rows, width = most(rows[:, :-width], rows[:, width:]), 2 * width
    return rows


class Landmarks(Generic[_K]):
    """The landmarks of the larger tensors, by key. ``tolerance``: relative L2 of equal windows."""

    def __init__(self, large: Mapping[_K, np.ndarray], tolerance: float) -> None:
        self._tolerance = tolerance
        self._keys = list(large)
        counts = [len(windows) for windows in large.values()]
        owners = np.repeat(np.arange(len(counts)), counts)
        windows = np.concatenate([*large.values(), np.empty((0, constants.LANDMARK), np.float32)])
        self._cells = _number(np.floor(_features(windows) / self._cell).astype(np.int64))
        self._owners, self._windows = owners, windows

    @property
    def _cell(self) -> float:
        return self._tolerance * constants.LANDMARK_CELL

    def holders(self, small: Mapping[_L, np.ndarray]) -> Iterator[tuple[_L, list[_K]]]:
        """Yield each of some tensors with the larger ones that have most of its landmarks.

        ``small``: their landmarks. The larger ones come in the order given.
        """
        tried = {name: _tried(windows) for name, windows in small.items()}
        names = [name for name, (windows, _) in tried.items() if len(windows)]
        most = max(1, constants.SCORE_ENTRIES // (constants.LANDMARKS_TRIED * len(self._keys) or 1))
        for at in range(0, len(names), most):
            some = names[at : at + most]
            found = self._found(np.concatenate([tried[name][0] for name in some]))
            ends = np.cumsum([len(tried[name][0]) for name in some])
            for name, counts in zip(some, np.split(found, ends[:-1]), strict=True):
                shares = (counts >= tried[name][1][:, None]).mean(axis=0)
                owners = np.flatnonzero(shares >= constants.LANDMARKS_FOUND)
                yield name, [self._keys[owner] for owner in owners]

    def _found(self, windows: np.ndarray) -> np.ndarray:
        """Return int64[n, tensors]: how often each tensor has each of n windows."""
        size, keys = len(windows), len(self._keys)
        found = np.zeros(size * keys, np.int64)
        corner = np.floor(_features(windows) / self._cell - 0.5).astype(np.int64)
        steps = np.ndindex(*(2,) * corner.shape[1])
        cells = np.concatenate([_number(corner + np.array(step)) for step in steps])
        looked_up = np.zeros(constants.SCORE_ENTRIES, bool)  # most landmarks are in no such cell
        looked_up[_slot(cells)] = True
        order = np.flatnonzero(looked_up[_slot(self._cells)])
        order = order[np.argsort(self._cells[order])]
        first = np.searchsorted(self._cells[order], cells, "left")
        counts = np.searchsorted(self._cells[order], cells, "right") - first
        ends = np.cumsum(counts)
        reach = self._tolerance * _norms(windows)
        total = int(counts.sum())
        for at in range(0, total, constants.CHUNK):
            each = np.arange(at, min(at + constants.CHUNK, total))
            cell = np.searchsorted(ends, each, "right")
            place, row = order[(first + counts - ends)[cell] + each], cell % size
            near = _norms(self._windows[place] - windows[row]) <= reach[row]
            pairs = row[near] * keys + self._owners[place[near]]
            found += np.bincount(pairs, minlength=size * keys)
        return found.reshape(size, keys)


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


def _number(cells: np.ndarray) -> np.ndarray:
    """Return one number for the three numbers of each cell, int64[n]."""
    bits = 1 << 20  # more cells than any axis has: |log norm| < 104, tolerances above 1e-3
    first, second, third = (cells[:, axis] % bits for axis in range(3))
    numbers: np.ndarray = (first * bits + second) * bits + third
    return numbers


def _slot(cells: np.ndarray) -> np.ndarray:
    """Return a place for each cell in a table of SCORE_ENTRIES, int64[n]: other cells share it."""
    mixed = cells ^ (cells >> 20) * 31 ^ (cells >> 40) * 961  # any odd factors mix the numbers
    places: np.ndarray = mixed % constants.SCORE_ENTRIES
    return places
