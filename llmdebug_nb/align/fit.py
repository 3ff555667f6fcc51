"""Bringing two tensors with the same values in different layouts to one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.raw import to_bytes

# a function of a module, with arguments (`partial`): another process gets it by name
Move = Callable[[torch.Tensor], torch.Tensor]


def _key(what: object) -> Hashable:
    """Return what equal steps have in common: a function's name, and its arguments' values."""
    if isinstance(what, partial):
        keywords = sorted((name, _key(value)) for name, value in what.keywords.items())
        return what.func, tuple(map(_key, what.args)), tuple(keywords)
    if isinstance(what, torch.Tensor):
        return tuple(what.shape), what.dtype, fingerprint(to_bytes(what))
    if isinstance(what, (list, tuple)):
        return tuple(map(_key, what))
    if is_dataclass(what) and not isinstance(what, type):
        return type(what), tuple(_key(getattr(what, each.name)) for each in fields(what))
    return what if isinstance(what, Hashable) else object()  # equal to nothing


@dataclass(frozen=True, slots=True)
class Fit:
    """The steps that bring two tensors to one shape.

    ``says``: the layout in words, for the report. ``golden``, ``mine``: the steps for each side,
    in order. ``whole``: every element of both takes part, so statistics can still be compared.
    ``shared``: what takes no part are rows and tokens that the other run was not given.
    ``certainty``: the probability that the layout is right; 1 if the values confirm it. ``grain``:
    of both tensors as they are, makes the distance of the values that each element of a quantised
    weight or activation can have. ``integers``: the side whose activation it is that is quantised,
    golden's (0) or mine's (1); None for a weight. ``computes``: it multiplies, and so rounds.
    """

    says: str
    golden: tuple[Move, ...] = ()
    mine: tuple[Move, ...] = ()
    whole: bool = False
    certainty: float = 1.0
    grain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    shared: bool = False
    integers: int | None = None
    computes: bool = False

    @property
    def key(self) -> Hashable:
        """What it does, the same for all fits that do the same steps."""
        grain = None if self.grain is None else _key(self.grain)
        sides = tuple(tuple(map(_key, moves)) for moves in (self.golden, self.mine))
        return sides, self.whole, grain, self.shared, self.integers

    def then(self, other: Fit) -> Fit:
        """Return the fit that does another one after this one."""
        says = "; ".join(filter(None, (self.says, other.says)))
        steps = (*self.golden, *other.golden), (*self.mine, *other.mine)
        whole = self.whole and other.whole
        shared = self.shared and (other.shared or other.whole)
        certainty = min(self.certainty, other.certainty)
        return Fit(says, *steps, whole, certainty, shared=shared)

    def places(self, side: int, shape: Sequence[int]) -> torch.Tensor | None:
        """Return which elements of golden's (0) or mine's (1) tensor take part; None for all.

        They are flat indices, int64[n], of those that both runs have.
        """
        if self.whole or self.shared or self.grain is not None:
            return None
        size = math.prod(shape)
        places = torch.arange(size).reshape(tuple(shape))
        for move in (self.golden, self.mine)[side]:
            places = move(places)
        return places.flatten() if places.numel() < size else None

    def keeps_order(self, golden: Sequence[int], mine: Sequence[int]) -> bool:
        """Tell whether elements that follow each other along an axis of one do so in the other.

        ``golden``, ``mine``: shapes. True if that can't be told, as for values that are computed.
        """
        if 0 in map(math.prod, (golden, mine)):
            return True
        numbers = [torch.arange(math.prod(shape)).reshape(tuple(shape)) for shape in (golden, mine)]
        try:
            own, other = (x.flatten() for x in self(numbers[0], numbers[1]))
        except (ValueError, RuntimeError):
            return True
        if own.is_floating_point() or other.is_floating_point() or own.shape != other.shape:
            return True
        for places, partners, shape in ((own, other, golden), (other, own, mine)):
            found = torch.full((math.prod(shape),), -1)
            found[places] = partners
            for axis in range(len(shape)):
                line = found.reshape(tuple(shape)).movedim(axis, 0).reshape(shape[axis], -1)
                steps = line[1:] - line[:-1]
                if bool(((steps < 0) & (line[1:] >= 0) & (line[:-1] >= 0)).any()):
                    return False
        return True

    def __call__(
        self, golden: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors, of equal shapes if the layout is right.

        Raises:
            ValueError: the values that were read have another shape than the record says.
        """
        try:
            for move in self.golden:
                golden = move(golden)
            for move in self.mine:
                mine = move(mine)
        except (RuntimeError, IndexError) as error:
            shapes = f"{list(golden.shape)} and {list(mine.shape)}"
            raise ValueError(f"{self.says}: does not fit shapes {shapes} ({error})") from None
        return golden, mine


