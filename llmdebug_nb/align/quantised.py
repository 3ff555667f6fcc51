"""Propose how a quantised weight becomes the float weight: ``(w - zero) * scale``.

Scales and zeros stand beside the weight: one for all, one for each row or column, or one for each
group of neighbours along either axis. Several integers may be packed into one, and packers order
them in their own ways. Which of these readings is right, the float weight's values decide. The
*grain* of an element is how far apart the values are that it can have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from llmdebug_nb.align.fit import Fit
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES as ALL_DTYPES
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.records import Record, Summary

INTEGERS = ("int8", "uint8", "int16", "int32")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES = (*INTEGERS, *FLOATS)
SCALES, ZEROS = ("scale",), ("zero", "offset", "zp")  # parts of the usual names
Order = tuple[int, ...]  # the element that each place in a packed integer holds, the lowest first


def stands_for(stored: Record, weight: Record) -> bool:
    """Tell whether one record may hold the steps of the other, a float weight."""
    a, b = stored.summary, weight.summary
    is_float = is_floating(b.dtype) and b.dtype not in DTYPES
    if a.dtype not in DTYPES or not is_float or _is_beside(stored.site.slot):
        return False
    return _count(a, b) > 0


def without_scales(shapes: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """Return the shapes of a module's weights, by name, without scales and zeros of a matrix."""
    rest = [shape for name, shape in shapes.items() if not _is_beside(name)]
    return rest if any(len(shape) > 1 for shape in rest) else list(shapes.values())


def is_scale(name: str) -> bool:
    return any(part in name for part in SCALES)


def _is_beside(name: str) -> bool:
    return is_scale(name) or any(part in name for part in ZEROS)


