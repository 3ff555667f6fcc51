"""Reduces tensors to what a picture shows: windows, histograms, scatter plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.show import wire

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
HEADS = 64  # slices in one answer
_PIECE = 1 << 18  # elements that fit into a cache


def number(value: float | int | None) -> wire.Num:
    """Return a figure in a form that JSON has: NaN and infinities become text."""
    if value is None or isinstance(value, int):
        return value
    plain = float(value)  # also of NumPy's subclasses of float
    return plain if math.isfinite(plain) else str(plain)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of any dtype as a float array; complex numbers become magnitudes.

    Raises TensorLookupError: it has more dimensions than NumPy's arrays.
    """
    import torch

    from llmdebug_nb.core.kernels.raw import array_of

    if tensor.is_complex():
        tensor = (tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor).abs()
    if tensor.dtype not in (torch.float32, torch.float64):
        wide = (
            torch.float32
            if tensor.is_floating_point() or tensor.dtype == torch.bool
            else torch.float64
        )
        tensor = tensor.to(wide)
    return array_of(tensor)


def checked_axes(axes: list[int], values: Array) -> list[int]:
    """Return the axes of a plane. Raises TensorLookupError: they are none."""
    if len(axes) != 2 or any(not -1 <= a < values.ndim for a in axes) or (axes[0] == axes[1] != -1):
        raise TensorLookupError(
            f"axes {axes}: expected two different axes of a {values.ndim}-d tensor, or -1"
        )
    return axes


def plane(values: Array, axes: list[int], fixed: list[int]) -> Array:
    """Return the 2-d slice with rows and columns along ``axes``, the other axes at ``fixed``.

    An axis of -1 means a single row or column. An index beyond the end means the last one.
    """
    row, column = axes
    at = [*fixed, *[0] * values.ndim]
    cut = values[
        tuple(
            slice(None) if axis in axes else max(0, min(at[axis], size - 1))
            for axis, size in enumerate(values.shape)
        )
    ]
    if row >= 0 and column >= 0:
        return cut if row < column else cut.T
    return cut.reshape(1, -1) if row < 0 else cut.reshape(-1, 1)


