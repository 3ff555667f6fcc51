"""The tensors of a run that lie on several ranks: their parts, and what is said of their places.

A batch that a step computes in several calls (micro-batches) is spread, too: over time. So the
parts of a tensor lie in a grid of ranks and, along its last dimension, of calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from llmdebug_nb.core.kernels.joining import Place
from llmdebug_nb.core.paths import ancestors, is_operator, module_of, operator_of
from llmdebug_nb.core.placement import ACCUMULATED, COLLECTIVES, Held, part_of, unshared
from llmdebug_nb.core.records import Record, Site
from llmdebug_nb.store.renumbered import Renumbered

Step: TypeAlias = tuple[int, int]  # generation and step
_Inside: TypeAlias = "dict[int, dict[str, set[str]]]"  # of a rank: modules inside each path
_Slots: TypeAlias = "dict[_Slot, dict[int, list[Record]]]"
_Noted: TypeAlias = dict[int, list[tuple[Step, Record]]]  # by rank
_Slot: TypeAlias = tuple[Step, str, str, str, str]  # step, path, phase, role and slot


class Dimension(NamedTuple):
    """A dimension of a grid of parts. ``name``: of the mesh's, ``ranks`` or ``time``.

    ``held``: what the program says; None if it says nothing. ``divides``: its ranks may hold other
    modules inside the module, so the tensor may be that of one rank alone.
    """

    name: str
    size: int
    held: Held | None
    divides: bool = False


@dataclass(frozen=True)
class Spread:
    """A tensor in parts. ``site``: that of the whole tensor, its rank 0; ``parts``: by place."""

    site: Site
    dimensions: tuple[Dimension, ...]
    parts: Mapping[Place, Record]

    @property
    def first(self) -> Record:
        return next(iter(self.parts.values()))


class Shape(NamedTuple):
    """What says how a run's records answer to those of another one.

    ``steps``: of the run -> of the whole. ``counts``: how many calls the other run has, by slot.
    ``weights``: the step of its weights. ``grid``: the places of ranks. ``moved``: renames a rank's
    path.
    """

    steps: Mapping[Step, Step]
    counts: Mapping[_Slot, int]
    weights: Step
    grid: Mapping[int, tuple[int, ...]]
    moved: Mapping[int, Renumbered]


def slot_of(record: Record, step: Step) -> _Slot:
    s = record.site
    return step, s.path, s.phase, s.role, s.slot


def spread(records: Sequence[Record], shape: Shape) -> list[Spread]:
    """Return the tensors of a run in their order; those of one rank and call have one part."""
    slots: dict[_Slot, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    inside: _Inside = defaultdict(lambda: defaultdict(set))
    for record in records:
        s = record.site
        step = shape.weights if s.role == "weight" else shape.steps.get((s.generation, s.step))
        if step is None or _is_collective(s.path):
            continue
        moved = replace(record, site=replace(s, path=shape.moved[s.rank](s.path)))
        slots[slot_of(moved, step)][s.rank].append(moved)
        module = module_of(moved.site.path)
        for around in ancestors(module):
            inside[s.rank][around].add(module)
    _prefer_reduced(slots, shape.steps)
    return [each for slot, ranks in slots.items() for each in _calls(slot, ranks, shape, inside)]


def _prefer_reduced(slots: _Slots, steps: Mapping[Step, Step]) -> None:
    """Let the gradients that all ranks share stand for what each adds to them.

    Not where each pass of several was noted by itself: what the program divides their sum by may
    come later.
    """
    noted: dict[tuple[str, str, str], _Noted] = defaultdict(lambda: defaultdict(list))
    for slot in [each for each in slots if each[3] == "grad"]:
        step, path, phase, _, name = slot
        own = unshared(name)
        if own != name:
            for rank, records in slots.pop(slot).items():
                noted[path, phase, own][rank] += [(step, record) for record in records]
    for (path, phase, own), ranks in noted.items():
        shared, passes = _totals(ranks, steps)
        for step, found in shared.items():
            slot = step, path, phase, "grad", own
            local = slots.get(slot, {})
            ends = {rank: len(records) for rank, records in found.items()}
            added = {rank: len(records) for rank, records in local.items()}
            if ends and (ends == added or any(added.get(r, 0) < passes[step][r] for r in ends)):
                slots[slot] = found


def _totals(
    noted: _Noted, steps: Mapping[Step, Step]
) -> tuple[dict[Step, dict[int, list[Record]]], dict[Step, Counter[int]]]:
    """Return, by step and rank, the gradients that backward passes left, and how many passes did.

    What a pass has added to stands for what was there; if that is of another step, for nothing.
    """
    before = dict(zip(sorted(steps)[1:], map(steps.get, sorted(steps)), strict=False))
    totals: dict[Step, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    passes: dict[Step, Counter[int]] = defaultdict(Counter)
    for rank, records in noted.items():
        lost: set[Step] = set()  # steps that began with a gradient of an earlier one
        for step, record in sorted(records, key=lambda each: each[1].id):
            there = totals[step].get(rank, [])
            if record.site.slot.endswith(ACCUMULATED):
                own = record.site.generation, record.site.step
                if not there and (before.get(own) != step or step in lost):
                    lost.add(step)
                    continue
                del there[-1:]
            passes[step][rank] += 1
            totals[step][rank] = [*there, record]
    return totals, passes


def _calls(
    slot: _Slot, ranks: Mapping[int, list[Record]], shape: Shape, inside: _Inside
) -> Iterator[Spread]:
    (generation, step), path, phase, role, name = slot
    for found in ranks.values():
        found.sort(key=lambda r: (r.site.generation, r.site.step, r.site.call))
    most = max(map(len, ranks.values()))
    calls = shape.counts.get(slot, most)
    times, rest = divmod(most, calls)
    if rest or any(len(found) != most for found in ranks.values()):
        calls, times = min(map(len, ranks.values())), 1
    for call in range(calls):
        site = Site(path, step, call, phase, role, name, 0, generation)
        parts = {
            (rank, time): found[call + time * calls]
            for rank, found in ranks.items()
            for time in range(times)
        }
        yield _placed(site, parts, shape, inside)


def _placed(
    site: Site, parts: Mapping[tuple[int, int], Record], shape: Shape, inside: _Inside
) -> Spread:
    """Return a tensor with its parts in the grid; dimensions along which it lies once are left out.

    The grid is the mesh that the program names and the meshes like it, else that of all ranks.
    """
    placed = [record.placed for record in parts.values()]
    names: list[tuple[str, Held | None]]
    places: dict[tuple[int, int], Place] = {}
    first = placed[0]
    if first is not None and all(
        each is not None and each.mesh == first.mesh and each.parts == first.parts
        for each in placed
    ):
        meshes = sorted({each.ranks for each in placed if each is not None})
        names = [*zip(first.names, map(part_of, first.parts), strict=True), ("ranks", None)]
        for (rank, time), record in parts.items():
            assert record.placed is not None
            here = record.placed.at(rank)
            if here is not None:
                places[rank, time] = (*here, meshes.index(record.placed.ranks), time)
    if len(places) != len(parts):
        names = [("ranks", None)] * len(next(iter(shape.grid.values())))
        places = {(rank, time): (*shape.grid[rank], time) for rank, time in parts}
    names.append(("time", None))
    dimensions, kept = [], []
    for at, (name, held) in enumerate(names):
        below: dict[int, set[tuple[str, frozenset[str]]]] = defaultdict(set)
        for key, place in places.items():
            there = parts[key].op, frozenset(inside[key[0]][site.path])
            below[place[at]].add(there)
        if len(below) > 1:
            kept.append(at)
            divides = len(set(map(frozenset, below.values()))) > 1
            dimensions.append(Dimension(name or "ranks", len(below), held, divides))
    grid = {tuple(place[at] for at in kept): parts[key] for key, place in places.items()}
    return Spread(site, tuple(dimensions), dict(sorted(grid.items())))


def _is_collective(path: str) -> bool:
    return is_operator(path) and operator_of(path).startswith(COLLECTIVES)
