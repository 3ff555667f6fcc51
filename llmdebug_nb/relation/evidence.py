"""Two tensors of one site, and how far a guess about them is beyond chance.

**Chance.** A guess predicts mine's elements and leaves the residual ``e`` (relative to mine's
spread). A tensor that has nothing to do with golden falls into that ball around the prediction with
probability of at most ``(r * e) ** n``: ``n`` independent normal elements have density
``(2 pi) ** (-n / 2)`` at most, and a ball of radius ``e * sqrt(n)`` has the volume that makes
``r = exp(1 / 2)`` of it. Each fitted parameter takes one element away, and each prediction that was
tried is one more chance: ``P <= candidates * (r * e) ** (n - parameters)``. In nats that is
``(n - parameters) * (log(1 / e) - 1 / 2) - log(candidates)``, which `nats` returns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.relative import ratio

TOKENS = "the tokens"  # the word for that axis

# Kinds of relations.
ROUNDED, NEGATED, SCALED, OFFSET, ONE_PLUS = "rounded", "negated", "scaled", "offset", "one plus"
CONSTANT, INVERTED, CLIPPED, SOFT_CAP = "constant", "inverted", "clipped", "soft-cap"
CHANNEL_SCALE, NEIGHBOUR_SCALE, SIGNS = "scale per channel", "neighbour's scale", "signs"
CHANNEL_OFFSET, MASKED, OTHER_SOFTMAX = "offset per channel", "masked", "softmax axis"
PERMUTED, RESHAPED, FLIPPED, REORDERED = "permuted", "reshaped", "flipped", "reordered"
SHIFTED, HALVES, INTERLEAVED, TILED = "shifted", "halves swapped", "interleaved", "tiled"
SLICED_OUT, PART, OTHER = "slice", "part", "other tensor"
BROADCAST, POWER = "broadcast", "power"

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """What mine's value is of golden's.

    ``kind``: one of the constants above. ``says``: a clause for the user. ``advice``: what follows
    from it, empty where nothing does. ``error``: the relative L2 error that remains after the
    relation is undone.
    """

    kind: str
    says: str
    advice: str
    error: float


def _spread(x: torch.Tensor) -> tuple[float, float]:
    """Return the L2 norm and the number of elements that carry it.

    The fourth moment tells: it is 3 for normal elements, which all count, and n for one outlier.
    """
    squares = x.square()
    total = float(squares.sum())
    carried = 3.0 * ratio(total * total, float(squares.square().sum()))
    return math.sqrt(total), min(carried, float(x.numel()))


def _count(
    predicted: torch.Tensor, mine: torch.Tensor, parameters: int, candidates: float, varied: int
) -> float:
    spread, elements = _spread(mine)
    elements = min(elements, varied)
    remains = ratio(float((mine - predicted).norm()), spread)
    if not elements > parameters or not remains < 1.0:
        return -math.inf
    return (elements - parameters) * (-math.log(max(remains, constants.FINEST)) - 0.5) - candidates


def nats(
    predicted: torch.Tensor,
    mine: torch.Tensor,
    *,
    parameters: int = 0,
    candidates: float = 0.0,
    centred: bool = True,
) -> float:
    """Return by how many nats a prediction is beyond chance, -inf if it predicts nothing.

    ``candidates``: the logarithm of the number of predictions that were tried. ``centred``: the
    spread counts, not the size; two vectors close to 1 are similar without any relation. Elements
    of very different sizes are counted twice: as they are, where the largest decide, and clipped,
    where the others do.
    """
    middle = mine.median() if centred else mine.new_zeros(())
    predicted, mine = predicted.flatten() - middle, mine.flatten() - middle
    varied = int(mine.count_nonzero())  # zeros of a ReLU or a mask agree without any relation
    level = mine.mean() * centred
    best = _count(predicted - level, mine - level, parameters, candidates, varied)
    bound = constants.OUTLIER * float(mine.abs().median())
    if 0.0 < bound < float(mine.abs().amax()):
        clipped = predicted.clamp(-bound, bound), mine.clamp(-bound, bound)
        best = max(best, _count(*clipped, parameters, candidates, varied))
    return best - math.log(2)


def real(x: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as contiguous float32 or float64 on the CPU; None for what has no values."""
    if x.is_meta or x.is_quantized or x.layout is not torch.strided:
        return None
    x = x.detach().cpu()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float() if x.is_floating_point() else x.double()
    if x.numel():
        largest = max(abs(float(bound)) for bound in x.aminmax())
        if x.dtype == torch.float32 and not (
            constants.SMALLEST_SQUARED < largest < constants.LARGEST_SQUARED or largest == 0.0
        ):
            x = x.double()
    return x.contiguous()


