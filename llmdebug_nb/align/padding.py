"""Runs as they are aligned: without what they compute at places of a batch that hold no token.

What is there is no one's result, and right programs differ there. So tensors are paired by what
they hold at tokens: elsewhere they are taken as 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from llmdebug_nb.align.batch_layout import BatchMap, BatchMaps, Load
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.kernels.masks import is_added
from llmdebug_nb.core.kernels.padding import Blanks, Padding, may_be_mask, zeroed
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record

Sides = tuple[list[Record], list[Record]]


class AtTokens:
    """The records of two runs, and what loads them, without what is at blank places.

    ``sides``, ``load``: those given, if golden has no such places or its values are not there.
    """

    def __init__(self, sides: Sides, load: tuple[Load, Load] | None) -> None:
        self.sides, self.load = sides, load
        self._given: tuple[dict[int, Record], ...] = ({}, {})  # by id, of those that changed
        if load is None:
            return
        self._padding = Padding(load[0])
        for record in sides[0]:
            self._padding.add(record)
        ranks = ({record.site.rank for record in own} for own in sides)
        if self._padding.is_known and next(ranks) == next(ranks):
            self._read, self._maps = load, BatchMaps(sides, load)
            self._longest: dict[tuple[int, int], int] = {}  # mask, by generation and step
            for record in filter(lambda r: may_be_mask(r.summary), chain(*sides)):
                step, length = (record.site.generation, record.site.step), record.summary.shape[-1]
                self._longest[step] = max(length, self._longest.get(step, 0))
            golden, mine = ([self._shown(r, side) for r in own] for side, own in enumerate(sides))
            self.sides, self.load = (golden, mine), (partial(self._load, 0), partial(self._load, 1))

    def restored(self, pairs: list[Pair]) -> list[Pair]:
        """Return pairs of the records that were given."""
        if not any(self._given):
            return pairs
        golden, mine = self._given
        return [
            replace(
                pair,
                golden=pair.golden and golden.get(pair.golden.id, pair.golden),
                mine=pair.mine and mine.get(pair.mine.id, pair.mine),
            )
            for pair in pairs
        ]

    def _shown(self, record: Record, side: int) -> Record:
        """Return a record with the statistics of what it holds at tokens."""
        if record.payload is None or record.kept is not None or self._blanks(record) is None:
            return record
        try:
            summary = summarize(self._load(side, record))
        except (CorruptDumpError, TensorLookupError):
            return record
        self._given[side][record.id] = record
        return replace(record, summary=summary)

    def _load(self, side: int, record: Record) -> torch.Tensor:
        values = self._read[side](record)
        blanks, shape = self._blanks(record), tuple(values.shape)
        if blanks is None:
            return values
        readings = blanks.readings(shape)
        longest = self._longest.get((record.site.generation, record.site.step), 0)
        if longest > blanks.tokens:  # one of the runs has a cache of fixed length
            readings = chain(readings, blanks.up_to(longest).readings(shape))
        reading = next(readings, None)
        return values if reading is None else zeroed(values, reading.blank(reading.axes, shape))

    def _blanks(self, record: Record) -> Blanks | None:
        """Return the blank places of a tensor's step, if it may hold states there."""
        site, summary = record.site, record.summary
        if site.role == "weight" or not is_floating(summary.dtype) or is_added(summary):
            return None
        found = self._maps.of(site.generation, site.step)
        return self._padding.of(site) if found is None or _end_alike(found) else None


def _end_alike(batches: BatchMap) -> bool:
    """Tell whether golden's tokens are as far from the end of their rows as mine's."""
    golden, mine = batches.golden[1], batches.mine[1]
    return all(r.row == r.my_row and golden - r.start == mine - r.my_start for r in batches.spans)
