"""Find how the parts of a tensor on several ranks make the tensor that golden has.

The program says it of a DTensor. Else the shapes leave few ways, and the values choose among these.
Similar tensors lie alike, so a clear choice holds for all of them. Where a bug leaves no way that
gives golden's values, the way of the tensors of its kind is taken.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llmdebug_nb.align.batch_layout import Load
from llmdebug_nb.align.values import Values, real
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.joining import Place, Recipe, held_together, joined
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.core.paths import any_layer
from llmdebug_nb.core.placement import REPLICATE, Held, Mirrored, Only, Shard
from llmdebug_nb.core.records import Record, Site


class Dimension(Protocol):
    """A dimension of a grid of parts; see `store.spread.Dimension`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def held(self) -> Held | None: ...
    @property
    def divides(self) -> bool: ...


class Spread(Protocol):
    """A tensor in parts; see `store.spread.Spread`."""

    @property
    def site(self) -> Site: ...
    @property
    def dimensions(self) -> Sequence[Dimension]: ...
    @property
    def parts(self) -> Mapping[Place, Record]: ...


@dataclass(frozen=True)
class _Choice:
    """A way, and how far its result is from golden's tensor. ``clear``: no other is as near."""

    recipe: Recipe
    error: float
    clear: bool


class PartFinder:
    """Finds how parts go together, and remembers it for similar tensors.

    ``averaged``: by the name of a dimension, how many gradients of parameters are taken as the
    mean along it, where the program does not say so.
    """

    def __init__(self, golden: Load, mine: Load) -> None:
        self._golden, self._mine = golden, mine
        self._known: dict[Hashable, tuple[tuple[Held, ...], int]] = {}
        self._votes: Counter[Hashable] = Counter()
        self.averaged: Counter[str] = Counter()

    def recipe(self, spread: Spread, golden: Record | None, last: bool) -> Recipe | None:
        """Return how parts go together; None if that is not known (yet).

        ``golden``: the tensor that they should make; None if there is none. ``last``: whatever is
        likeliest is taken, as no further tensor will tell more.
        """
        found = self._found(spread, golden, last)
        if found is not None and spread.site.role == "grad":
            for dimension, held in zip(spread.dimensions, found.held, strict=True):
                self.averaged[dimension.name] += held == "avg" and dimension.held is None
        return found

    def _found(self, spread: Spread, golden: Record | None, last: bool) -> Recipe | None:
        if golden is None:
            return self._alone(spread)
        target = golden.summary.shape
        ways = list(_ways(spread, target))
        if not ways:
            return None
        same = [way for way in ways if _are_replicas(spread, way)]
        if same:
            return self._farthest(spread, golden, Recipe(*same[0], target))
        key = _key(spread, target)
        known = self._known.get(key) or (ways[0] if len(ways) == 1 else None)
        if known is not None:
            return self._farthest(spread, golden, Recipe(*known, target))
        choice = self._nearest(spread, golden, ways)
        if choice is None:
            return Recipe(*self._likeliest(spread, ways), target) if last else None
        held, divisor, _ = choice.recipe
        if choice.error <= constants.WRONG_LAYOUT:
            self._votes[self._vote(spread, held, divisor)] += 1
            if choice.clear:
                self._known[key] = held, divisor
        elif last:
            held, divisor = self._likeliest(spread, ways)
        else:
            return None
        return self._farthest(spread, golden, Recipe(held, divisor, target))

    def _alone(self, spread: Spread) -> Recipe | None:
        """Return how parts go together by what the program says, or because they are equal."""
        held: list[Held] = []
        for dimension in spread.dimensions:
            held.append(REPLICATE if dimension.held is None else dimension.held)
        way = tuple(held), 1
        if any(each.held is None for each in spread.dimensions) and not _are_replicas(spread, way):
            return None
        shape = _shape(spread, way[0])
        return None if shape is None else Recipe(*_of_firsts(way), shape)

    def _nearest(
        self, spread: Spread, golden: Record, ways: Sequence[tuple[tuple[Held, ...], int]]
    ) -> _Choice | None:
        there, parts = self._values(golden, self._golden), self._parts(spread)
        if there is None or parts is None:
            return None
        found = []
        for held, divisor in ways:
            recipe = Recipe(held, divisor, golden.summary.shape)
            errors = [_error(there, parts, each) for each in _replicas(recipe, spread)]
            found.append((min(errors), recipe))
        least = min(error for error, _ in found)
        near = [each for each in found if each[0] <= least * constants.LAYOUT_TIE]
        clear = len(near) == 1 and least <= constants.UNCLEAR_LAYOUT
        return _Choice(near[0][1], near[0][0], clear)

    def _farthest(self, spread: Spread, golden: Record, recipe: Recipe) -> Recipe:
        """Return a recipe with one of several replicas: the one farthest from golden.

        A nearer one would hide that a rank is out of step.
        """
        choices = list(_replicas(recipe, spread))
        if len(choices) == 1 or _are_replicas(spread, recipe[:2]):
            return choices[0]
        there, parts = self._values(golden, self._golden), self._parts(spread)
        if there is None or parts is None:
            return choices[0]
        return max(choices, key=lambda each: _error(there, parts, each))

    def _likeliest(
        self, spread: Spread, ways: Sequence[tuple[tuple[Held, ...], int]]
    ) -> tuple[tuple[Held, ...], int]:
        """Return the way of most tensors of this kind; of none, the simplest."""
        return max(ways, key=lambda way: self._votes[self._vote(spread, *way)])

    def _vote(self, spread: Spread, held: tuple[Held, ...], divisor: int) -> Hashable:
        names = tuple(each.name for each in spread.dimensions)
        is_gradient = spread.site.role == "grad"
        return spread.site.phase, is_gradient, names, tuple(map(str, held)), divisor

    def _parts(self, spread: Spread) -> dict[Place, torch.Tensor] | None:
        parts = {place: self._values(part, self._mine) for place, part in spread.parts.items()}
        found = {place: values for place, values in parts.items() if values is not None}
        return found if len(found) == len(parts) else None

    def _values(self, record: Record, load: Load) -> torch.Tensor | None:
        if record.payload is None or record.kept:
            return None
        try:
            return load(record)
        except (CorruptDumpError, TensorLookupError, RuntimeError):
            return None


