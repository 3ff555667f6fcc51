"""Tensors made small enough to look at: windows, histograms, pictures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from llmdebug_nb.show import wire

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
HEADS = 64  # pictures of one answer


def number(value: float | int | None) -> wire.Num:
    """Return a figure as JSON can carry it: NaN and infinities as text."""
    if value is None or (isinstance(value, (int, float)) and math.isfinite(value)):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor of any dtype as a real float array; complex numbers by magnitude."""
    import torch

    if tensor.is_complex():
        tensor = (tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor).abs()
    if tensor.dtype not in (torch.float32, torch.float64):
        wide = torch.float32 if tensor.is_floating_point() or tensor.dtype == torch.bool else torch.float64
        tensor = tensor.to(wide)
    return tensor.numpy()


def plane(values: Array, axes: list[int], fixed: list[int]) -> Array:
    """Return the 2-d slice with rows and columns along ``axes`` (-1: one row or column), others at ``fixed``.

    Indices beyond an axis are taken at its end.
    """
    row, column = axes
    index = tuple(
        slice(None) if axis in (row, column) else max(0, min(fixed[axis] if axis < len(fixed) else 0, size - 1))
        for axis, size in enumerate(values.shape)
    )
    cut = values[index]
    if row >= 0 and column >= 0:
        return cut if row < column else cut.T
    return cut.reshape(1, -1) if row < 0 else cut.reshape(-1, 1)


def window(values: Array, y0: int, x0: int, y1: int, x1: int, size: int) -> tuple[wire.View, Array]:
    """Return rows y0..y1 and columns x0..x1 of a 2-d array in at most ``size`` cells a side, as float32.

    A cell shows the element of largest magnitude of those it covers; a NaN wins.
    """
    rows, cols = values.shape
    y0, x0 = max(0, min(y0, rows)), max(0, min(x0, cols))
    y1, x1 = (min(y1, rows) if y1 > y0 else rows), (min(x1, cols) if x1 > x0 else cols)
    part = values[y0:y1, x0:x1]
    fy, fx = max(1, -(-part.shape[0] // size)), max(1, -(-part.shape[1] // size))
    cells = _extremes(part, fy, fx).astype("<f4", copy=False) if part.size else np.zeros((0, 0), "<f4")
    fine = cells[np.isfinite(cells)]
    view: wire.View = {
        "h": cells.shape[0],
        "w": cells.shape[1],
        "fy": fy,
        "fx": fx,
        "y0": y0,
        "x0": x0,
        "y1": y1,
        "x1": x1,
        "rows": rows,
        "cols": cols,
        "lo": number(float(fine.min())) if fine.size else None,
        "hi": number(float(fine.max())) if fine.size else None,
    }
    return view, np.ascontiguousarray(cells)


def heads(
    values: Array, axis: int, axes: list[int], fixed: list[int], size: int, first: int = 0
) -> tuple[wire.Heads, Array]:
    """Return the slice along ``axes`` at each index of ``axis`` from ``first`` on, `HEADS` at most, each as `window` would."""
    at = [fixed[i] if i < len(fixed) else 0 for i in range(values.ndim)]
    first = max(0, min(first, values.shape[axis]))
    count = min(values.shape[axis] - first, HEADS)
    planes = (plane(values, axes, [*at[:axis], head, *at[axis + 1 :]]) for head in range(first, first + count))
    cells = [window(cut, 0, 0, 0, 0, size)[1] for cut in planes]
    stacked = np.stack(cells) if cells else np.zeros((0, 0, 0), "<f4")
    fine = stacked[np.isfinite(stacked)]
    view: wire.Heads = {
        "h": stacked.shape[1],
        "w": stacked.shape[2],
        "first": first,
        "count": count,
        "total": values.shape[axis],
        "lo": number(float(fine.min())) if fine.size else None,
        "hi": number(float(fine.max())) if fine.size else None,
    }
    return view, stacked


def _extremes(part: Array, fy: int, fx: int) -> Array:
    if fy == fx == 1:
        return part
    high = low = part
    for axis, step in ((0, fy), (1, fx)):  # rows first: contiguous, and what is left is small
        if step > 1:
            starts = np.arange(0, part.shape[axis], step)
            high, low = np.maximum.reduceat(high, starts, axis=axis), np.minimum.reduceat(low, starts, axis=axis)
    return np.where(np.abs(high) >= np.abs(low), high, np.where(np.isnan(high), high, low))


def worst(golden: Array, mine: Array, n: int) -> tuple[list[wire.Element], int]:
    """Return the ``n`` elements of largest difference, the worst first, and how many differ at all.

    NaN on one side only is the worst there is; NaN on both is no difference.
    """
    a, b = golden.astype(np.float64).reshape(-1), mine.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        difference = b - a
    size = np.abs(difference)
    size[np.isnan(size)] = np.inf
    size[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    n = min(n, size.size)
    largest = np.argpartition(-size, n - 1)[:n] if n else np.zeros(0, int)
    found = [int(i) for i in largest[np.lexsort((largest, -size[largest]))] if size[i]]
    elements: list[wire.Element] = [
        {
            "index": [int(at) for at in np.unravel_index(i, golden.shape)],
            "golden": number(float(a[i])),
            "mine": number(float(b[i])),
            "difference": number(float(difference[i])),
        }
        for i in found
    ]
    return elements, int(np.count_nonzero(size))


def histogram(values: Array, bins: int) -> wire.Histogram:
    """Return counts of the finite elements in equal bins, and how many are not finite."""
    flat = values.reshape(-1)
    fine = flat[np.isfinite(flat)]
    nan = int(np.isnan(flat).sum())
    counts, edges = np.histogram(fine, bins=bins) if fine.size else (np.zeros(bins, int), np.zeros(2))
    return {
        "lo": number(float(edges[0])),
        "hi": number(float(edges[-1])),
        "counts": [int(c) for c in counts],
        "nan": nan,
        "inf": int(flat.size - fine.size - nan),
        "total": int(flat.size),
    }


def default_axes(shape: tuple[int, ...]) -> list[int]:
    """Return the axes to show first: the last two that are longer than 1, else the last ones there are."""
    if not shape:
        return [-1, -1]
    long = [axis for axis, size in enumerate(shape) if size > 1]
    chosen = long[-2:] if len(long) >= 2 else list(range(len(shape)))[-2:]
    return chosen if len(chosen) == 2 else [-1, *chosen]
