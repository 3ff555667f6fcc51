"""How a tensor is spread over the ranks of a mesh: what each rank holds of it.

A mesh is a grid of ranks. Along each of its dimensions, the ranks hold parts of the tensor
(`Shard`), the same values (`Replicate`), or summands of it (`Partial`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from llmdebug_nb.core import constants

COLLECTIVE = "collective"  # the role of what a collective says of itself: its ranks, its reduction
COLLECTIVES = "Distributed."  # the prefix of their operators
# behind the slot of a gradient: behind the backward pass, over all ranks; of a pass that added to
# what was there, all of it
REDUCED, ACCUMULATED = " reduced", " accumulated"
SHARED = (REDUCED, ACCUMULATED)
REPLICATE = "replicate"
REDUCTIONS = ("sum", "avg", "max", "min", "product")
_PART = rf"(shard) (\d{{1,3}})(?: in (\d{{1,6}}))?|{REPLICATE}|{'|'.join(REDUCTIONS)}"
_SIZE = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_RANK = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_DIMENSION = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


def unshared(slot: str) -> str:
    """Return the slot of what a rank itself adds to a gradient that all ranks share."""
    return slot.removesuffix(ACCUMULATED).removesuffix(REDUCED)


class Shard(NamedTuple):
    """A part along an axis. ``turns``: how often the parts follow each other, over and over.

    With two ranks and two turns, rank 0 holds the first and the third quarter.
    """

    axis: int
    turns: int = 1

    def __str__(self) -> str:
        return f"shard {self.axis}" + (f" in {self.turns}" if self.turns > 1 else "")


class Mirrored(NamedTuple):
    """Two parts along an axis: of n ranks, rank r holds the r-th and the (2n-1-r)-th of 2n.

    So do the ranks of causal attention that share its work evenly.
    """

    axis: int

    def __str__(self) -> str:
        return f"shard {self.axis}, mirrored"


class Only(NamedTuple):
    """The whole tensor, of one rank alone: the ``at``-th along the dimension."""

    at: int

    def __str__(self) -> str:
        return f"of number {self.at} alone"


Held: TypeAlias = Shard | Mirrored | Only | str  # str: `REPLICATE`, or the reduction of summands


class Placement(NamedTuple):
    """Where a rank's part of a tensor belongs.

    ``mesh``: sizes of the mesh. ``ranks``: those of the mesh, row by row. ``names``: of its
    dimensions, "" for one without. ``parts``: what the ranks along each dimension hold, as text:
    ``replicate``, ``shard 0``, ``shard 0 in 2`` (turns), or the reduction of summands: ``sum``,
    ``avg``. ``shape``: of the whole tensor.
    """

    mesh: tuple[_DIMENSION, ...]
    ranks: tuple[_RANK, ...]
    names: tuple[str, ...]
    parts: tuple[str, ...]
    shape: tuple[_SIZE, ...]

    def __str__(self) -> str:
        named = (f"{name or at}: {part}" for at, (name, part) in enumerate(self._named()))
        return ", ".join(named)

    def _named(self) -> zip[tuple[str, str]]:
        return zip(self.names, self.parts, strict=True)

    def at(self, rank: int) -> tuple[int, ...] | None:
        """Return the place of a rank in the mesh; None if it is not in it."""
        if rank not in self.ranks:
            return None
        place, left = [], self.ranks.index(rank)
        for size in reversed(self.mesh):
            left, here = divmod(left, size)
            place.append(here)
        return tuple(reversed(place))

    def as_json(self) -> str:
        return json.dumps(self)


def read(text: str) -> Placement:
    """Read a placement. Raises ValueError."""
    try:
        found = msgspec.json.decode(text, type=Placement)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no placement: {error}") from None
    sizes = len(found.mesh), len(found.names), len(found.parts)
    if len(set(sizes)) != 1 or len(found.shape) > constants.MOST_DIMENSIONS:
        raise ValueError(f"a placement over {sizes[0]} dimensions with {sizes[2]} parts")
    if len(found.ranks) != math.prod(found.mesh) or len(set(found.ranks)) != len(found.ranks):
        raise ValueError(f"a mesh of sizes {found.mesh} with {len(found.ranks)} ranks")
    for part in found.parts:
        held = part_of(part)
        if isinstance(held, Shard) and held.axis >= len(found.shape):
            raise ValueError(f"{part!r} of a tensor with {len(found.shape)} axes")
    return found


def part_of(text: str) -> Shard | str:
    """Read what the ranks along a dimension hold. Raises ValueError."""
    found = re.fullmatch(_PART, text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is nothing that ranks hold of a tensor")
    if found[1] is None:
        return text
    return Shard(int(found[2]), max(int(found[3] or 1), 1))
