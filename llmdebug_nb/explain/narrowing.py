"""Narrow a region to the calls that make its error.

From its end backwards: a call of mine is innocent if it answers to a call of golden. Both do the
same with their inputs, by name and arguments, or because mine's call gives golden's result on
golden's tensors. Then the error is in what it takes.

Where the two are written otherwise, from its beginning forwards: a call of mine is innocent if its
result is a step of what golden computes there (`inside.py`). A call that gives such a step once it
takes another of golden's tensors was given the wrong tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon, is_floating
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.exchange import Exchange
from llmdebug_nb.explain.flow import Flow, FlowCall, is_telling, same_bytes
from llmdebug_nb.explain.frontier import Region
from llmdebug_nb.explain.known import Known
from llmdebug_nb.explain.operators import CannotReplay
from llmdebug_nb.explain.runs import Runs


class Narrowing:
    """Narrows the regions of one comparison."""

    def __init__(self, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self.flows, self._runs, self.exchange = flows, runs, Exchange(flows, runs)

    def narrowed(self, region: Region) -> Region:
        """Return the region without the calls that only pass its error on."""
        region = self._given(region) or self._around(self._backwards(region))
        operators = [[c for c in side if c.is_operator] for side in (region.golden, region.mine)]
        if all(operators) and sum(map(len, operators)) > 2:
            rewritten = _Rewritten(self, self._runs, region, operators[0], operators[1])
            region = self._around(self._made(rewritten.narrowed(), region))
        return self._chosen(region)

    def _made(self, region: Region, whole: Region) -> Region:
        """Return the region behind two tensors that calls take, if both programs make them there.

        ``whole``: the region before it was narrowed, with all its calls.
        """
        taken = region.taken
        if taken is None or not all(self._is_made(at, r) for at, r in enumerate(taken)):
            return region
        found = self._backwards(whole, taken)
        return region if found is whole else found

    def _chosen(self, region: Region) -> Region:
        """Return the region of the operators that take another part of a tensor, if mine's does.

        The part is golden's too: nothing but the place where it is taken tells that it is wrong.
        """
        if region.taken is None:
            return region
        ways = [
            self._copies(flow, record)
            for flow, record in zip(self.flows, region.taken, strict=True)
        ]
        theirs, ours = (flow.maker(way[-1]) for flow, way in zip(self.flows, ways, strict=True))
        if theirs is None or ours is None or not any(map(self.flows[1].is_chosen, ways[1])):
            return region
        return Region(region.row, [theirs], [ours], region.entries)

    def _copies(self, flow: Flow, record: Record) -> list[Record]:
        """Return the tensor that a call takes, and those that it is a copy of, in turn."""
        way = [flow.base(record)]
        while (maker := flow.maker(way[-1])) is not None:
            same = next((r for r in maker.inputs if same_bytes(r, way[-1])), None)
            if same is None:
                break
            way.append(flow.base(same))
        return way

    def depending_on_data(self, calls: Sequence[FlowCall], side: int) -> list[FlowCall]:
        """Return the calls that compute with tensors that agree, the first ones.

        What a program makes of shapes and constants alone, such as masks, is no such call, nor is
        one that gives a constant.
        """
        made: set[int] = set()
        found = []
        for call in calls:
            if any(map(is_telling, call.outputs)) and any(
                self._is_data(r, side) or self.flows[side].made_by(r, made) for r in call.inputs
            ):
                made |= {record.id for record in call.outputs}
                found.append(call)
        return found[: constants.REGION_CALLS]

    def made_up(self, call: FlowCall, calls: Sequence[FlowCall], side: int) -> FlowCall:
        """Return the outermost module call that consists of these calls, one of them among it.

        The call itself if there is none. What gives indices or flags alone, and what makes
        constants, may run elsewhere too.
        """
        found, around = call, call.around
        while around is not None:
            computing = [c for c in around.operators if self._computes(c, side)]
            if not all(c in calls for c in computing):
                break
            found, around = around if len(computing) > 1 else found, around.around
        return found

    def _computes(self, call: FlowCall, side: int) -> bool:
        """Tell whether a call makes new values of data."""
        idle = call.gives_indices or call.passes_on
        return not idle and not all(map(self.flows[side].is_constant, call.outputs))

    def _is_data(self, record: Record, side: int) -> bool:
        """Tell whether a tensor, or what it is a view of, was computed and agrees.

        A weight has no producer.
        """
        flow = self.flows[side]
        base = flow.records.get(record.producer) if record.producer is not None else None
        if base is None or not is_telling(record):
            return False
        if flow.is_constant(base):
            return False
        takes = flow.call(base).inputs  # indices may be chosen by data, as those of topk are
        if not any(is_floating(r.summary.dtype) for r in (record, *takes)):
            return False
        return bool(flow.agrees(record)) or (
            flow.agrees(record) is None and bool(flow.agrees(base))
        )

    def _given(self, region: Region) -> Region | None:
        """Return the region before a module without recorded code that is given another tensor.

        Mine's is one that golden has elsewhere, so that they are no two ways to pass one tensor.
        """
        pair = region.row.pair
        if pair.golden is None or pair.mine is None or region.row.site.role != "output":
            return None
        theirs, ours = self.flows[0].call(pair.golden), self.flows[1].call(pair.mine)
        if any(call.is_operator or call.inner for call in (theirs, ours)):
            return None
        return self._is_given(region, theirs, ours)

    def _is_given(self, region: Region, theirs: FlowCall, ours: FlowCall) -> Region | None:
        """Return the region before a module if it is given another tensor."""
        left, right = self.exchange.unsettled(theirs, ours)
        if len(left) != 1 or len(right) != 1 or not self.flows[1].agrees(right[0]):
            return None
        if len({is_floating(r.summary.dtype) for r in (left[0], right[0])}) > 1:
            return None  # a mask in another form
        return Region(region.row, [], [], region.entries, ours, (left[0], right[0]))

    def _around(self, region: Region) -> Region:
        """Return the region before the outermost module that is given another tensor.

        What it computes of that tensor is golden's too, if golden computes it elsewhere.
        """
        found = region
        if region.is_given_another(self.flows[1]) and region.golden and region.mine:
            theirs, ours = region.golden[-1].around, region.mine[-1].around
            while theirs is not None and ours is not None:
                alone = theirs.inner == region.golden and ours.inner == region.mine
                if alone or self._are_pair(theirs, ours):
                    found = self._is_given(region, theirs, ours) or found
                theirs, ours = theirs.around, ours.around
        return found

    def _are_pair(self, golden: FlowCall, mine: FlowCall) -> bool:
        records = (*golden.inputs, *golden.outputs)
        rows = (d for record in records for d in self.flows[0].rows[record.id])
        others = (d.pair.own(1) for d in rows if d.pair.at_its_place)
        return any(other is not None and other.site.key == mine.key for other in others)

    def _backwards(
        self, region: Region, start: tuple[Record | None, Record | None] | None = None
    ) -> Region:
        """Return the region without the calls from two tensors on that do the same.

        ``start``: the two tensors; those of its row, if it is left out.
        """
        golden, mine = start or (region.row.pair.golden, region.row.pair.mine)
        while golden is not None and mine is not None:
            makers = self._maker(0, golden, region), self._maker(1, mine, region)
            theirs, ours = makers
            if theirs is None or ours is None:
                break
            left, right = self.exchange.unsettled(theirs, ours)
            if not left and not right:
                return self._cut(region, [theirs], [ours])
            region = self._until(region, theirs, ours)
            if len(left) != 1 or len(right) != 1:
                break
            if not self.exchange.answers(theirs, ours, left[0], right[0]):
                break
            golden, mine = left[0], right[0]
            alone = [self._is_made(0, golden), self._is_made(1, mine)]
            if not any(alone):
                found = self._cut(region, [theirs], [ours])
                found.taken = golden, mine
                return found
            if alone == [True, False]:
                chain = self._chain(0, golden, region)
                if any(self.exchange.same(r, mine) for call in chain for r in call.inputs):
                    return self._cut(region, chain, [], ours)
                found = self._cut(region, [theirs], [ours])  # mine takes another tensor
                found.taken = golden, mine
                return found
            if alone == [False, True] and (chain := self._chain(1, mine, region)):
                return self._cut(region, [], chain, theirs)
        return region

    def _is_made(self, side: int, record: Record) -> bool:
        """Tell whether a tensor without a partner is made in the region: no view of what agrees."""
        flow = self.flows[side]
        base = flow.records.get(record.producer) if record.producer is not None else None
        return flow.agrees(record) is None and not (base is not None and flow.agrees(base))

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
        maker = self.flows[side].maker(record)
        return maker if maker in (region.golden, region.mine)[side] else None


class _Rewritten:
    """A region in which the two programs are written otherwise."""

    def __init__(
        self,
        narrowing: Narrowing,
        runs: Runs,
        region: Region,
        golden: list[FlowCall],
        mine: list[FlowCall],
    ) -> None:
        self._narrowing, self._runs, self._region = narrowing, runs, region
        self._exchange = narrowing.exchange
        self._golden, self._mine = golden, mine
        self._data = narrowing.depending_on_data(golden, 0), narrowing.depending_on_data(mine, 1)
        dtypes = [r.summary.dtype for c in (*golden, *mine) for r in (*c.inputs, *c.outputs)]
        noise = max((d.error or 0.0 for d in region.entries), default=0.0)
        limit = constants.OPERATORS_EPSILONS * max(map(epsilon, dtypes))
        limit += constants.AMPLIFICATION * noise
        self._limit = min(limit, constants.OTHER_VALUES)
        self._known = self._knows(self._data[0] or golden, 0)

    def narrowed(self) -> Region:
        region = self._region
        golden, mine = self._data[0] or self._golden, self._data[1] or self._mine
        suspects = self._suspects(mine, self._known, 1)
        golden = self._suspects(golden, self._knows(mine, 1), 0) or golden
        golden, suspects = self._parting(golden, suspects)
        if not suspects:
            return self._by_entries(golden, mine) or Region(
                region.row, golden, mine, region.entries
            )
        found = self._given_another(golden, suspects[0])
        if found is None and suspects[0] is mine[0]:
            found = self._by_entries(golden, suspects[:1])
        if found is None:
            computes = next((c for c in suspects if not self._known.moves(c)), suspects[0])
            suspects = self._first_lines([*self._tables(computes), *suspects])
        return found or Region(region.row, golden, suspects, region.entries)

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
            for theirs in filter(is_telling, golden.inputs)
            for ours in filter(is_telling, mine.inputs)
        )

    def _suspects(self, calls: list[FlowCall], known: Known, side: int) -> list[FlowCall]:
        """Return the calls of one side that the other one does not know, and that matter.

        Before them, those that only move elements, to places that nothing known confirms.
        """
        flow, own = self._narrowing.flows[side], (self._golden, self._mine)[side]
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
        flow, last = self._narrowing.flows[side], (pair.golden, pair.mine)[side]
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
        leading, flow = [suspect], self._narrowing.flows[1]
        for call in reversed(self._mine):
            outputs = {r.id for r in call.outputs}
            leads = any(flow.made_by(r, outputs) for c in leading for r in c.inputs)
            if call in self._data[1] or not leads or not any(map(is_telling, call.outputs)):
                continue
            if not known.exactly(call) and not known.apart(call, self._mine):
                leading.insert(0, call)
        return leading[:-1]

    def _knows(self, calls: list[FlowCall], side: int) -> Known:
        return Known(calls, side, self._narrowing.flows, self._runs, self._limit)

    def _given_another(self, golden: list[FlowCall], call: FlowCall) -> Region | None:
        """Return a smaller region if a call gives a step once it takes another tensor.

        ``golden``: its calls that give what mine does not know. A call that only moves elements
        gives those of any tensor that it takes.
        """
        if self._known.moves(call):
            return None
        calls = (self._data[0] or self._golden)[: constants.REGION_SUSPECTS]
        made = {r.id: c for c in self._golden for r in c.outputs}
        others = [r for c in calls for r in (*c.inputs, *c.outputs) if is_telling(r)]
        taken = [r for r in call.inputs if is_telling(r) and is_floating(r.summary.dtype)]
        for record in taken:
            for other in others:
                if self._exchange.same(other, record) or not self._mends(call, record, other):
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

    def _mends(self, call: FlowCall, record: Record, other: Record) -> bool:
        """Tell whether a call of mine gives what golden computes once it takes golden's tensor."""
        try:
            result = self._exchange.on_golden(call, record, other)
        except CannotReplay:
            return False
        return self._known.is_given(result, not self._exchange.is_entry(record, 1))

    def _by_entries(self, *suspects: list[FlowCall]) -> Region | None:
        """Return a smaller region if one side takes a tensor that the other does not take.

        ``suspects``: golden's and mine's calls that may take it.
        """
        region = self._region
        taken = [
            [
                (c, r)
                for c in calls
                for r in c.inputs
                if is_telling(r) and is_floating(r.summary.dtype)
            ]
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
            combined = self._combined(missing[0][0])
            return Region(region.row, [combined], [], region.entries, self._mine[-1])
        return None

    def _combined(self, taker: FlowCall) -> FlowCall:
        """Return the call of golden that combines what a call gives with other values.

        The call itself may only gather elements of one tensor.
        """
        made: set[int] = set()
        for call in self._golden[self._golden.index(taker) :]:
            values = [r for r in call.inputs if is_telling(r) and is_floating(r.summary.dtype)]
            own = [r for r in values if self._narrowing.flows[0].made_by(r, made)]
            if (own or call is taker) and len(values) > 1:
                return call
            made |= {r.id for r in call.outputs} if own or call is taker else set()
        return taker

    def _has(self, side: int, record: Record, others: Sequence[tuple[FlowCall, Record]]) -> bool:
        """Tell whether one of the other side's tensors is the same, or a view of the same."""
        exchange, flows = self._exchange, self._narrowing.flows
        for _, other in others:
            golden, mine = (other, record) if side else (record, other)
            if exchange.same(golden, mine):
                return True
            if exchange.same(flows[0].base(golden), flows[1].base(mine)):
                return True
        return False
