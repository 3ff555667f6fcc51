"""Narrow a region in which the two programs are written otherwise, from its beginning forwards.

A call of mine is innocent if its result is a step of what golden computes there
(`value_sets.py`). A call that gives such a step once it takes another of golden's tensors was given
the wrong tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon, is_floating
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search import swap_numbers
from llmdebug_nb.search.computed_elsewhere import Known
from llmdebug_nb.search.swap_tensors import Exchange


class Rewritten:
    """A region in which the two programs are written otherwise.

    ``golden``, ``mine``: its operators. ``data``: those that compute with tensors that agree.
    """

    def __init__(
        self,
        exchange: Exchange,
        runs: Runs,
        region: Region,
        golden: list[FlowCall],
        mine: list[FlowCall],
        data: tuple[list[FlowCall], list[FlowCall]],
    ) -> None:
        self._exchange, self._runs, self._region = exchange, runs, region
        self._flows = exchange.flows
        self._golden, self._mine, self._data = golden, mine, data
        dtypes = [r.summary.dtype for c in (*golden, *mine) for r in (*c.inputs, *c.outputs)]
        noise = max((d.error or 0.0 for d in region.entries), default=0.0)
        limit = constants.OPERATORS_EPSILONS * max(map(epsilon, dtypes))
        limit += constants.AMPLIFICATION * noise
        self._limit = min(limit, constants.OTHER_VALUES)
        self._known = self._knows(self._data[0] or golden, 0)

    def narrowed(self) -> Region:
        region = self._region
        golden, mine = self._data[0] or self._golden, self._data[1] or self._mine
        suspects = self._unknown
        golden = self._suspects(golden, self._knows(mine, 1), 0) or golden
        golden, suspects = self._parting(golden, suspects)
        if not suspects:
            return self._by_entries(golden, mine) or Region(
                region.row, golden, mine, region.entries
            )
        found = self._given_another_table() or self._other_weight(suspects[0])
        if found is None:
            found = self._given_another(golden, suspects[0], self._data[0], self._known)
        if found is None and suspects[0] is mine[0]:
            found = self._by_entries(golden, suspects[:1])
        if found is None:
            computes = next((c for c in suspects if not self._known.moves(c)), suspects[0])
            suspects = self._first_lines([*self._tables(computes), *suspects])
        return found or Region(region.row, golden, suspects, region.entries)

    def by_number(self) -> Region | None:
        """Return the region of the call of mine that takes another number than golden, if any.

        With golden's it gives what golden computes.
        """
        region = self._region
        for call in self._unknown[: constants.REGION_SUSPECTS]:
            found = swap_numbers.differing(self._golden, call, self._known, self._runs)
            if found is not None:
                theirs, there, here = found
                return Region(region.row, [theirs], [call], region.entries, numbers=(there, here))
        return None

    @cached_property
    def _unknown(self) -> list[FlowCall]:
        """Mine's calls that golden does not know."""
        return self._suspects(self._data[1] or self._mine, self._known, 1)

    def _first_lines(self, calls: list[FlowCall]) -> list[FlowCall]:
        """Return the calls of the first lines."""
        index = self._runs.mine.run.index
        lines: dict[object, None] = {}
        for at, call in enumerate(calls):
            frames = index.frames(call.key)
            lines[(frames[0].file, frames[0].line) if frames else call] = None
            if len(lines) > constants.REGION_LINES:
                return calls[:at]
        return calls

    def _parting(
        self, golden: list[FlowCall], mine: list[FlowCall]
    ) -> tuple[list[FlowCall], list[FlowCall]]:
        """Return the calls of both from the first two on that take the same tensor."""
        for ours in mine[: constants.REGION_SUSPECTS]:
            for theirs in golden[: constants.REGION_SUSPECTS]:
                if self._share(theirs, ours):
                    return golden[golden.index(theirs) :], mine
        return golden, mine

    def _share(self, golden: FlowCall, mine: FlowCall) -> bool:
        return any(
            self._exchange.same(theirs, ours) or self._known.same(theirs, ours)
            for theirs in golden.inputs
            for ours in mine.inputs
            if identifies_itself(theirs.summary) and identifies_itself(ours.summary)
        )

    def _suspects(self, calls: list[FlowCall], known: Known, side: int) -> list[FlowCall]:
        """Return the calls of one side that the other one does not know, and that matter.

        Before them, those that only move elements, to places that nothing known confirms.
        """
        flow, own = self._flows[side], (self._golden, self._mine)[side]
        takers = {call: flow.takers(call, calls) for call in calls}
        exact = [call for call in calls if known.exactly(call)]
        apart = [c for c in calls if c not in exact and known.apart(c, own)]
        every = {*exact, *apart}
        sure = set(exact)
        for call in reversed(apart):
            if takers[call] and sure.issuperset(takers[call]):
                sure.add(call)
        every |= {c for c in calls if c.gives_indices and not sure.isdisjoint(takers[c])}
        unknown = self._not_rejoining(calls, every, takers, side)
        if not unknown:
            return self._not_rejoining(calls, set(exact), takers, side)
        moved: list[FlowCall] = []
        for call in reversed(apart):
            leads = not {unknown[0], *moved}.isdisjoint(takers[call])
            if leads and call not in sure and known.moves(call):
                moved.insert(0, call)
        return [*moved, *unknown]

    def _not_rejoining(
        self,
        calls: list[FlowCall],
        known: set[FlowCall],
        takers: dict[FlowCall, list[FlowCall]],
        side: int,
    ) -> list[FlowCall]:
        """Return the unknown calls from which not all ways lead to known ones."""
        pair = self._region.row.pair
        flow, last = self._flows[side], (pair.golden, pair.mine)[side]
        rejoin, ends = set(known), set[FlowCall]()
        for call in reversed(calls):
            is_last = call is calls[-1] or (
                last is not None and flow.made_by(last, {r.id for r in call.outputs})
            )
            if takers[call] and not is_last and rejoin.issuperset(takers[call]):
                rejoin.add(call)
            elif not is_last and ends.issuperset(takers[call]):
                ends.add(call)
        rest = [call for call in calls if call not in rejoin]
        return [call for call in rest if call not in ends] or rest

    def _tables(self, suspect: FlowCall) -> list[FlowCall]:
        """Return the calls that lead to a suspect, use no data, and give what golden lacks.

        They make the sines of positions, and the like.
        """
        known = self._knows([c for c in self._golden if c not in self._data[0]], 0)
        leading, flow = [suspect], self._flows[1]
        for call in reversed(self._mine):
            outputs = {r.id for r in call.outputs}
            leads = any(flow.made_by(r, outputs) for c in leading for r in c.inputs)
            if call in self._data[1] or not leads:
                continue
            if not any(identifies_itself(r.summary) for r in call.outputs):
                continue
            if not known.exactly(call) and not known.apart(call, self._mine):
                leading.insert(0, call)
        return leading[:-1]

    def _knows(self, calls: list[FlowCall], side: int) -> Known:
        return Known(calls, side, self._flows, self._runs, self._limit)

    def _given_another_table(self) -> Region | None:
        """Return a smaller region if one of mine's calls that use no data takes another tensor.

        So does a projection of a table whose norm was left out. It combines that with another
        tensor, such as a weight: what is made of one alone may have another form here.
        """
        theirs, ours = map(_using_none, (self._golden, self._mine), self._data)
        known = self._knows(theirs, 0)
        for call in [c for c in ours if len(_numbers(c.inputs)) > 1][: constants.REGION_SUSPECTS]:
            if known.exactly(call) or known.apart(call, self._mine):
                continue
            found = self._given_another(theirs, call, theirs, known)
            if found is not None and found.taken is None:
                last = found.golden[-1]
                leading = self._flows[0].makers(last.outputs[0], after=-1)
                found.golden = [c for c in found.golden if c in leading or c is last]
            if found is not None:
                return found
        return None

    def _given_another(
        self, golden: list[FlowCall], call: FlowCall, calls: Sequence[FlowCall], known: Known
    ) -> Region | None:
        """Return a smaller region if a call gives a step once it takes another tensor.

        ``golden``: its calls that give what mine does not know. ``calls``: those that may give or
        take the other tensor; ``known``: what they compute. A call that only moves elements gives
        those of any tensor that it takes.
        """
        if known.moves(call):
            return None
        calls = (calls or self._golden)[: constants.REGION_SUSPECTS]
        made = {r.id: c for c in self._golden for r in c.outputs}
        others = [r for c in calls for r in (*c.inputs, *c.outputs) if identifies_itself(r.summary)]
        for record in _numbers(call.inputs):
            for other in others:
                if self._exchange.same(other, record) or not self._mends(
                    call, record, other, known
                ):
                    continue
                region = self._region
                if other.id not in made:
                    taker = next(c for c in self._golden if other in c.inputs)
                    return Region(
                        region.row, [taker], [call], region.entries, taken=(other, record)
                    )
                last = made[other.id]
                chain = [c for c in golden if c.start <= last.start] or [last]
                return Region(region.row, chain, [], region.entries, call)
        return None

    def _other_weight(self, call: FlowCall) -> Region | None:
        """Return a smaller region if a call of mine takes a weight that golden takes elsewhere.

        In its place golden takes one of that size that mine takes nowhere.
        """
        wanted = [(c, r) for c in self._golden for r in c.inputs if self._is_weight(r, 0)]
        missing = [each for each in wanted if self._flows[0].agrees(each[1]) is None]
        for record in call.inputs:
            known = self._is_weight(record, 1) and self._exchange.is_entry(record, 1)
            if not known or self._has(1, record, wanted):
                continue
            for taker, other in missing:
                if other.summary.numel == record.summary.numel:
                    region, taken = self._region, (other, record)
                    return Region(region.row, [taker], [call], region.entries, taken=taken)
        return None

    def _is_weight(self, record: Record, side: int) -> bool:
        """Tell whether an operator takes a tensor of numbers that no call has made."""
        of_numbers = identifies_itself(record.summary) and is_floating(record.summary.dtype)
        flow = self._flows[side]
        base = flow.base(record)
        made = base.producer is not None or flow.maker(record) is not None
        return of_numbers and not made and flow.call(base).is_operator

    def _mends(self, call: FlowCall, record: Record, other: Record, known: Known) -> bool:
        """Tell whether a call of mine gives what golden computes once it takes golden's tensor."""
        try:
            result = self._exchange.on_golden(call, record, other)
        except CannotReplay:
            return False
        return known.is_given(result, not self._exchange.is_entry(record, 1))

    def _by_entries(self, *suspects: list[FlowCall]) -> Region | None:
        """Return a smaller region if one side takes a tensor that the other does not take.

        ``suspects``: golden's and mine's calls that may take it.
        """
        region = self._region
        taken = [
            [(c, r) for c in calls for r in _numbers(c.inputs)]
            for calls in (self._golden, self._mine)
        ]
        missing, foreign = (
            [
                (c, r)
                for c, r in taken[at]
                if c in suspects[at]
                and self._exchange.is_entry(r, at)
                and not self._has(at, r, rest)
            ]
            for at, rest in enumerate(taken[::-1])
        )
        if missing and foreign:
            (theirs, wanted), (ours, given) = missing[0], foreign[0]
            return Region(region.row, [theirs], [ours], region.entries, taken=(wanted, given))
        if missing:
            taker, record = missing[0]
            return Region(region.row, [taker], [], region.entries, self._mine[-1], missing=record)
        return None

    def _has(self, side: int, record: Record, others: Sequence[tuple[FlowCall, Record]]) -> bool:
        """Tell whether one of the other side's tensors is the same, or a view of the same."""
        exchange, flows = self._exchange, self._flows
        for _, other in others:
            golden, mine = (other, record) if side else (record, other)
            if exchange.same(golden, mine):
                return True
            if exchange.same(flows[0].base(golden), flows[1].base(mine)):
                return True
        return False


def _using_none(calls: list[FlowCall], data: list[FlowCall]) -> list[FlowCall]:
    """Return the calls that use no data. ``data``: the first that do; later ones may."""
    is_cut = len(data) == constants.REGION_CALLS
    return [c for c in calls if c not in data and not (is_cut and c.start > data[-1].start)]


def _numbers(records: Sequence[Record]) -> list[Record]:
    """Return those that hold numbers of a float, not one alone."""
    return [r for r in records if identifies_itself(r.summary) and is_floating(r.summary.dtype)]
