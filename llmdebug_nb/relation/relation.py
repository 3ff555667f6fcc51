"""What mine's value is of golden's, in words: negated, heads in another order, rounded to bfloat16.

`relation` tries relations from the simplest to the richest. It returns the first one that brings
the error below the limit and that is beyond chance (`llmdebug_nb.relation.evidence`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from llmdebug_nb.core import constants, spans
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.relation import distortion, rearrangement
from llmdebug_nb.relation import evidence as e
from llmdebug_nb.relation.evidence import Relation, Sides, nats, real, remaining

_LOWEST = torch.finfo(torch.float32).min

Trial = Callable[[Sides], Relation | None]


def relation(
    golden: torch.Tensor,
    mine: torch.Tensor,
    *,
    limit: float,
    others: Sequence[tuple[str, torch.Tensor]] = (),
    groups: Sequence[int] = (),
    axes: Sequence[str] = (),
) -> Relation | None:
    """Return what mine's value is of golden's; None if the two agree or nothing is found.

    ``limit``: the relative L2 error that rounding explains at this site. ``others``: tensors of
    golden that mine may hold instead, with their names. ``groups``: numbers of heads. ``axes``:
    words for mine's axes, such as ``("token", "channel")``.

    Tensors may have any shapes, dtypes and values; it raises nothing because of them.
    """
    numbers, ours = real(golden), real(mine)
    if numbers is None or ours is None or not numbers.numel() or not ours.numel():
        return None
    heads = tuple(sorted({int(count) for count in groups if count > 1}))
    exact = not any(x.is_floating_point() or x.is_complex() for x in (golden, mine))
    lowest = 0.0 if exact else float(limit)  # integers are not rounded
    shared = max(lowest, constants.EXACT), heads, tuple(axes)
    if _odd(ours) and bool(ours.isnan().all()):
        return Relation(e.CONSTANT, "mine is NaN everywhere", "", 0.0)
    hidden = _hidden(numbers, golden.dtype), _hidden(ours, mine.dtype)
    sides = Sides(_shown(numbers, hidden[0]), _shown(ours, hidden[1]), *shared)
    if sides.same:
        keeps = "is true at" if golden.dtype == torch.bool else "keeps"  # True may mean hidden
        found = _of_masks(sides, hidden, keeps)
        if found is None and golden.dtype != torch.bool:
            dtypes = DTYPE_NAMES.get(golden.dtype, ""), DTYPE_NAMES.get(mine.dtype, "")
            found = distortion.rounded(sides, dtypes)
        if found is not None or remaining(sides.mine, sides.golden) < sides.limit:
            return found
    found = distortion.constant(Sides(numbers, ours, *shared))
    trials = (trial(sides) for trial in _trials(sides, others))
    return found or next((found for found in trials if found is not None), None)


def weight_relation(
    golden: torch.Tensor,
    mine: torch.Tensor,
    *,
    limit: float,
    others: Sequence[tuple[str, torch.Tensor]] = (),
    groups: Sequence[int] = (),
) -> Relation | None:
    """Return what mine's weight is of golden's: `relation`, with the words for a weight's axes."""
    axes = ("the rows", "the columns") if mine.dim() == 2 else ()
    found = relation(golden, mine, limit=limit, others=others, groups=groups, axes=axes)
    if found is None or found.kind != e.SHIFTED:
        return found
    return dataclasses.replace(found, advice="look at how it is split, gathered or concatenated")


Hidden = tuple[torch.Tensor | None, torch.Tensor | None]


def _trials(sides: Sides, others: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Trial]:
    """Yield what to try, the simplest first."""
    if sides.same:
        yield from (distortion.scaled, distortion.offset, distortion.powered)
    yield functools.partial(_other, others=others)
    if sides.same:
        yield distortion.other_softmax
    yield from (rearrangement.placed, rearrangement.reordered)
    if sides.same:
        yield from (distortion.bent, distortion.signs)
        parts = functools.cache(lambda: tuple(sorted(_parts(sides), key=lambda part: part.share)))
        yield lambda each: _partly(each, parts(), constants.MAJORITY)
        yield distortion.by_channel
        yield lambda each: _partly(each, parts(), 1.0)


