"""Putting a tensor together from the parts that ranks hold, and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from llmdebug_nb.core.placement import Held, Mirrored, Only, Shard

Place: TypeAlias = tuple[int, ...]  # along the dimensions of a grid of parts


class Recipe(NamedTuple):
    """How parts make a tensor. ``held``: along each dimension of their grid, the last one first.

    ``divisor``: of all elements, at the end. ``shape``: of the result, which lacks the padding
    behind it.
    """

    held: tuple[Held, ...]
    divisor: int
    shape: tuple[int, ...]


def joined(parts: Mapping[Place, torch.Tensor], recipe: Recipe) -> torch.Tensor:
    """Return the whole tensor, in the dtype of the parts.

    Raises RuntimeError: the parts do not go together. KeyError: one is missing.
    """
    whole = held_together(parts, recipe.held)
    whole = whole[tuple(slice(0, size) for size in recipe.shape)]
    return (whole / recipe.divisor).to(whole.dtype) if recipe.divisor != 1 else whole


def held_together(parts: Mapping[Place, torch.Tensor], held: Sequence[Held]) -> torch.Tensor:
    """Return what the parts make, padding included. Raises as `joined` does."""
    for at in range(len(held) - 1, -1, -1):
        lines: dict[Place, dict[int, torch.Tensor]] = {}
        for place, part in parts.items():
            lines.setdefault(place[:at], {})[place[at]] = part
        parts = {place: _along(line, held[at]) for place, line in lines.items()}
    return parts[()]


def _along(line: Mapping[int, torch.Tensor], held: Held) -> torch.Tensor:
    """Return what the parts along one dimension make."""
    if isinstance(held, Only):
        return line[held.at]
    parts = [line[at] for at in sorted(line)]
    if isinstance(held, Shard):
        return torch.cat(_in_turns(parts, held), held.axis)
    if isinstance(held, Mirrored):
        halves = [part.chunk(2, held.axis) for part in parts]
        back = [half[-1] for half in reversed(halves)]
        return torch.cat([*(half[0] for half in halves), *back], held.axis)
    return _reduced(parts, held)


def _in_turns(parts: Sequence[torch.Tensor], shard: Shard) -> list[torch.Tensor]:
    if shard.turns == 1:
        return list(parts)
    pieces = [part.tensor_split(shard.turns, shard.axis) for part in parts]
    return [piece[turn] for turn in range(shard.turns) for piece in pieces]


def _reduced(parts: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Return the reduction of parts; sums are made in float64, as no rank's order is known."""
    first = parts[0]
    exact = first.is_floating_point() and first.dtype != torch.float64
    all_parts = torch.stack([part.double() if exact else part for part in parts])
    if how in ("sum", "avg"):
        total = all_parts.sum(0)
        return (total / len(parts) if how == "avg" else total).to(first.dtype)
    if how == "product":
        return all_parts.prod(0).to(first.dtype)
    if how in ("max", "min"):
        return (all_parts.amax(0) if how == "max" else all_parts.amin(0)).to(first.dtype)
    return first  # replicas
