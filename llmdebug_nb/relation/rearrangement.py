"""Find golden's elements at other places in mine: axes, heads, halves, order along an axis.

Two searches. A `Place` views golden in another shape and permutes its axes; there are few of them,
and each is tried on a sample. An order along one axis is not guessed: each slice of mine is matched
with the nearest slice of golden, and the order that comes out gets its name.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants, spans
from llmdebug_nb.relation import evidence as e
from llmdebug_nb.relation.distortion import fitted_factor, times
from llmdebug_nb.relation.evidence import Relation, Sides, listed, nats, remaining

_HEADS = "look at how heads are repeated or split: repeat_interleave against repeat, view before"
_HEADS += " transpose"
_ROPE = "look at the layout of the rotary embedding: half-split (rotate_half) against interleaved"
_MATRIX = "look for a transpose that is left out or taken twice"
_TOLD = {
    e.FLIPPED: "look for a flip, or a loop that runs the other way",
    e.SHIFTED: "look for an offset: positions, labels or a cache that is one step ahead or behind",
    e.HALVES: "look at the order of a chunk or split in two: gate and up, cos and sin, real and"
    " imaginary part",
    e.INTERLEAVED: _ROPE,
    e.TILED: _HEADS,
    e.BROADCAST: "look for what is the same for all of them in mine, and should be one for each",
    e.REORDERED: "look at how they are gathered or concatenated",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where golden's elements lie in mine: golden viewed as ``split``, its axes in ``order``."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    kind: str
    says: str
    advice: str = ""

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return golden's flat positions (int64) of flat positions in mine."""
        steps = [math.prod(self.split[axis + 1 :]) for axis in range(len(self.split))]
        found = torch.zeros_like(positions)
        for axis in reversed(self.order):
            size = self.split[axis]
            found += positions % size * steps[axis]
            positions = positions // size
        return found

    def whole(self, golden: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return golden's elements at mine's places."""
        return golden.view(self.split).permute(self.order).reshape(shape)


# --- axes ---------------------------------------------------------------------------------------


def placed(sides: Sides) -> Relation | None:
    """Recognise permuted axes, reshaped and mixed up heads, alone or with a factor."""
    if sides.golden.numel() != sides.mine.numel():
        return None
    places = list(itertools.islice(_places(sides), constants.LAYOUTS_TRIED))
    flat, tried = sides.golden.view(-1), math.log(2 * len(places)) if places else 0.0
    for place in places:
        sample = flat[place.at(sides.positions)].double()
        factor = fitted_factor(sample, sides.sample, sides.limit)
        parameters = int(factor not in (1.0, -1.0))
        whole = functools.partial(place.whole, sides.golden, sides.mine.shape)
        error = sides.left_by(sample, whole, factor, parameters=parameters, candidates=tried)
        if error is not None:
            says = f"{place.says}{times(sides, factor)}"
            return Relation(place.kind, says, place.advice, error)
    return None


def _places(sides: Sides) -> Iterator[Place]:
    golden, mine = tuple(sides.golden.shape), tuple(sides.mine.shape)
    long = [axis for axis, size in enumerate(golden) if size > 1]
    if golden != mine:
        says = f"mine is golden's value with shape {list(mine)} instead of {list(golden)}"
        yield Place(golden, tuple(range(len(golden))), e.RESHAPED, says)
    for order in itertools.permutations(long) if len(long) <= constants.PERMUTED_AXES else ():
        if list(order) == long:
            continue
        split = tuple(golden[axis] for axis in long)
        place = tuple(long.index(axis) for axis in order)
        left = iter(order)
        axes = [next(left) if axis in long else axis for axis in range(len(golden))]
        shape = [split[axis] for axis in place]
        if golden == mine and shape != list(split):
            says = f"mine is golden's value with its axes in order {axes}, viewed as"
            advice = "look for a view or reshape where a transpose belongs, or beside one"
            yield Place(split, place, e.PERMUTED, f"{says} {list(mine)}", advice)
        elif len(long) == 2:
            yield Place(split, place, e.PERMUTED, "mine is golden's value transposed", _MATRIX)
        else:
            says = f"mine is golden's value with its axes in order {axes}"
            yield Place(split, place, e.PERMUTED, says, "look at a permute or transpose")
    yield from _mixed_heads(sides)


def _mixed_heads(sides: Sides) -> Iterator[Place]:
    """Yield (h, t, d) flattened where (t, h, d) is meant, and the other way round."""
    shape = tuple(sides.mine.shape)
    for axis, heads in itertools.product(range(len(shape)), sides.groups):
        if heads < 2 or shape[axis] % heads or shape[axis] == heads:
            continue
        for other in range(axis):
            if shape[other] < 2:
                continue
            split = [*shape[:axis], heads, shape[axis] // heads, *shape[axis + 1 :]]
            order = list(range(len(split)))
            order.insert(other, order.pop(axis))
            says = f"mine is golden's value with {heads} heads before {sides.axis(other)},"
            advice = "look for a reshape without the transpose of heads and tokens before it"
            yield Place(
                tuple(split), tuple(order), e.PERMUTED, f"{says} flattened like that", advice
            )
            back = tuple(order.index(at) for at in range(len(order)))
            moved = tuple(split[at] for at in order)
            says = f"golden is mine's value with {heads} heads before {sides.axis(other)},"
            yield Place(moved, back, e.PERMUTED, f"{says} flattened like that", advice)


# --- the order along one axis -------------------------------------------------------------------


def reordered(sides: Sides) -> Relation | None:
    """Recognise another order along an axis, a shift, a subset and a repetition."""
    shapes = sides.golden.shape, sides.mine.shape
    if len(shapes[0]) != len(shapes[1]):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    axes = differing or list(range(len(shapes[0])))
    if len(differing) > 1:
        return None
    for axis in reversed(axes):
        theirs, ours = shapes[0][axis], shapes[1][axis]
        if ours and theirs > 1 and max(theirs, ours) <= constants.LONGEST_AXIS:
            g, m = sides.slices(axis)
            size = float(g.norm()) / max(float(m.norm()), constants.SMALLEST_SQUARED)
            size *= math.sqrt(len(m) / len(g))
            for factor in (1.0, 1.0 / size if size else 1.0):
                found = _along(sides, axis, factor)
                if found is not None:
                    return found
                if abs(size - 1.0) < sides.limit:
                    break
    return None


def _along(sides: Sides, axis: int, factor: float) -> Relation | None:
    g, m = sides.slices(axis)
    order = matched(g * factor, m, constants.SAMPLE_SPREAD * sides.limit)
    if g.shape[1] == 1 and sides.same and len(set(order.tolist())) < len(order):
        order = torch.empty_like(order).scatter(0, m[:, 0].argsort(), (g * factor)[:, 0].argsort())
    known = (order >= 0).nonzero().flatten()
    order = order[known]
    if not len(known):
        return None
    if sides.same and bool((order == known).all()):
        return None
    if not sides.same and len(known) < len(m):
        return None
    kind, words, candidates = name(order, known, len(g), len(m), sides)
    if not kind:
        return None
    predicted, seen = factor * g[order], m[known]
    if sides.same:
        change = nats(
            predicted - g[known],
            seen - g[known],
            candidates=candidates,
            centred=False,
            parameters=1,
        )
        if change < constants.CERTAIN_NATS:
            return None
    if nats(predicted, seen, candidates=candidates, parameters=1) < constants.CERTAIN_NATS:
        return None
    mine = sides.mine if len(known) == len(m) else sides.mine.index_select(axis, known)
    chosen = sides.golden.index_select(axis, order)
    factor = fitted_factor(g[order].flatten(), seen.flatten(), sides.limit)
    error = remaining(mine, chosen, factor)
    if not error < sides.limit:
        return None
    says = words.format(axis=sides.axis(axis)) + times(sides, factor)
    advice = _HEADS if "heads" in says and kind == e.REORDERED else _TOLD.get(kind, "")
    return Relation(kind, says, advice, error)


def matched(golden: torch.Tensor, mine: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return for each slice of mine the nearest slice of golden, -1 where none is near (int64).

    Both are float64 [slices, elements]. Slices are near if their distance is below ``tolerance`` of
    golden's usual slice or of their own size. Equal slices of golden are taken in turn. All are -1
    if fewer than half have a partner.
    """
    unit = golden.square().mean(0).sqrt().clamp_min(constants.SMALLEST_SQUARED)
    golden, mine = golden / unit, mine / unit
    direction = torch.randn(golden.shape[1], dtype=golden.dtype, generator=e.seeded())
    keys, ranks = (golden @ direction).sort()

    def nearest(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = min(
            max(constants.MEASURED_ELEMENTS // max(some.numel(), 1), 4),
            constants.NEAREST_SLICES,
            2 * len(golden),
        )
        middle = torch.searchsorted(keys, some @ direction)
        window = middle.unsqueeze(1) + torch.arange(-(width // 2), width - width // 2)
        nearby = ranks[window.clamp(0, len(golden) - 1)]
        distance = torch.zeros(nearby.shape, dtype=golden.dtype)
        for column in range(golden.shape[1]):
            distance += (golden[:, column][nearby] - some[:, column].unsqueeze(1)).square()
        best, at = distance.min(1)
        found = nearby.gather(1, at.unsqueeze(1)).squeeze(1)
        return found, best <= tolerance**2 * torch.maximum(usual[found], usual.mean())

    usual = golden.square().sum(1)
    if len(mine) > 2 * constants.FIRST_SLICES:
        some = mine[torch.randint(len(mine), (constants.FIRST_SLICES,), generator=e.seeded())]
        if int(nearest(some)[1].sum()) < constants.FIRST_MATCHED:
            return torch.full((len(mine),), -1)
    found, near = nearest(mine)
    if int(near.sum()) < constants.MATCHED_SHARE * len(mine):
        return torch.full((len(mine),), -1)
    return torch.where(near, _in_turn(golden, found), -1)


def _in_turn(golden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Replace the j-th match with a slice by the j-th of the slices that are equal to it.

    Heads that golden repeats are equal. Slices without an equal stay as they are.
    """
    rows = [row.tobytes() for row in golden.numpy()]
    members: dict[bytes, list[int]] = {}
    for at, row in enumerate(rows):
        members.setdefault(row, []).append(at)
    if len(members) == len(rows):
        return found
    turns: dict[bytes, int] = {}
    result = []
    for at in found.tolist():
        equal = members[rows[at]]
        turn = turns[rows[at]] = turns.get(rows[at], -1) + 1
        result.append(equal[turn % len(equal)])
    return torch.tensor(result)


# --- names of orders ----------------------------------------------------------------------------

Name = tuple[str, str, float]  # kind, words with {axis}, log of the number of such orders


def name(order: torch.Tensor, known: torch.Tensor, theirs: int, ours: int, sides: Sides) -> Name:
    """Name an order: mine's slice ``known[i]`` is golden's slice ``order[i]``."""
    if theirs != ours:
        return _subset(order, theirs, ours)
    if len(known) < ours or len(set(order.tolist())) < ours:
        steps = known - order
        if bool((steps != steps[0]).any()):
            if len(known) < ours:
                return "", "", 0.0
            if len(set(order.tolist())) == 1:
                says = f"mine has golden's index {int(order[0])} of {{axis}} in place of all {ours}"
                return e.BROADCAST, says, math.log(theirs)
            says = "mine's indices of {axis} are golden's " + listed(order.tolist())
            return e.REORDERED, says, ours * math.log(ours)
        return (
            e.SHIFTED,
            _moved(int(steps[0])) + ", with other values at the border",
            math.log(4 * ours),
        )
    kind, words, candidates = _bijection(order, sides.groups, "{axis}", "positions")
    return kind, words, candidates


def _moved(by: int) -> str:
    return f"mine is golden's value moved by {by:+d} along {{axis}}"


def _subset(order: torch.Tensor, theirs: int, ours: int) -> Name:
    listing = order.tolist()
    at = torch.arange(ours)
    if ours == 1:
        says = f"mine is golden's {listing[0]} of {{axis}}, one for all {theirs}"
        return e.SLICED_OUT, says, math.log(theirs)
    if ours < theirs and bool((order == at + order[0]).all()):
        says = f"mine is golden's {spans.text_of(listing)} of {{axis}} (it has {theirs})"
        return e.SLICED_OUT, says, math.log(theirs)
    if ours > theirs and ours % theirs == 0:
        if bool((order == at % theirs).all()):
            return e.TILED, "mine is golden's value repeated as a whole along {axis}", 0.0
        if bool((order == at // (ours // theirs)).all()):
            return e.TILED, "mine repeats each index of {axis} of golden's value", 0.0
    says = f"mine's indices of {{axis}} are golden's {listed(listing)} (it has {theirs})"
    return e.SLICED_OUT, says, ours * math.log(theirs)


def _bijection(order: torch.Tensor, groups: tuple[int, ...], where: str, unit: str) -> Name:
    """Name a permutation of all indices: of blocks, inside blocks, or of single indices."""
    count = len(order)
    at = torch.arange(count)
    few = math.log(64 * count)
    whole = where if unit == "positions" else f"the {unit} of {where}"
    if count > 1 and count % 2 == 0 and bool((order == (at + count // 2) % count).all()):
        if 2 in groups and unit in ("heads", "positions"):
            return e.REORDERED, f"mine has the two heads of {where} swapped", few
        return e.HALVES, f"mine has the two halves of {whole} swapped", few
    if bool((order == count - 1 - at).all()):
        return e.FLIPPED, f"mine has {whole} flipped", few
    by = int(at[0] - order[0])
    if bool((order == (at - by) % count).all()):
        by = by if abs(by) <= count // 2 else by + (count if by < 0 else -count)
        says = f"mine is golden's value moved by {by:+d} along {whole}, round the end"
        return e.SHIFTED, says, few
    for size in _divisors(count):
        blocks = order.view(-1, size)
        starts = blocks[:, :1]
        if (
            size > 1
            and bool((starts % size == 0).all())
            and bool((blocks == starts + torch.arange(size)).all())
        ):
            number = count // size
            unit = "heads" if number in groups else f"blocks of {size}"
            return _bijection(starts.flatten() // size, groups, where, unit)
    crossed = _crossed(order, where, unit, groups, few)
    if crossed:
        return crossed
    for size in reversed(_divisors(count)):
        blocks = order.view(-1, size) - torch.arange(0, count, size).unsqueeze(1)
        if size > 2 and bool((blocks == blocks[0]).all()) and int(blocks.min()) >= 0:
            number = count // size
            each = f"each of the {number} {'heads' if number in groups else 'blocks'} of {where}"
            found = _bijection(blocks[0], groups, each, unit)
            if (
                found[0] != e.REORDERED or count > constants.INDICES_SHOWN
            ):  # a short order is told as a whole
                return found
    return _listing(order, groups, where, unit)


def _crossed(
    order: torch.Tensor, where: str, unit: str, groups: tuple[int, ...], few: float
) -> Name | None:
    """Name the order of a transposed (a, b): interleaved halves, repeated heads."""
    count = len(order)
    for inner in _divisors(count):
        if not bool((order == torch.arange(count).view(-1, inner).T.flatten()).all()):
            continue
        if unit != "positions" or count in groups:
            _, says, _ = _listing(order, groups, where, unit)
            return e.TILED, says, few
        if inner == 2:
            says = f"mine has {where} half-split where golden is interleaved"
        elif count // inner == 2:
            says = f"mine has {where} interleaved where golden is half-split"
        else:
            outer = count // inner
            says = f"mine has {where} as ({inner}, {outer}) where golden is ({outer}, {inner})"
            return e.TILED, says, few
        return e.INTERLEAVED, says, few
    return None


def _listing(order: torch.Tensor, groups: tuple[int, ...], where: str, unit: str) -> Name:
    count = len(order)
    moved = (order != torch.arange(count)).nonzero().flatten().tolist()
    unit = "heads" if unit == "positions" and count in groups else unit
    candidates = math.lgamma(count + 1)
    if len(moved) < count / 2:
        # as many orders as ways to choose what moved, and to order it
        candidates = candidates - math.lgamma(count - len(moved) + 1)
        has = f"at {listed(moved)} mine has {listed(order[moved].tolist())}"
    else:
        has = f"mine has {listed(order.tolist())}, right: {listed(range(count))}"
    says = f"mine's {unit} are in another order along {where}: {has}"
    return e.REORDERED, says, candidates


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number but itself and 1, the largest first."""
    return [size for size in range(number // 2, 1, -1) if number % size == 0]