def end_of_longer(golden: torch.Tensor, mine: torch.Tensor) -> Fit | None:
    """Return the fit of a tensor that is the begin, or the end, of one which is longer on one axis.

    Only of one that tells nothing of its place: it is constant, or has few elements.
    """
    turned = golden.numel() < mine.numel()
    few, many = (golden, mine) if turned else (mine, golden)
    if few.dim() != many.dim() or not few.numel():
        return None
    tells = few.numel() >= constants.FEWEST_ELEMENTS and bool((few != few.flatten()[0]).any())
    axes = [a for a in range(few.dim()) if few.shape[a] != many.shape[a]]
    if tells or len(axes) != 1:
        return None
    (axis,) = axes
    count, length = few.shape[axis], many.shape[axis]
    for start in (0, length - count):
        if torch.equal(many.narrow(axis, start, count), few):
            move = (narrowed(axis, start, count),)
            says = f"{span_text(start, count)} of {length} along axis {axis}"
            return Fit(says, () if turned else move, move if turned else ())
    return None


def span_text(start: int, length: int) -> str:
    """Return ``4-7`` for four indices from 4, and ``4`` for one."""
    return f"{start}-{start + length - 1}" if length > 1 else str(start)


def permuted(order: tuple[int, ...]) -> Move:
    return partial(_permuted, order)


def _permuted(order: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return x.permute(order)


def viewed(shape: tuple[int, ...]) -> Move:
    return partial(_viewed, shape)


def _viewed(shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return x.reshape(shape)


def broadcast(golden: Sequence[int], mine: Sequence[int], rows: int) -> Fit | None:
    """Return the fit of two tensors of which one has one row for all rows of the batch, or None."""
    turned = math.prod(golden) < math.prod(mine)
    few, many = (golden, mine) if turned else (mine, golden)
    one = few[1:] if len(few) == len(many) and few[:1] == (1,) else few
    if rows < 2 or tuple(many) != (rows, *one):
        return None
    says = f"one row of {'golden' if turned else 'mine'} for all {rows}"
    move = (partial(_expanded, tuple(many)),)
    return Fit(says, move if turned else (), () if turned else move)


def _expanded(shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    return x.expand(shape)


def divided(number: int) -> Move:
    return partial(_divided, number)


def _divided(number: int, x: torch.Tensor) -> torch.Tensor:
    return x / number


def narrowed(axis: int, start: int, length: int) -> Move:
    return partial(_narrowed, axis, start, length)


def _narrowed(axis: int, start: int, length: int, x: torch.Tensor) -> torch.Tensor:
    return x.narrow(axis, start, length)


def grouped(axis: int, groups: int, start: int, length: int) -> Move:
    """Split an axis into groups (heads) and take ``length`` elements from ``start`` of each."""
    return partial(_grouped, axis, groups, start, length)


def _grouped(axis: int, groups: int, start: int, length: int, x: torch.Tensor) -> torch.Tensor:
    place = axis % x.dim()
    split = x.reshape(*x.shape[:place], groups, -1, *x.shape[place + 1 :])
    return split.narrow(place + 1, start, length).flatten(place, place + 1)


def taken(axis: int, index: torch.Tensor) -> Move:
    return partial(_taken, axis, index)


def _taken(axis: int, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.index_select(axis, index)
