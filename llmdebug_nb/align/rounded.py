"""Propose how the integers of a quantised activation become floats: ``(q - zero) * scale``.

Scale and zero are those that the call which made the integers was given, if it was. If not, they
are golden's against mine's by least squares: of the whole tensor, of each row (token) or of each
column (channel). A form with more numbers has to be clearly nearer, each number counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.align.fit import Fit, Move, permuted
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.core.records import CallKey, Record, Summary

Load = Callable[[Record], torch.Tensor]

DTYPES = ("int8", "uint8")
UNSEEN = "integers of a quantised tensor, whose scale can't be told without values"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of integers: what they are called, scales and zeros (float64, spread over them).

    ``count``: how many numbers were fitted.
    """

    says: str
    scale: torch.Tensor
    zero: torch.Tensor
    count: int

    def floats(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored.double() - self.zero) * self.scale

    def error(self, stored: torch.Tensor, other: torch.Tensor) -> float:
        """Return the relative L2 error, as if no number had been fitted; inf if it has no sense."""
        free = stored.numel() - self.count
        if free <= 0 or not bool((self.scale >= 0).all()) or not float(self.scale.sum()) > 0:
            return math.inf
        apart = ratio(float((self.floats(stored) - other).norm()), float(other.norm()))
        return apart * math.sqrt(stored.numel() / free)


def stand_for_each_other(golden: Summary, mine: Summary) -> bool:
    """Tell whether one tensor may hold the integers of the other."""
    dtypes = golden.dtype, mine.dtype
    if dtypes[0] == dtypes[1]:
        return False
    one_rounds = any(d in DTYPES for d in dtypes) and any(map(is_floating, dtypes))
    return one_rounds and golden.numel == mine.numel >= constants.FEWEST_ELEMENTS


