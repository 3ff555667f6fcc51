"""The gradients that a program reduced over its ranks, with what each rank put into them.

A reducer in C++, as that of DDP, calls no function that a recording sees. But what each rank added
to a gradient is recorded, and what stands there behind the backward pass: that makes a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from llmdebug_nb.core.placement import ACCUMULATED, SHARED, unshared
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.collectives import has_values
from llmdebug_nb.store.rank_checks import Collective
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.world import Group

_Key: TypeAlias = tuple[object, ...]


@dataclass
class _Held:
    """A gradient on one rank. ``before``: behind the last pass. ``added``: in the one that runs."""

    before: Record | None = None
    added: list[Record] = field(default_factory=list)


@dataclass
class _Sum:
    """A gradient behind a pass, on one rank.

    ``before``: what stood there. The program may have filled it with zeros since. ``added``: what
    this rank added; empty if something of it was not recorded.
    """

    gradient: Record
    before: Record | None
    added: Sequence[Record]

    @property
    def parts(self) -> list[Record]:
        return [*([] if self.before is None else [self.before]), *self.added]


def reduced_gradients(
    run: Run, groups: Iterable[Group], unchecked: dict[str, int]
) -> Iterator[list[Collective]]:
    """Yield the gradients that ranks share, each in all the ways in which it may have been made.

    Their reduction is not known. ``groups``: of ranks. ``unchecked``: counts those that can't be
    read, by the reason.
    """
    sets = sorted(map(frozenset, groups), key=len)
    for sums in _sums(run).values():
        there = {each.gradient.site.rank for each in sums}
        for alike in _shared(sums):
            ranks = {each.gradient.site.rank for each in alike}
            group = next((each for each in sets if ranks <= each), ranks)
            why = _unreadable(alike)
            if not group <= there:
                why = "gradients that not all ranks of their group recorded"
            if why:
                unchecked[why] = unchecked.get(why, 0) + 1
                continue
            added = [alike, [_Sum(each.gradient, None, each.added) for each in alike]]
            yield [_collective(run, way) for way in (added if alike[0].before else added[:1])]


def _collective(run: Run, sums: Sequence[_Sum]) -> Collective:
    ranks = [each.gradient.site.rank for each in sums]
    return Collective(
        sums[0].gradient.site,
        "all_reduce",
        {rank: {} for rank in ranks},
        {rank: [_total(run, each)] for rank, each in zip(ranks, sums, strict=True)},
        {rank: [run.load(each.gradient)] for rank, each in zip(ranks, sums, strict=True)},
    )


def _sums(run: Run) -> Mapping[_Key, list[_Sum]]:
    """Return by parameter and pass what each rank has behind it."""
    held: dict[_Key, _Held] = defaultdict(_Held)
    found: dict[_Key, list[_Sum]] = defaultdict(list)
    for record in sorted(run.records(role="grad"), key=lambda each: each.id):
        s = record.site
        if record.placed is not None:
            continue  # the collectives of DTensors are recorded
        here = held[s.rank, s.generation, s.path, unshared(s.slot)]
        if not s.slot.endswith(SHARED):
            here.added.append(record)
            continue
        before, added = None, here.added
        if s.slot.endswith(ACCUMULATED):
            before = here.before
            if before is None or s.step - before.site.step > 1:
                before, added = None, []  # of a step that was not recorded
        here.before, here.added = record, []
        key = s.generation, s.step, s.path, s.call, s.phase, s.slot
        found[key].append(_Sum(record, before, added))
    return found


def _shared(sums: Sequence[_Sum]) -> Iterator[Sequence[_Sum]]:
    """Yield those of ranks that have the same gradient: of the others, each has its own."""
    alike: dict[object, list[_Sum]] = defaultdict(list)
    for each in sums:
        alike[each.gradient.summary.fingerprint].append(each)
    for fingerprint, some in alike.items():
        if fingerprint is not None and len(some) > 1:
            yield some


def _unreadable(sums: Sequence[_Sum]) -> str:
    """Say why a gradient can't be checked; "" if it can be."""
    if not all(each.added for each in sums):
        return "gradients to which each rank's part was not recorded"
    kept = (record for each in sums for record in (each.gradient, *each.parts))
    return "" if all(map(has_values, kept)) else "gradients without values"


def _total(run: Run, what: _Sum) -> torch.Tensor:
    total = run.load(what.parts[0])
    for record in what.parts[1:]:
        total = total + run.load(record)
    return total