def _count(stored: Summary, weight: Summary) -> int:
    """Return how many elements of the weight each one that is stored holds; 0 for no such number.

    As many as leave each one two bits or more.
    """
    count, rest = divmod(weight.numel, stored.numel or 1)
    if rest or not stored.numel:
        return 0
    if count > 1 and (stored.dtype in FLOATS or len(stored.shape) != len(weight.shape)):
        return 0
    bits = ALL_DTYPES[stored.dtype].itemsize * 8
    return count if count & (count - 1) == 0 and 2 * count <= bits else 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a stored weight.

    ``count``, ``axis``, ``order``: how many elements are packed into one, along which axis and in
    which order. ``middle``: what stands for 0; None if a zero is given. ``plus``: what is added to
    that. ``by_column``: one scale each is a column's. ``groups``: of each column of the stored
    matrix, its group, int64; None if neighbours are in one. ``turned``: it is stored transposed.
    ``flat``: groups have an axis of their own there.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None
    count: int = 1
    axis: int = 0
    order: Order = (0,)
    middle: int | None = 0
    plus: int = 0
    by_column: bool = False
    groups: torch.Tensor | None = None
    turned: bool = False
    flat: bool = False

    @property
    def says(self) -> str:
        zero = "w" if self.zero is None else f"(w - offset{f' - {self.plus}' * (self.plus > 0)})"
        packing = f" of {self.count} integers each along axis {self.axis}" * (self.count > 1)
        plain = self.order == tuple(range(self.count))
        how = "" if plain else ", the highest first" if self.order[0] else ", interleaved"
        return f"dequantised: {zero} * scale{packing}{how}{', transposed' * self.turned}"

    def floats(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the float weight, float64."""
        w = self._unpacked(stored)
        if self.zero is not None:
            w = w - self._spread(self._zeros(), w.shape)
        elif self.count > 1 and not self.middle:  # they have signs
            half = 1 << (_bits(stored, self.count) - 1)
            w = (w + half) % (2 * half) - half
        else:
            w = w - (self.middle or 0)
        return self._laid(w * self._spread(self.scale, w.shape))

    def grain(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the grain of each element of the float weight, float64."""
        w = self._unpacked(stored)
        steps = torch.ones(())
        if stored.is_floating_point():
            steps = _spacing(stored.flatten(1) if self.flat else stored)
        grain = self._spread(self.scale, w.shape).abs() * steps.double()
        return self._laid(grain.expand(w.shape))

    def _unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        return _unpacked(stored.flatten(1) if self.flat else stored, self.axis, self.order)

    def _laid(self, w: torch.Tensor) -> torch.Tensor:
        return w.t() if self.turned else w

    def _zeros(self) -> torch.Tensor:
        """Return one zero for each scale; some packers store zero - 1, in as many bits."""
        assert self.zero is not None
        zero, shape = self.zero, self.scale.shape
        count = shape.numel() // max(zero.numel(), 1)
        if count == len(self.order) > 1 and zero.dim() == len(shape):
            axis = next(i for i, n in enumerate(zero.shape) if n != shape[i])
            unpacked = _unpacked(zero, axis, self.order) + self.plus
            return unpacked % (1 << _bits(zero, count))
        return zero.double() + self.plus

    def _spread(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Repeat the numbers of groups over their members; float64 that goes with ``shape``."""
        if x.numel() == 1:
            return x.double().reshape(())
        if x.dim() == 1 and len(shape) == 2:
            x = x.unsqueeze(0) if self.by_column or x.shape[0] != shape[0] else x.unsqueeze(1)
        if x.dim() == len(shape) == 2 and any(m % n for n, m in zip(x.shape, shape, strict=True)):
            x = x.t()  # groups first, as in [in / group, out]
        if self.groups is not None and x.dim() == 2:
            axis = list(shape).index(len(self.groups))
            return x.index_select(axis, self.groups).double()
        for axis in range(x.dim()):
            if x.dim() == len(shape) and 1 < x.shape[axis] < shape[axis]:
                x = x.repeat_interleave(shape[axis] // x.shape[axis], dim=axis)
        return x.double()


def fits(
    stored: torch.Tensor,
    floats: torch.Tensor,
    beside: Sequence[tuple[str, torch.Tensor]],
    side: int,
) -> Iterator[Fit]:
    """Yield the layouts of a stored weight against the float one, the plain ones first.

    ``beside``: the other weights of its module, with their names, those first that are called most
    alike. ``side``: golden's weight is quantised (0) or mine's (1). ``floats``: the float one.
    """
    if stored.dim() == floats.dim() == 1 and not stored.is_floating_point():
        beside = [*beside, *_with_input_scales(stored, floats, beside)]
    flat = stored.dim() == floats.dim() + 1 and stored.flatten(1).shape == floats.shape
    if flat:
        beside = [(n, x.flatten(1) if x.dim() == stored.dim() else x) for n, x in beside]
        stored = stored.flatten(1)
    for scale, zeros in _beside(beside):
        own = [zero for zero in zeros if _goes_with(zero, scale)]
        for reading in _readings(stored, tuple(floats.shape), scale, own, beside):
            move = (functools.partial(_floats, replace(reading, flat=flat)),)
            grain = functools.partial(_grain, replace(reading, flat=flat), side)
            yield Fit(reading.says, () if side else move, move if side else (), grain=grain)


def _beside(
    beside: Sequence[tuple[str, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield the scales that a weight may have, each with the zeros that may go with it.

    Names tell; without any that does, each tensor of floats may be a scale, and each other one of
    its size a zero, or none.
    """
    named = [x for name, x in beside if is_scale(name) and x.is_floating_point()]
    zeros = [x for name, x in beside if not is_scale(name) and _is_beside(name)]
    yield from ((scale, zeros) for scale in named)
    if named:
        return
    for name, scale in beside:
        if not scale.is_floating_point() or _is_beside(name):
            continue
        yield scale, zeros
        others = [x for _, x in beside if x is not scale and x.shape == scale.shape]
        if others and not zeros:
            yield scale, others


def _with_input_scales(
    stored: torch.Tensor, floats: torch.Tensor, beside: Sequence[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the scales of a bias: those of the weight times the input's, which is not known here.

    By least squares: it is one number.
    """
    for name, scale in beside:
        if is_scale(name) and scale.is_floating_point() and scale.numel() in (1, stored.numel()):
            steps = stored.double() * scale.double().reshape(-1)
            square = float((steps * steps).sum())
            if square:
                yield name, scale.double().reshape(-1) * float((floats * steps).sum()) / square


def _readings(
    stored: torch.Tensor,
    shape: tuple[int, ...],
    scale: torch.Tensor,
    zeros: Sequence[torch.Tensor],
    beside: Sequence[tuple[str, torch.Tensor]],
) -> Iterator[Reading]:
    """Yield the readings that give a weight of a shape."""
    count = shape_size // stored.numel() if (shape_size := torch.Size(shape).numel()) else 0
    for axis in range(stored.dim()) if count > 1 else (0,):
        unpacked = list(stored.shape)
        if unpacked:
            unpacked[axis] *= count
        turns = [False] * (tuple(unpacked) == shape)
        turns += [True] * (len(shape) == 2 and tuple(unpacked[::-1]) == shape)
        both = scale.dim() == 1 and scale.numel() > 1 and len(set(unpacked)) == 1 < len(unpacked)
        plain = Reading(scale, None, count, axis)
        for turned in turns:
            for order in _orders(count):
                for by_column in (False, True) if both else (False,):
                    one = replace(plain, turned=turned, order=order, by_column=by_column)
                    yield from _with_groups(one, stored, unpacked, zeros, beside)


def _with_groups(
    one: Reading,
    stored: torch.Tensor,
    shape: Sequence[int],
    zeros: Sequence[torch.Tensor],
    beside: Sequence[tuple[str, torch.Tensor]],
) -> Iterator[Reading]:
    """Yield a reading with each zero that it may have. ``shape``: of the stored weight."""
    found = [one] if not zeros else []
    if zeros:
        pluses = (0, 1) if one.count > 1 else (0,)
        found = [replace(one, zero=z, middle=None, plus=plus) for z in zeros for plus in pluses]
    elif stored.dtype in (torch.uint8, torch.int32) or one.count > 1:
        found.append(replace(one, middle=_middle(stored, one.count)))
    groups = next(filter(None, (_groups(x, one.scale, shape) for _, x in beside)), None)
    for reading in found:
        yield reading if groups is None else replace(reading, groups=groups[0])


def _groups(
    x: torch.Tensor, scale: torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor] | None:
    """Return the group of each column or row, if that is what a tensor holds."""
    is_index = x.dim() == 1 and not x.is_floating_point() and scale.dim() == len(shape) == 2
    if not is_index or len(x) not in shape or not len(x):
        return None
    return (x.long(),) if int(x.min()) >= 0 and int(x.max()) + 1 in scale.shape else None


def _middle(stored: torch.Tensor, count: int) -> int:
    """Return what stands for 0 in integers without signs."""
    if count > 1:
        return 1 << (_bits(stored, count) - 1)
    most = int(stored.max()) if stored.numel() else 0
    return 1 << max(most.bit_length() - 1, 0)


def _goes_with(zero: torch.Tensor, scale: torch.Tensor) -> bool:
    """Tell whether there is a zero for each scale, be it packed."""
    count, rest = divmod(scale.numel(), zero.numel() or 1)
    return zero.numel() == 1 or (not rest and count & (count - 1) == 0)


def _orders(count: int) -> list[Order]:
    plain = tuple(range(count))
    found = [plain, plain[::-1]] if count > 1 else [plain]
    interleaved = constants.INTERLEAVED
    return [*found, interleaved] if count == len(interleaved) else found


def _floats(reading: Reading, stored: torch.Tensor) -> torch.Tensor:
    return reading.floats(stored)


def _grain(reading: Reading, side: int, golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    return reading.grain((golden, mine)[side])


def _bits(packed: torch.Tensor, count: int) -> int:
    return packed.element_size() * 8 // count


def _unpacked(packed: torch.Tensor, axis: int, order: Order) -> torch.Tensor:
    """Return the integers that each one holds, along an axis; float64."""
    if len(order) == 1:
        return packed.double()
    bits, pieces = _bits(packed, len(order)), [packed] * len(order)
    for place, element in enumerate(order):
        pieces[element] = (packed.long() >> (bits * place)) & ((1 << bits) - 1)
    return torch.stack(pieces, axis + 1).flatten(axis, axis + 1).double()


def _spacing(x: torch.Tensor) -> torch.Tensor:
    """Return how far apart the numbers of a dtype are at each element."""
    of = torch.finfo(x.dtype)
    size = x.float().abs().clamp(min=of.smallest_normal)
    return torch.exp2(size.log2().floor()) * of.eps