def _ways(spread: Spread, target: tuple[int, ...]) -> Iterator[tuple[tuple[Held, ...], int]]:
    """Yield what may be held along each dimension, so that golden's shape results; and divisors."""
    gradient = spread.site.phase == "backward" and spread.site.role != "grad"
    options = [list(_options(each, spread)) for each in spread.dimensions]
    for held in itertools.product(*options):
        shape = _shape(spread, held)
        if shape is None or not _fits(shape, target, held, spread):
            continue
        yield held, 1
        open_sizes = [
            each.size
            for each, one in zip(spread.dimensions, held, strict=True)
            if each.held is None and isinstance(one, Shard)
        ]
        if gradient and open_sizes:  # of the mean over a part of the batch
            products = {
                math.prod(some)
                for count in range(1, len(open_sizes) + 1)
                for some in itertools.combinations(open_sizes, count)
            }
            yield from ((held, divisor) for divisor in sorted(products, reverse=True))


def _options(dimension: Dimension, spread: Spread) -> Iterator[Held]:
    """Yield what may be held along a dimension, the simplest first."""
    if dimension.held is not None:
        yield dimension.held
        return
    if dimension.divides:
        yield from map(Only, range(dimension.size))
    if dimension.name != "time" and not dimension.divides:
        yield REPLICATE
    axes = range(len(next(iter(spread.parts.values())).summary.shape))
    if spread.site.role != "grad" or dimension.name != "time":
        yield from map(Shard, axes)
    yield from ("avg", "sum")
    if dimension.name != "time":
        yield from (
            Shard(axis, turns) for axis in axes for turns in range(2, constants.MOST_TURNS + 1)
        )
        yield from map(Mirrored, axes)


def _shape(spread: Spread, held: Sequence[Held]) -> tuple[int, ...] | None:
    """Return the shape that parts make; None if they do not go together."""
    if -1 in {size for part in spread.parts.values() for size in part.summary.shape}:
        return None
    parts = {
        place: torch.empty(part.summary.shape, device="meta")
        for place, part in spread.parts.items()
    }
    try:
        return tuple(held_together(parts, held).shape)
    except (RuntimeError, KeyError, IndexError, ValueError):
        return None


def _fits(
    shape: tuple[int, ...], target: tuple[int, ...], held: Sequence[Held], spread: Spread
) -> bool:
    """Tell whether a shape is golden's, or has padding behind it on an axis that is divided."""
    if shape == target:
        return True
    if len(shape) != len(target):
        return False
    longer = [
        axis for axis, (own, other) in enumerate(zip(shape, target, strict=True)) if own != other
    ]
    shards = {each.axis for each in held if isinstance(each, Shard)}
    if len(longer) != 1 or longer[0] not in shards:
        return False
    axis = longer[0]
    largest = max(part.summary.shape[axis] for part in spread.parts.values())
    return 0 < shape[axis] - target[axis] < largest


def _are_replicas(spread: Spread, way: tuple[tuple[Held, ...], int]) -> bool:
    """Tell whether a way takes replicas alone, and these are equal bit for bit."""
    held, divisor = way
    lines: dict[Place, set[str | None]] = {}
    along = [at for at, each in enumerate(held) if each == REPLICATE]
    if not along or divisor != 1:
        return False
    if any(each.held is None for at, each in enumerate(spread.dimensions) if at not in along):
        return False
    for place, part in spread.parts.items():
        rest = tuple(at for number, at in enumerate(place) if number not in along)
        lines.setdefault(rest, set()).add(part.summary.fingerprint)
    return all(len(each) == 1 and None not in each for each in lines.values())


def _of_firsts(way: tuple[tuple[Held, ...], int]) -> tuple[tuple[Held, ...], int]:
    return tuple(Only(0) if each == REPLICATE else each for each in way[0]), way[1]


def _replicas(recipe: Recipe, spread: Spread) -> Iterator[Recipe]:
    """Yield the recipe with each of the replicas alone."""
    choices = [
        list(map(Only, range(dimension.size))) if each == REPLICATE else [each]
        for each, dimension in zip(recipe.held, spread.dimensions, strict=True)
    ]
    for held in itertools.product(*choices):
        yield recipe._replace(held=tuple(held))


def _error(golden: torch.Tensor, parts: Mapping[Place, torch.Tensor], recipe: Recipe) -> float:
    try:
        whole = joined(parts, recipe)
        error = Values.of(golden, whole).error
    except (RuntimeError, KeyError, IndexError, ValueError):
        return math.inf
    # values that are all alike, or a single one, are known by their size alone
    return error if error < math.inf else relative_l2(real(golden).double(), real(whole).double())


def _key(spread: Spread, target: tuple[int, ...]) -> Hashable:
    """Return what similar tensors have in common: those of a layer lie as those of the next."""
    site = spread.site
    shapes = tuple(part.summary.shape for part in spread.parts.values())
    kinds = tuple((each.name, each.size, each.held, each.divides) for each in spread.dimensions)
    return any_layer(site.path), site.phase, site.role, site.slot, shapes, kinds, target