class Sides:
    """Golden and mine as numbers (``real``), the limit of their site, and a sample of mine.

    ``sizes``: numbers of heads to look for. ``axes``: words for mine's axes.
    """

    def __init__(
        self,
        golden: torch.Tensor,
        mine: torch.Tensor,
        limit: float,
        groups: tuple[int, ...] = (),
        axes: Axes = (),
    ) -> None:
        self.golden, self.mine, self.limit = golden, mine, limit
        self.groups, self.axes = groups, axes
        self._slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Flat positions of the sample in mine, the same ones each time (int64)."""
        count = self.mine.numel()
        if count <= constants.RELATION_SAMPLE:
            return torch.arange(count)
        return torch.randint(count, (constants.RELATION_SAMPLE,), generator=seeded())

    @functools.cached_property
    def sample(self) -> torch.Tensor:
        """Mine's elements of the sample, float64."""
        return self.mine.view(-1)[self.positions].double()

    @functools.cached_property
    def golden_sample(self) -> torch.Tensor:
        """Golden's elements at the same flat positions, float64. Sizes must be equal."""
        return self.golden.view(-1)[self.positions].double()

    def slices(self, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same few elements of each slice along an axis: golden's and mine's.

        Both are float64, [slices, elements]. The shapes may differ in that axis alone.
        """
        if axis in self._slices:
            return self._slices[axis]
        rest = [size for at, size in enumerate(self.mine.shape) if at != axis]
        count, length = math.prod(rest), max(self.golden.shape[axis], self.mine.shape[axis], 1)
        wanted = min(
            max(constants.SLICED_SAMPLE // length, constants.FEWEST_ELEMENTS),
            constants.MOST_PER_SLICE,
        )
        picks = torch.arange(count)
        if count > wanted:
            picks = torch.randint(count, (wanted,), generator=seeded())
        found = torch.unravel_index(picks, rest) if rest else ()
        places = [*found[:axis], torch.zeros_like(picks), *found[axis:]]

        def taken(x: torch.Tensor) -> torch.Tensor:
            starts = sum((p * step for p, step in zip(places, x.stride(), strict=True)), picks * 0)
            steps = torch.arange(x.shape[axis]) * x.stride(axis)
            return x.view(-1)[starts + steps.unsqueeze(1)].double()

        self._slices[axis] = taken(self.golden), taken(self.mine)
        return self._slices[axis]

    @functools.cached_property
    def same(self) -> bool:
        """Whether both have one shape."""
        return self.golden.shape == self.mine.shape

    def axis(self, axis: int) -> str:
        """Return the word for one of mine's axes."""
        return self.axes[axis] if len(self.axes) == self.mine.dim() else f"axis {axis}"

    def certain(
        self, predicted: torch.Tensor, *, parameters: int = 0, candidates: float = 0.0
    ) -> bool:
        """Tell whether a prediction of the sample is beyond chance, and beyond equality.

        Beyond equality: it explains the difference between the two, not only mine.
        """
        if (
            nats(predicted, self.sample, parameters=parameters, candidates=candidates)
            < constants.CERTAIN_NATS
        ):
            return False
        return not self.same or self.explains(predicted, parameters, candidates)

    def explains(
        self, predicted: torch.Tensor, parameters: int = 0, candidates: float = 0.0
    ) -> bool:
        """Tell whether a prediction of the sample explains the difference of golden and mine."""
        change, difference = predicted - self.golden_sample, self.sample - self.golden_sample
        count = nats(
            change, difference, parameters=parameters, candidates=candidates, centred=False
        )
        return count >= constants.CERTAIN_NATS

    def left_by(
        self,
        sample: torch.Tensor,
        whole: torch.Tensor | Callable[[], torch.Tensor],
        factor: float = 1.0,
        offset: float = 0.0,
        *,
        parameters: int = 0,
        candidates: float = 0.0,
    ) -> float | None:
        """Return the error that ``factor * x + offset`` leaves; None if that is not mine's value.

        ``sample``, ``whole``: x at the sample (float64), and all of it in mine's layout.
        """
        scaled = factor * sample
        predicted = scaled + offset
        size = max(float(predicted.norm()), float(scaled.norm()))
        if not float((predicted - self.sample).norm()) <= (
            constants.SAMPLE_SPREAD * self.limit * size
        ):
            return None
        if not self.certain(predicted, parameters=parameters, candidates=candidates):
            return None
        predicted = whole if isinstance(whole, torch.Tensor) else whole()
        error = remaining(self.mine, predicted, factor, offset)
        return error if error < self.limit else None


def seeded() -> torch.Generator:
    """Return a generator of random numbers that are the same each time."""
    return torch.Generator().manual_seed(0)


def remaining(
    mine: torch.Tensor, predicted: torch.Tensor, factor: float = 1.0, offset: float = 0.0
) -> float:
    """Return the relative L2 error of mine against ``factor * predicted + offset``.

    It is relative to the larger one of the sizes with and without the offset: rounding is as coarse
    as the larger one. (That a large offset hides the rest is for `nats` to see.) inf for NaN.
    """
    error = size = moved = 0.0
    mine, predicted = mine.reshape(-1), predicted.reshape(-1)
    for start in range(0, mine.numel(), constants.CHUNK):
        ours = mine[start : start + constants.CHUNK]
        theirs = predicted[start : start + constants.CHUNK].to(ours.dtype)
        difference = torch.sub(ours, theirs, alpha=factor)
        if offset:
            difference -= offset
            moved += float(ours.norm()) ** 2
        error += float(difference.norm()) ** 2
        size += float(theirs.norm()) ** 2
    found = ratio(math.sqrt(error), max(math.sqrt(size) * abs(factor), math.sqrt(moved)))
    return math.inf if math.isnan(found) else found


def listed(numbers: Sequence[int]) -> str:
    """Return ``0, 4, 1, 5``; the first few of many."""
    return ", ".join(map(str, numbers[: constants.INDICES_SHOWN])) + (
        ", …" if len(numbers) > constants.INDICES_SHOWN else ""
    )


_ONE = {
    TOKENS: "token", "the channels": "channel", "the heads": "head", "the queries": "query",
    "the keys": "key", "the rows": "row", "the columns": "column",
}  # fmt: skip


def nth(axis: str, at: int, count: int) -> str:
    """Return ``the first token`` for one index of an axis, ``index 3 of axis 0`` without a word."""
    noun = _ONE.get(axis)
    if noun is None:
        return f"index {at} of {axis}"
    ends = {0: "the first", count - 1: "the last"}
    return f"{ends[at]} {noun}" if at in ends else f"{noun} {at}"