def window(values: Array, y0: int, x0: int, y1: int, x1: int, size: int) -> tuple[wire.View, Array]:
    """Return rows y0..y1 and columns x0..x1 of a 2-d array in at most ``size`` cells per side.

    The cells are float32; values beyond that become infinity. A cell shows its element of largest
    magnitude; a NaN wins.
    """
    rows, cols = values.shape
    y0, x0 = max(0, min(y0, rows)), max(0, min(x0, cols))
    y1, x1 = (min(y1, rows) if y1 > y0 else rows), (min(x1, cols) if x1 > x0 else cols)
    part = values[y0:y1, x0:x1]
    fy, fx = max(1, -(-part.shape[0] // size)), max(1, -(-part.shape[1] // size))
    cells = np.zeros((0, 0), "<f4")
    if part.size:
        with np.errstate(over="ignore"):
            cells = _extremes(part, fy, fx).astype("<f4", copy=False)
    low, high = _range(cells)
    view: wire.View = {
        "h": cells.shape[0], "w": cells.shape[1], "fy": fy, "fx": fx,
        "y0": y0, "x0": x0, "y1": y1, "x1": x1, "rows": rows, "cols": cols, "lo": low, "hi": high,
    }  # fmt: skip
    return view, np.ascontiguousarray(cells)


def _range(cells: Array) -> tuple[wire.Num, wire.Num]:
    """Return the smallest and largest finite values; None if there are none."""
    finite = cells[np.isfinite(cells)]
    return (float(finite.min()), float(finite.max())) if finite.size else (None, None)


def heads(
    values: Array, axis: int, axes: list[int], fixed: list[int], size: int, first: int = 0
) -> tuple[wire.Heads, Array]:
    """Return the slice along ``axes`` at each index of ``axis`` from ``first`` on.

    There are `HEADS` at most; `window` makes each.
    """
    at = [fixed[i] if i < len(fixed) else 0 for i in range(values.ndim)]
    first = max(0, min(first, values.shape[axis]))
    count = min(values.shape[axis] - first, HEADS)
    planes = (
        plane(values, axes, [*at[:axis], head, *at[axis + 1 :]])
        for head in range(first, first + count)
    )
    cells = [window(cut, 0, 0, 0, 0, size)[1] for cut in planes]
    stacked = np.stack(cells) if cells else np.zeros((0, 0, 0), "<f4")
    low, high = _range(stacked)
    view: wire.Heads = {
        "h": stacked.shape[1], "w": stacked.shape[2], "first": first, "count": count,
        "total": values.shape[axis], "lo": low, "hi": high,
    }  # fmt: skip
    return view, stacked


def _extremes(part: Array, fy: int, fx: int) -> Array:
    if fy == fx == 1:
        return part
    high = low = part
    for axis, step in ((0, fy), (1, fx)):  # rows first: they are contiguous, and few remain
        if step > 1:
            high, low = _blocks(np.max, high, axis, step), _blocks(np.min, low, axis, step)
    return np.where(np.abs(high) >= np.abs(low), high, np.where(np.isnan(high), high, low))


def _blocks(pick: Callable[..., Array], values: Array, axis: int, step: int) -> Array:
    """Reduce blocks of ``step`` elements along an axis of a 2-d array; the last may be shorter."""
    whole = values.shape[axis] // step * step
    body, rest = np.split(values, [whole], axis=axis)
    shape = [*values.shape[:axis], whole // step, step, *values.shape[axis + 1 :]]
    picked = pick(body.reshape(shape), axis=axis + 1)  # far faster than ufunc.reduceat
    if not rest.size:
        return picked
    return np.concatenate([picked, pick(rest, axis=axis, keepdims=True)], axis=axis)


def worst(golden: Array, mine: Array, n: int) -> tuple[list[wire.Element], int]:
    """Return the ``n`` elements of largest difference, the worst first, and how many differ.

    NaN on one side is the worst difference; NaN on both sides is none.
    """
    a, b = golden.astype(np.float64).reshape(-1), mine.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        difference = b - a
    size = np.abs(difference)
    size[np.isnan(size)] = np.inf
    size[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    n = min(n, size.size)
    largest = np.argpartition(-size, n - 1)[:n] if n else np.zeros(0, int)
    elements: list[wire.Element] = [
        {
            "index": [int(at) for at in np.unravel_index(i, golden.shape)],
            "golden": number(a[i]),
            "mine": number(b[i]),
            "difference": number(difference[i]),
        }
        for i in largest[np.lexsort((largest, -size[largest]))]
        if size[i]
    ]
    return elements, int(np.count_nonzero(size))


def _bins(values: Array, bins: int) -> tuple[Array, int, tuple[float, float]]:
    """Return the arguments of a histogram, whose bins floats can tell apart."""
    fine = values.astype(np.float64)
    if values.dtype == np.float64:  # the range of all has to be a number too
        most = np.finfo(np.float64).max / 4
        fine = np.clip(fine, -most, most)
    low, high = float(fine.min()), float(fine.max())
    narrowest = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low < narrowest:
        middle = low + (high - low) / 2
        low, high = middle - narrowest / 2, middle + narrowest / 2
    return fine, bins, (low, high)


def histogram(values: Array, bins: int) -> wire.Histogram:
    """Return counts of the finite elements in equal bins, and how many are not finite."""
    flat = values.reshape(-1)
    finite = np.isfinite(flat)
    fine = flat if finite.all() else flat[finite]
    nan = int(np.isnan(flat).sum()) if fine.size < flat.size else 0
    counts, edges = np.zeros(bins, int), np.zeros(2)
    if fine.size:
        counts, edges = np.histogram(*_bins(fine, bins))
    return {
        "lo": number(edges[0]),
        "hi": number(edges[-1]),
        "counts": [int(c) for c in counts],
        "nan": nan,
        "inf": int(flat.size - fine.size - nan),
        "total": int(flat.size),
    }


def _parts(golden: Array, mine: Array) -> Iterator[tuple[Array, Array]]:
    """Yield both arrays, flat, in pieces that fit into a cache."""
    a, b = golden.reshape(-1), mine.reshape(-1)
    for start in range(0, a.size, _PIECE):
        piece = slice(start, start + _PIECE)
        yield a[piece].astype(np.float64), b[piece].astype(np.float64)


def _decades(golden: Array, mine: Array) -> tuple[Array, int, int]:
    """Return log10 of the absolute differences, how many are 0, and how many are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(mine - golden)
    size[(golden == mine) | (np.isnan(golden) & np.isnan(mine))] = 0.0
    fine = np.isfinite(size)
    same = int(np.count_nonzero(size == 0.0))
    return np.log10(size[fine & (size > 0.0)]), same, int(size.size - np.count_nonzero(fine))


def errors(golden: Array, mine: Array, bins: int) -> wire.ErrorHistogram:
    """Return the histogram of absolute differences, on a log scale; ``limit`` stays None."""
    low, high, same, broken = math.inf, -math.inf, 0, 0
    for a, b in _parts(golden, mine):
        decades, equal, wrong = _decades(a, b)
        if decades.size:
            low, high = min(low, float(decades.min())), max(high, float(decades.max()))
        same, broken = same + equal, broken + wrong
    if low > high:
        low = high = 0.0
    high = max(high, low + 1e-6)  # so that a single size has a bin too
    counts = np.zeros(bins, np.int64)
    for a, b in _parts(golden, mine):
        at = ((_decades(a, b)[0] - low) * (bins / (high - low))).astype(np.int64)
        counts += np.bincount(np.minimum(at, bins - 1), minlength=bins)
    return {
        "lo": low,
        "hi": high,
        "counts": [int(count) for count in counts],
        "same": same,
        "broken": broken,
        "total": int(golden.size),
        "limit": None,
    }


def _around(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis from ``low`` to ``high``, with room around a single value.

    Without any value (``low`` > ``high``) it is 0 to 1.
    """
    if low > high:
        return 0.0, 1.0
    room = 0.0 if low < high else max(0.5, abs(low) / 1000)
    most = float(np.finfo(float).max)
    return max(low - room, -most), min(high + room, most)


def scatter(golden: Array, mine: Array, points: int, size: int) -> tuple[wire.Scatter, list[Array]]:
    """Return golden against mine: at most ``points`` elements, else counts per cell.

    The cells are ``size`` by ``size``.
    """
    low, high, fine = math.inf, -math.inf, 0
    for a, b in _parts(golden, mine):
        both = np.isfinite(a) & np.isfinite(b)
        fine += int(np.count_nonzero(both))
        for values in (a[both], b[both]):
            if values.size:
                low, high = min(low, float(values.min())), max(high, float(values.max()))
    low, high = _around(low, high)
    broken = int(golden.size) - fine
    view: wire.Scatter = {"lo": low, "hi": high, "size": 0, "count": fine, "broken": broken}
    if fine <= points:
        a, b = golden.reshape(-1), mine.reshape(-1)
        both = np.isfinite(a) & np.isfinite(b)
        with np.errstate(over="ignore"):
            return view, [a[both].astype("<f4"), b[both].astype("<f4")]
    cells = np.zeros(size * size, np.int64)
    for a, b in _parts(golden, mine):
        both = np.isfinite(a) & np.isfinite(b)
        part = 1.0 if high - low < math.inf else 0.5  # so that the range stays within float64
        reach = high * part - low * part
        x, y = (((v[both] * part - low * part) / reach * size).astype(np.int64) for v in (a, b))
        cells += np.bincount(
            np.minimum(y, size - 1) * size + np.minimum(x, size - 1), minlength=size * size
        )
    return {**view, "size": size}, [np.minimum(cells, 2**32 - 1).astype("<u4")]


def default_axes(shape: tuple[int, ...]) -> list[int]:
    """Return the axes to show first: the last two longer than 1, else the last ones."""
    if not shape:
        return [-1, -1]
    long = [axis for axis, size in enumerate(shape) if size > 1]
    chosen = long[-2:] if len(long) >= 2 else list(range(len(shape)))[-2:]
    return chosen if len(chosen) == 2 else [-1, *chosen]