# --- what is hidden -----------------------------------------------------------------------------


def _odd(x: torch.Tensor) -> bool:
    """Tell whether a tensor has values that are not finite; the sum shows it in one pass."""
    return not math.isfinite(float(x.sum())) and not bool(x.isfinite().all())


def _hidden(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the places (bool) that a mask hides in scores or in the mask; None for none."""
    if dtype == torch.bool:
        return x == 0.0 if x.dim() > 1 else None
    low = float(x.amin())
    if math.isnan(low):
        low = float(x.nan_to_num(0.0).amin())
    if low > constants.MASK_FILL or not dtype.is_floating_point:
        return None
    places = x <= constants.MASK_SHARE * max(low, _LOWEST)
    return places if int(places.count_nonzero()) > 1 else None


def _shown(x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor with 0 for what is hidden or not finite."""
    x = x if hidden is None else x.masked_fill(hidden, 0.0)
    return x.nan_to_num(0.0, 0.0, 0.0) if _odd(x) else x


def _of_masks(sides: Sides, hidden: Hidden, keeps: str) -> Relation | None:
    """Compare hidden places; zeros count as hidden where the rows of both add up to 1."""
    theirs, ours = hidden
    if theirs is None and ours is None:
        ends = [x.reshape(-1, x.shape[-1])[:1] for x in (sides.golden, sides.mine) if x.dim() > 1]
        if len(ends) < 2 or any(abs(float(x.sum()) - 1.0) > constants.SUMS_TO_ONE for x in ends):
            return None
        theirs, ours = sides.golden == 0.0, sides.mine == 0.0
    none = torch.zeros(sides.mine.shape, dtype=torch.bool)
    places = none if theirs is None else theirs, none if ours is None else ours
    return distortion.masked(sides, places, keeps)


# --- another tensor -----------------------------------------------------------------------------


def _other(sides: Sides, others: Sequence[tuple[str, torch.Tensor]]) -> Relation | None:
    """Recognise another tensor of golden, alone or with a factor."""
    for label, tensor in others:
        x = real(tensor)
        if x is None or x.shape != sides.mine.shape:
            continue
        x = _shown(x, None)
        sample = x.view(-1)[sides.positions].double()
        factor = distortion.fitted_factor(sample, sides.sample, sides.limit)
        parameters, tried = int(factor not in (1.0, -1.0)), math.log(2 * len(others))
        error = sides.left_by(sample, x, factor, parameters=parameters, candidates=tried)
        if error is not None:
            says = f"mine is golden's {label}{distortion.times(sides, factor)}"
            return Relation(e.OTHER, says, "look at why that tensor is taken", error)
    return None


# --- a part -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    axis: int
    agreeing: torch.Tensor  # bool, one per index of the axis
    error: float  # of what agrees

    @property
    def share(self) -> float:
        return 1.0 - float(self.agreeing.double().mean())


def _partly(sides: Sides, parts: tuple[_Part, ...], most: float) -> Relation | None:
    """Recognise that only a share of an axis differs, and say what mine is there."""
    if not parts or parts[0].share > most:
        return None
    first = parts[0]
    differing = (~first.agreeing).nonzero().flatten()
    says = _part_words(sides, first)
    for more in parts[1:]:
        if more.share <= constants.MAJORITY:
            says += (
                f", and there only {spans.text_of((~more.agreeing).nonzero().flatten().tolist())}"
            )
            says += f" of {sides.axis(more.axis)}"
    inside = relation(
        sides.golden.index_select(first.axis, differing),
        sides.mine.index_select(first.axis, differing),
        limit=sides.limit,
        groups=sides.groups,
        axes=sides.axes,
    )
    if (
        inside is None
        or inside.kind == e.PART
        or (len(parts) > 1 and parts[1].share <= constants.MAJORITY)
    ):
        return Relation(e.PART, says, _of_part(sides, first), first.error)
    return Relation(e.PART, f"{says}: there {inside.says}", inside.advice, first.error)


def _of_part(sides: Sides, part: _Part) -> str:
    """Return the advice that follows from where two tensors differ."""
    agreeing = part.agreeing.nonzero().flatten().tolist()
    if sides.axis(part.axis) == e.TOKENS and agreeing == [0]:
        return "look at what leaves the first token alone: positions, rotations, attention scores"
    if sides.axis(part.axis) == e.TOKENS and agreeing == [len(part.agreeing) - 1]:
        return "look at the mask: it hides nothing from the last token"
    differing = (~part.agreeing).nonzero().flatten().tolist()
    return f"look at what is special about index {spans.text_of(differing)}"


def _parts(sides: Sides) -> Iterator[_Part]:
    """Yield the axes along which some indices agree beyond chance."""
    errors = sizes = None
    for axis in range(sides.mine.dim()):
        count = sides.mine.shape[axis]
        if not 2 <= count <= constants.LONGEST_AXIS:
            continue
        others = [at for at in range(sides.mine.dim()) if at != axis]
        g, m = sides.slices(axis)
        if not bool(_agreeing((m - g).square().sum(1), g.square().sum(1), sides.limit).any()):
            continue
        if errors is None or sizes is None:
            errors, sizes = (sides.mine - sides.golden).square_(), sides.golden.square()
        error = (errors.sum(others) if others else errors).double()
        size = (sizes.sum(others) if others else sizes).double()
        agreeing = _agreeing(error, size, sides.limit)
        number = int(agreeing.sum())
        if not 0 < number < count:
            continue
        remains = math.sqrt(float(error[agreeing].sum()) / max(float(size[agreeing].sum()), 1e-300))
        ways = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        total = math.sqrt(float(error.sum()) / max(float(size.sum()), 1e-300))
        if not remains < min(sides.limit, total / constants.SAMPLE_SPREAD):
            continue  # what differs must stand out
        if nats(g[agreeing], m[agreeing], candidates=ways) >= constants.CERTAIN_NATS:
            yield _Part(axis, agreeing, remains)


def _agreeing(error: torch.Tensor, size: torch.Tensor, limit: float) -> torch.Tensor:
    """Return which slices agree (bool), by the squares of their errors and sizes (float64).

    A slice below the median counts as that large, see `comparison/rows.py`.
    """
    return error <= (constants.SAMPLE_SPREAD * limit) ** 2 * torch.maximum(size, size.median())


def _part_words(sides: Sides, part: _Part) -> str:
    agreeing = part.agreeing.nonzero().flatten().tolist()
    differing = (~part.agreeing).nonzero().flatten().tolist()
    unit = sides.axis(part.axis)
    for heads in sides.groups:
        blocks = part.agreeing.view(heads, -1) if len(part.agreeing) % heads == 0 else None
        if blocks is not None and bool((blocks == blocks[:, :1]).all()):
            agreeing = blocks[:, 0].nonzero().flatten().tolist()
            differing = (~blocks[:, 0]).nonzero().flatten().tolist()
            unit = f"the {heads} heads along {unit}"
            break
    if len(differing) <= len(agreeing):
        verb = "differs" if len(differing) == 1 else "differ"
        return f"only {spans.text_of(differing)} of {unit} {verb}"
    if len(agreeing) == 1:
        one = e.nth(unit, agreeing[0], len(agreeing) + len(differing))
        return f"only {one} is right; the other {len(differing)} differ"
    return f"{spans.text_of(agreeing)} of {unit} agree, {spans.text_of(differing)} differ"
