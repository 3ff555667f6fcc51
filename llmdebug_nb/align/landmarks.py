"""Find tensors whose values lie in a larger tensor, whatever the layouts, before any is compared.

Heads, tokens, rows and parts of fused tensors may lie anywhere, but neighbours along the last axis
stay neighbours. So a tensor is known by **landmarks**: windows along its last axis around an
element that is the largest in its window. A larger tensor that holds the values has the same
landmarks, wherever they lie. All landmarks are sorted into cells by their norm and two projections,
so that looking one up costs the logarithm of their number.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from llmdebug_nb.core import constants

_K = TypeVar("_K", bound=Hashable)


def landmarks(values: np.ndarray) -> np.ndarray:
    """Return the windows of a tensor (float32, any shape) around its landmarks, float32[n, 8]."""
    length = values.shape[-1] - constants.LANDMARK + 1 if values.ndim else 0
    if length < 1:
        return np.empty((0, constants.LANDMARK), np.float32)
    size = np.abs(values)
    along = [size[..., k : k + length] for k in range(constants.LANDMARK)]
    highest, lowest = functools.reduce(np.maximum, along), functools.reduce(np.minimum, along)
    centre = along[constants.LANDMARK // 2]
    is_landmark = (centre == highest) & (lowest < highest) & np.isfinite(highest)
    windows = np.lib.stride_tricks.sliding_window_view(values, constants.LANDMARK, axis=-1)
    found: np.ndarray = windows[is_landmark]
    return found


class Landmarks(Generic[_K]):
    """The landmarks of the larger tensors, by key. ``tolerance``: relative L2 of equal windows."""

    def __init__(self, large: Mapping[_K, np.ndarray], tolerance: float) -> None:
        self._tolerance = tolerance
        self._keys = list(large)
        counts = [len(windows) for windows in large.values()]
        owners = np.repeat(np.arange(len(counts)), counts)
        windows = np.concatenate([*large.values(), np.empty((0, constants.LANDMARK), np.float32)])
        cells = _number(np.floor(_features(windows) / self._cell).astype(np.int64))
        order = np.argsort(cells, kind="stable")
        self._cells, self._owners, self._windows = cells[order], owners[order], windows[order]

    @property
    def _cell(self) -> float:
        return self._tolerance * constants.LANDMARK_CELL

    def holders(self, windows: np.ndarray) -> Iterator[_K]:
        """Yield the keys of the tensors with most of these landmarks, in the order given."""
        if len(windows) < constants.FEWEST_ELEMENTS:
            return
        # what repeats heads is no part of what has each of them once
        windows, copies = np.unique(windows, axis=0, return_counts=True)
        some = np.unique(
            np.linspace(0, len(windows) - 1, constants.LANDMARKS_TRIED).astype(np.int64)
        )
        shares = (self._found(windows[some]) >= copies[some, None]).mean(axis=0)
        for owner in np.flatnonzero(shares >= constants.LANDMARKS_FOUND):
            yield self._keys[owner]

    def _found(self, windows: np.ndarray) -> np.ndarray:
        """Return int64[n, tensors]: how often each tensor has each of n windows."""
        size, keys = len(windows), len(self._keys)
        found = np.zeros(size * keys, np.int64)
        corner = np.floor(_features(windows) / self._cell - 0.5).astype(np.int64)
        steps = np.ndindex(*(2,) * corner.shape[1])
        cells = np.concatenate([_number(corner + np.array(step)) for step in steps])
        first = np.searchsorted(self._cells, cells, "left")
        counts = np.searchsorted(self._cells, cells, "right") - first
        ends = np.cumsum(counts)
        reach = self._tolerance * _norms(windows)
        for at in range(0, int(ends[-1]), constants.CHUNK):
            each = np.arange(at, min(at + constants.CHUNK, int(ends[-1])))
            cell = np.searchsorted(ends, each, "right")
            place, row = (first + counts - ends)[cell] + each, cell % size
            near = _norms(self._windows[place] - windows[row]) <= reach[row]
            pairs = row[near] * keys + self._owners[place[near]]
            found += np.bincount(pairs, minlength=size * keys)
        return found.reshape(size, keys)


@functools.cache
def _directions(width: int) -> np.ndarray:
    """Return two directions in which windows are projected, float64[width, 2], of length 1."""
    drawn = np.random.default_rng(0).standard_normal((width, 2))
    directions: np.ndarray = np.linalg.qr(drawn)[0]
    return directions


def _features(windows: np.ndarray) -> np.ndarray:
    """Return float64[n, 3]: each changes by at most the relative L2 change of a window."""
    norms = _norms(windows)
    return np.column_stack(
        (np.log(norms), (windows @ _directions(windows.shape[-1])) / norms[:, None])
    )


def _norms(windows: np.ndarray) -> np.ndarray:
    """Return the norms of vectors [..., 8], float64[...]."""
    norms: np.ndarray = np.linalg.norm(windows.astype(np.float64), axis=-1)
    return norms


def _number(cells: np.ndarray) -> np.ndarray:
    """Return one number for the three numbers of each cell, int64[n]."""
    bits = 1 << 20  # more cells than any axis has: |log norm| < 104, tolerances above 1e-3
    first, second, third = (cells[:, axis] % bits for axis in range(3))
    numbers: np.ndarray = (first * bits + second) * bits + third
    return numbers