class Roundings:
    """Finds the layouts of quantised activations; ``load`` reads the values of each side."""

    def __init__(
        self, sides: tuple[Sequence[Record], Sequence[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._sides, self._load = sides, load

    def fit(self, golden: Record, mine: Record) -> Fit | None:
        """Return the fit that makes floats of the integers; None if none is near the floats."""
        pair = golden, mine
        if self._load is None or any(r.payload is None or r.kept for r in pair):
            return Fit(UNSEEN)
        side = 0 if golden.summary.dtype in DTYPES else 1
        try:
            x = self._load[1 - side](pair[1 - side]).double()
            q = self._load[side](pair[side]).reshape(x.shape)
            beside = [self._load[side](record) for record in self._given(pair[side], side)]
        except (CorruptDumpError, TensorLookupError, RuntimeError):
            return Fit(UNSEEN)
        stored, floats = _matrix(q), _matrix(x)
        steps = _recorded(stored, floats, beside) or _fitted(stored, floats)
        return None if steps is None else _fit(steps, x.shape, side, side)

    def _given(self, record: Record, side: int) -> list[Record]:
        """Return the inputs of the call that made a tensor, as large as its rows or columns."""
        maker = record
        if record.site.role != "output":
            maker = self._makers[side].get(_bytes(record), record)
        shape = record.summary.shape or (1,)
        sizes = (1, shape[-1], record.summary.numel // shape[-1])
        calls = self._calls[side].get(maker.site.key, ())
        return [r for r in calls if r.payload is not None and r.summary.numel in sizes]

    @functools.cached_property
    def _calls(self) -> tuple[dict[CallKey, list[Record]], ...]:
        """The inputs of each call of either side."""
        calls: tuple[dict[CallKey, list[Record]], ...] = ({}, {})
        for own, records in zip(calls, self._sides, strict=True):
            for record in records:
                if record.site.role == "input":
                    own.setdefault(record.site.key, []).append(record)
        return calls

    @functools.cached_property
    def _makers(self) -> tuple[dict[object, Record], ...]:
        """The first output of either side that holds integers of a quantised tensor, by bytes."""
        makers: tuple[dict[object, Record], ...] = ({}, {})
        for own, records in zip(makers, self._sides, strict=True):
            for r in records:
                if r.site.role == "output" and r.summary.dtype in DTYPES:
                    own.setdefault(_bytes(r), r)
        return makers


def by_least_squares(stored: torch.Tensor, floats: torch.Tensor, side: int) -> Fit | None:
    """Return the fit of a weight of golden (0) or mine (1) whose scale was not recorded."""
    x = _matrix(floats.double())
    for turn in ((), (permuted((1, 0)),)) if stored.dim() == 2 else ((),):
        q = turn[0](stored) if turn else stored
        steps = _fitted(_matrix(q.double()), x) if q.shape == floats.shape else None
        if steps is not None:
            return _fit(steps, floats.shape, side, None, turn)
    return None


def _fit(
    steps: Steps, shape: torch.Size, side: int, integers: int | None, turn: tuple[Move, ...] = ()
) -> Fit:
    move: tuple[Move, ...] = (*turn, functools.partial(_moved, steps, shape))
    return Fit(
        f"dequantised: {steps.says}",
        () if side else move,
        move if side else (),
        grain=functools.partial(_grain, steps, shape),
        integers=integers,
    )


def _bytes(record: Record) -> object:
    """Return what tells the bytes of a tensor in its step."""
    s, site = record.summary, record.site
    known = s.fingerprint or (s.min, s.max, s.mean, s.l2norm)
    return site.rank, site.generation, site.step, s.dtype, s.numel, known


def _moved(steps: Steps, shape: torch.Size, stored: torch.Tensor) -> torch.Tensor:
    return steps.floats(_matrix(stored.reshape(shape))).reshape(shape)


def _grain(
    steps: Steps, shape: torch.Size, golden: torch.Tensor, mine: torch.Tensor
) -> torch.Tensor:
    """Return the grain of each element, float64."""
    rows = _matrix(torch.empty(shape, device="meta")).shape
    return steps.scale.expand(rows).reshape(shape)


def _recorded(q: torch.Tensor, x: torch.Tensor, beside: Sequence[torch.Tensor]) -> Steps | None:
    """Return the steps that the call was given; None if it was given none that are near."""
    scales = [each.double() for each in beside if each.is_floating_point() and _goes_with(each, q)]
    zeros = [each.double() for each in beside if not each.is_floating_point()]
    found = []
    for given in scales:
        none = torch.zeros(())
        for zero in (none, *(z for z in zeros if z.numel() in (1, given.numel()))):
            for name, scale in (("", given), ("1 / ", given.reciprocal())):
                says = f"(q - zero) * {name}scale, as its call was given"
                steps = Steps(says, _along(scale, q), _along(zero, q), 0)
                found.append((steps.error(q, x), steps))
    error, best = min(found, key=lambda each: each[0], default=(math.inf, None))
    return best if error < constants.PERTURBED else None


def _fitted(q: torch.Tensor, x: torch.Tensor) -> Steps | None:
    """Return the steps by least squares, the simplest that are about as near as any."""
    found = [(steps.error(q, x), steps) for steps in _forms(q.double(), x)]
    least = min((error for error, _ in found), default=math.inf)
    if not least <= constants.WRONG_LAYOUT:
        return None
    best = next(steps for error, steps in found if error <= least * constants.LAYOUT_TIE)
    grain = ratio(float(best.scale.expand(q.shape).norm()), float(x.norm()))
    # where rounding alone would leave more than a wrong layout does, nothing is told
    return best if grain * constants.CHANNEL_GRAINS <= constants.WRONG_LAYOUT else None


def _forms(q: torch.Tensor, x: torch.Tensor) -> Iterator[Steps]:
    axes = {"": (0, 1), " of each row": (1,), " of each column": (0,)}
    for where, axis in axes.items():
        if math.prod(q.shape[a] for a in axis) < constants.FEWEST_ELEMENTS:
            continue
        groups = q.numel() // math.prod(q.shape[a] for a in axis)
        product, square = (x * q).sum(axis, keepdim=True), (q * q).sum(axis, keepdim=True)
        none = torch.zeros(())
        yield Steps(f"q * scale{where}, by least squares", _over(product, square), none, groups)
        low, mid = q - q.mean(axis, keepdim=True), x.mean(axis, keepdim=True)
        scale = _over((x * low).sum(axis, keepdim=True), (low * low).sum(axis, keepdim=True))
        zero = (q.mean(axis, keepdim=True) - _over(mid, scale)).round()
        moved = q - zero
        scale = _over((x * moved).sum(axis, keepdim=True), (moved**2).sum(axis, keepdim=True))
        says = f"(q - zero) * scale{where}, by least squares"
        yield Steps(says, scale, zero, 2 * groups)


def _over(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a / b, 0 where b is 0: a row of zeros has no scale."""
    return torch.where(b == 0, 0.0, a / b)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows of its last axis."""
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _goes_with(given: torch.Tensor, q: torch.Tensor) -> bool:
    return given.numel() in (1, *q.shape)


def _along(given: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return numbers for all, for each row or for each column, so that they go with a matrix."""
    if given.numel() == 1:
        return given.reshape(())
    by_row = given.numel() == q.shape[0] and (given.shape[-1:] == (1,) or q.shape[0] != q.shape[1])
    return given.reshape(-1, 1) if by_row else given.reshape(1, -1)
