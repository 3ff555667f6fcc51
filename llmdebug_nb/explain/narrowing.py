"""Narrow a region to the calls that make its error, from its end backwards.

A call of mine is innocent if it answers to a call of golden: both do the same with their inputs,
by name and arguments, or because mine's call gives golden's result on golden's tensors. Then the
error is in what it takes.
"""

from __future__ import annotations

import torch

from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.calls import kind_of_operator
from llmdebug_nb.explain.flow import Flow, FlowCall
from llmdebug_nb.explain.frontier import Region
from llmdebug_nb.explain.replay import Replayed
from llmdebug_nb.explain.runs import CannotReplay, Runs


class Narrowing:
    """Narrows the regions of one comparison."""

    def __init__(self, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self._flows, self._runs = flows, runs

    def narrowed(self, region: Region) -> Region:
        """Return the region without the calls that only pass its error on."""
        golden, mine = region.row.pair.golden, region.row.pair.mine
        while golden is not None and mine is not None:
            makers = self._maker(0, golden, region), self._maker(1, mine, region)
            theirs, ours = makers
            if theirs is None or ours is None:
                break
            left, right = self._unsettled(theirs, ours)
            if not left and not right:
                return self._cut(region, [theirs], [ours])
            region = self._until(region, theirs, ours)
            if len(left) != 1 or len(right) != 1:
                break
            if not self._answers(theirs, ours, left[0], right[0]):
                break
            golden, mine = left[0], right[0]
            alone = [f.agrees(r) is None for f, r in zip(self._flows, (golden, mine), strict=True)]
            if not any(alone):
                return self._cut(region, [theirs], [ours])
            if alone == [True, False]:
                return self._cut(region, self._chain(0, golden, region), [], ours)
            if alone == [False, True]:
                return self._cut(region, [], self._chain(1, mine, region), theirs)
        return region

    def _cut(
        self,
        region: Region,
        golden: list[FlowCall],
        mine: list[FlowCall],
        before: FlowCall | None = None,
    ) -> Region:
        return Region(region.row, golden, mine, region.entries, before)

    def _until(self, region: Region, golden: FlowCall, mine: FlowCall) -> Region:
        """Return the region without the calls after these two."""
        return self._cut(
            region,
            [call for call in region.golden if call.start <= golden.start],
            [call for call in region.mine if call.start <= mine.start],
        )

    def _chain(self, side: int, record: Record, region: Region) -> list[FlowCall]:
        """Return the calls of a region that lead to a tensor of one side."""
        last = self._maker(side, record, region)
        calls = (region.golden, region.mine)[side]
        return [call for call in calls if last is not None and call.start <= last.start]

    def _maker(self, side: int, record: Record, region: Region) -> FlowCall | None:
        """Return the operator of the region that makes a tensor."""
        flow, calls = self._flows[side], (region.golden, region.mine)[side]
        for _ in range(len(flow.records)):
            sources, maker = flow.sources(record)
            if maker is not None:
                return maker if maker.is_operator and maker in calls else None
            if not sources:
                return None
            record = sources[0]
        return None

    def _unsettled(self, golden: FlowCall, mine: FlowCall) -> tuple[list[Record], list[Record]]:
        """Return the inputs of two calls that do not hold the same values."""
        right = [record for record in mine.inputs if _is_telling(record)]
        left = []
        for record in filter(_is_telling, golden.inputs):
            same = next((other for other in right if self._same(record, other)), None)
            if same is None:
                left.append(record)
            else:
                right.remove(same)
        return left, right

    def _same(self, golden: Record, mine: Record) -> bool:
        if not self._flows[0].agrees(golden):
            return False
        others = (d.pair.mine for d in self._flows[0].rows[golden.id])
        return any(o is not None and (o.id == mine.id or _same_bytes(o, mine)) for o in others)

    def _answers(self, golden: FlowCall, mine: FlowCall, left: Record, right: Record) -> bool:
        """Tell whether mine's call does with golden's tensor what golden's call does."""
        same = kind_of_operator(golden.outputs[0].op) == kind_of_operator(mine.outputs[0].op)
        runs = self._runs
        scalars = runs.golden.scalars(golden.key), runs.mine.scalars(mine.key)
        if same and list(scalars[0].values()) == list(scalars[1].values()):
            return True
        try:
            return self._gives_golden(golden, mine, left, right)
        except CannotReplay:
            return same

    def _gives_golden(self, golden: FlowCall, mine: FlowCall, left: Record, right: Record) -> bool:
        """Tell whether mine's call gives golden's output if it takes golden's tensor."""
        given = self._runs.golden.load(left)
        if left.summary.shape != right.summary.shape:
            raise CannotReplay("the tensors have other shapes")

        def load(slot: str) -> torch.Tensor:
            record = next(r for r in mine.inputs if r.site.slot == slot)
            own = self._runs.mine.load(record)
            return given.to(own.dtype) if record.id == right.id else own

        result = next(iter(Replayed(self._runs.mine, mine.key).run_on(load).values()))
        wanted = self._runs.golden.load(golden.outputs[0])
        rows = self._flows[0].rows[left.id]
        limit = max((d.limit or 0.0 for d in rows), default=0.0)
        if result.numel() != wanted.numel():
            return False
        result = result.reshape(wanted.shape).to(wanted.dtype)
        return self._runs.error(wanted, result) <= max(limit, _SAME_RESULT)


# relative L2: far above the rounding of one operator in any dtype of 16 bits, and far below what a
# wrong scale or axis makes
_SAME_RESULT = 0.02


def _is_telling(record: Record) -> bool:
    """Tell whether a tensor has values of its own: it is no constant."""
    s = record.summary
    return s.numel > 1 and s.min != s.max


def _same_bytes(one: Record, other: Record) -> bool:
    a, b = one.summary, other.summary
    return a.fingerprint is not None and (a.fingerprint, a.dtype) == (b.fingerprint, b.dtype)
