"""Propose how a quantised weight becomes the float weight: ``(w - zero) * scale``.

Scales and zeros stand beside the weight: one for all, one for each row or column, or one for each
group of neighbours along either axis. Several integers of 4 bits may be packed into one. The scale
is the *grain* of its elements: how far apart the values are that they can have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from llmdebug_nb.align.fit import Fit, Move, permuted
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.records import Record, Summary

DTYPES = ("int8", "uint8", "int16", "int32")
SCALES, ZEROS = ("scale",), ("zero", "offset", "zp")  # parts of the usual names


def stands_for(stored: Record, weight: Record) -> bool:
    """Tell whether one record may hold the integers of the other, a float weight."""
    a, b = stored.summary, weight.summary
    if a.dtype not in DTYPES or not is_floating(b.dtype) or _is_beside(stored.site.slot):
        return False
    return any(a.numel * count == b.numel for count in constants.PACKED_COUNTS)


def without_scales(shapes: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """Return the shapes of a module's weights, by name, without scales and zeros of a matrix."""
    rest = [shape for name, shape in shapes.items() if not _is_beside(name)]
    return rest if any(len(shape) > 1 for shape in rest) else list(shapes.values())


def _is_beside(name: str) -> bool:
    return any(part in name for part in (*SCALES, *ZEROS))


def fits(
    scale: torch.Tensor, zero: torch.Tensor | None, weight: Summary, numel: int, side: int
) -> Iterator[Fit]:
    """Yield the layouts against a float weight of ``numel`` elements, the plain ones first.

    ``side``: golden's weight is quantised (0) or mine's (1).
    """
    formula = "w * scale" if zero is None else "(w - offset) * scale"
    unpackings: list[tuple[str, Move]] = [("", torch.Tensor.double)]
    packed = numel // max(weight.numel, 1)
    if packed > 1:
        middles = (0, 1 << (constants.PACKED_BITS - 1)) if zero is None else (None,)
        unpackings = [
            (
                f" of {packed} integers each along axis {axis}",
                functools.partial(_unpacking, axis, packed, middle),
            )
            for axis in range(len(weight.shape))
            for middle in middles
        ]
    for packing, unpack in unpackings:
        for turn in (), (permuted((1, 0)),):
            says = f"dequantised: {formula}{packing}{', transposed' if turn else ''}"
            steps = unpack, functools.partial(_scaling, scale, zero), *turn
            grain = functools.partial(_grain, scale, unpack, turn, side)
            yield Fit(says, () if side else steps, steps if side else (), grain=grain)


def _grain(
    scale: torch.Tensor,
    unpack: Move,
    turn: Sequence[Move],
    side: int,
    golden: torch.Tensor,
    mine: torch.Tensor,
) -> torch.Tensor:
    """Return the grain of each element of the float weight, float64 of its shape."""
    shape = unpack((golden, mine)[side]).shape
    grain = _spread(scale, shape).abs().expand(shape)
    for move in turn:
        grain = move(grain)
    return grain


def _scaling(scale: torch.Tensor, zero: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
    offset: torch.Tensor | float = 0.0
    if zero is not None:
        part = [n for n, m in zip(zero.shape, scale.shape, strict=False) if n != m]
        axis = list(zero.shape).index(part[0]) if part and zero.dim() == scale.dim() else None
        whole = zero if axis is None else _unpacked(zero, axis, scale.shape[axis] // part[0])
        offset = _spread(whole, w.shape)
    return (w - offset) * _spread(scale, w.shape)


def _unpacking(axis: int, count: int, middle: int | None, w: torch.Tensor) -> torch.Tensor:
    """Unpack integers that are signed (0), stored from a middle value on, or have a zero (None)."""
    whole = _unpacked(w, axis, count)
    if middle is None:
        return whole
    half = 1 << (constants.PACKED_BITS - 1)
    return whole - middle if middle else (whole + half) % (2 * half) - half


def _unpacked(packed: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """Return ``count`` integers for each one along an axis, the lowest bits first; float64."""
    bits = constants.PACKED_BITS
    pieces = [(packed.long() >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]
    return torch.stack(pieces, axis + 1).flatten(axis, axis + 1).double()


def _spread(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeat the scales of groups over their members; float64 that goes with ``shape``."""
    if x.numel() == 1:
        return x.double().reshape(())
    if x.dim() == 1 and len(shape) == 2 and x.shape[0] == shape[0]:
        x = x.unsqueeze(1)
    if x.dim() == len(shape) == 2 and any(m % n for n, m in zip(x.shape, shape, strict=True)):
        x = x.t()  # groups first, as in [in / group, out]
    for axis in range(x.dim()):
        if x.dim() == len(shape) and 1 < x.shape[axis] < shape[axis]:
            x = x.repeat_interleave(shape[axis] // x.shape[axis], dim=axis)
    return x.double()
