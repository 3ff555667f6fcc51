"""The gradients that a program reduced over its ranks, with what each rank put into them.

A reducer in C++, as that of DDP, calls no function that a recording sees. But what each rank added
to a gradient is recorded, and what stands there behind the backward pass: that makes a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from llmdebug_nb.core.placement import ACCUMULATED, SHARED, unshared
from llmdebug_nb.core.rank_checks import Collective
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.collectives import has_values
from llmdebug_nb.store.run import Run

_Key: TypeAlias = tuple[object, ...]


@dataclass
class _Held:
    """What one rank put into a gradient. ``step``: of the latest pass, None of none."""

    parts: list[Record] = field(default_factory=list)  # of the passes since it was zero
    new: list[Record] = field(default_factory=list)  # of the pass that runs
    step: int | None = None


@dataclass
class _Sum:
    """A gradient behind a pass, on one rank, and the parts that it should be made of."""

    gradient: Record
    parts: Sequence[Record]


def reduced_gradients(run: Run, unchecked: dict[str, int]) -> Iterator[Collective]:
    """Yield the gradients that ranks share, and that one of them can't have made alone.

    Their ``op`` is not known. ``unchecked``: counts those that can't be read, by the reason.
    """
    for sums in _sums(run).values():
        for alike in _shared(sums):
            why = _unreadable(alike)
            if why:
                unchecked[why] = unchecked.get(why, 0) + 1
                continue
            yield Collective(
                alike[0].gradient.site,
                "all_reduce",
                {each.gradient.site.rank: {} for each in alike},
                {each.gradient.site.rank: [_total(run, each.parts)] for each in alike},
                {each.gradient.site.rank: [run.load(each.gradient)] for each in alike},
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
            here.new.append(record)
            continue
        follows = here.step is not None and 0 <= s.step - here.step <= 1
        before = here.parts if s.slot.endswith(ACCUMULATED) else []
        known = follows or not s.slot.endswith(ACCUMULATED)
        here.parts, here.new, here.step = [*before, *here.new], [], s.step
        key = s.generation, s.step, s.path, s.call, s.phase, s.slot
        found[key].append(_Sum(record, here.parts if known else ()))
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
    if not all(each.parts for each in sums):
        return "gradients to which each rank's part was not recorded"
    kept = (each for some in sums for each in (some.gradient, *some.parts))
    return "" if all(map(has_values, kept)) else "gradients without values"


def _total(run: Run, parts: Sequence[Record]) -> torch.Tensor:
    total = run.load(parts[0])
    for part in parts[1:]:
        total = total + run.load(part)
    return total
