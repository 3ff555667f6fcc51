"""The ranks of a run as a grid: which of them divide one thing among themselves.

A process knows the groups that it is in. Groups of one pattern (ranks 0 and 1, 2 and 3) are a
dimension of the grid; the grid is that of the mesh, if the program made one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.store.run import Run

Group: TypeAlias = tuple[int, ...]
_RANK = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_MOST = 4  # dimensions of a grid: data, pipeline, context or expert, tensor


class _World(msgspec.Struct):
    size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    groups: list[list[_RANK]]
    job: str = ""


def grid_of(run: Run) -> dict[int, tuple[int, ...]]:
    """Return the place of each rank in the grid of a run's ranks.

    Raises:
        CompareError: a rank is missing, the processes belong to several programs, or a rank has
            several of them.
    """
    processes = run.source.processes
    ranks = [int(process["rank"]) for process in processes]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    worlds = [_world(run, process) for process in processes if process.get("world") is not None]
    if len({world.job for world in worlds}) > 1 or len({world.size for world in worlds}) > 1:
        sizes = sorted({world.size for world in worlds})
        raise CompareError(
            f"{run.label} holds processes of several programs (of {_texts(sizes)} ranks): copy the"
            " rank folders of one program into a folder of their own"
        )
    if twice:
        raise CompareError(
            f"{run.label} has several processes of rank {_texts(twice)}: ranks are put together if"
            " each has one; record one start of the program alone"
        )
    size = worlds[0].size if worlds else len(ranks)
    missing = sorted(set(range(size)) - set(ranks)) if worlds else []
    if missing:
        raise CompareError(
            f"{run.label} has {len(ranks)} of {size} ranks: {_texts(missing)} is missing; record"
            " all ranks (leave out the option ranks), and copy their folders into one"
        )
    return _grid(sorted(ranks), {tuple(group) for world in worlds for group in world.groups})


def groups_of(run: Run) -> set[Group]:
    """Return the groups of ranks that the processes of a run know. Raises CompareError."""
    processes = run.source.processes
    worlds = [_world(run, each) for each in processes if each.get("world") is not None]
    return {tuple(group) for world in worlds for group in world.groups}


def _world(run: Run, process: Mapping[str, object]) -> _World:
    try:
        return msgspec.convert(process["world"], _World)
    except msgspec.ValidationError as error:
        raise CompareError(f"{run.label}: the groups of its ranks are damaged: {error}") from None


def _texts(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, …" if len(numbers) > 8 else shown


def _grid(ranks: Sequence[int], groups: Iterable[Group]) -> dict[int, tuple[int, ...]]:
    """Return the places of ranks along the finest dimensions that groups make."""
    dimensions = [_numbers(each) for each in _patterns(groups) if _covers(each, ranks)]
    for count in range(min(len(dimensions), _MOST), 1, -1):
        for some in itertools.combinations(dimensions, count):
            places = {rank: tuple(numbers[rank] for numbers in some) for rank in ranks}
            sizes = [max(numbers.values()) + 1 for numbers in some]
            if math.prod(sizes) == len(ranks) == len(set(places.values())):
                return places
    return {rank: (at,) for at, rank in enumerate(ranks)}


def _patterns(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups of each pattern, the one with the widest strides first."""
    found: dict[Group, list[Group]] = defaultdict(list)
    for group in sorted(groups):
        if len(group) > 1:
            found[tuple(rank - group[0] for rank in group)].append(group)
    return [found[pattern] for pattern in sorted(found, key=lambda each: (-each[1], len(each)))]


def _covers(groups: Sequence[Group], ranks: Sequence[int]) -> bool:
    return sorted(rank for group in groups for rank in group) == list(ranks)


def _numbers(groups: Sequence[Group]) -> dict[int, int]:
    return {rank: at for group in groups for at, rank in enumerate(group)}


def ranks_of(run: Run) -> list[int]:
    """Return the ranks of a run, rising."""
    return sorted({process["rank"] for process in run.source.processes})


def world_size(run: Run) -> int | None:
    """Return how many ranks ran together; None if a run does not tell. Raises CompareError."""
    worlds = [_world(run, each) for each in run.source.processes if each.get("world") is not None]
    return worlds[0].size if worlds else None
