"""Narrow a region to the calls that make its error.

From its end backwards: a call of mine is innocent if it answers to a call of golden. Both do the
same with their inputs, by name and arguments, or because mine's call gives golden's result on
golden's tensors. Then the error is in what it takes.

Where the two are written otherwise, `rewritten.py` goes on from its beginning forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.data_dependence import Origin
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search.rewritten import Rewritten
from llmdebug_nb.search.swap_tensors import Exchange


class Narrowing:
    """Narrows the regions of one comparison."""

    def __init__(
        self, flows: tuple[Flow, Flow], origins: tuple[Origin, Origin], runs: Runs
    ) -> None:
        self.flows, self._runs, self.exchange = flows, runs, Exchange(flows, runs)
        self._origins = origins

    def narrowed(self, region: Region) -> Region:
        """Return the region without the calls that only pass its error on."""
        if region.numbers is not None:
            return region
        found = self._given(region) or self._hidden(region)
        rewritten = self._rewritten(region)
        numbered = None if found or rewritten is None else rewritten.by_number()
        if numbered is not None:
            return numbered
        whole, region = region, found or self._around(self._backwards(region))
        if (region.golden, region.mine) != (whole.golden, whole.mine):
            rewritten = self._rewritten(region)
        if rewritten is not None:
            region = self._around(rewritten.narrowed())
        return self._without_end(self._chosen(region))

    def _rewritten(self, region: Region) -> Rewritten | None:
        """Return the region as one that is written otherwise; None if two calls are all of it."""
        theirs, ours = ([c for c in side if c.is_operator] for side in (region.golden, region.mine))
        if not theirs or not ours or len(theirs) + len(ours) <= 2:
            return None
        data = self.depending_on_data(theirs, 0), self.depending_on_data(ours, 1)
        return Rewritten(self.exchange, self._runs, region, theirs, ours, data)

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
            if any(identifies_itself(r.summary) for r in call.outputs) and any(
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
        return not idle and not all(map(self._origins[side].is_constant, call.outputs))

    def _is_data(self, record: Record, side: int) -> bool:
        """Tell whether a tensor, or what it is a view of, was computed and agrees.

        A weight has no producer.
        """
        flow = self.flows[side]
        base = flow.records.get(record.producer) if record.producer is not None else None
        if base is None or not identifies_itself(record.summary):
            return False
        if self._origins[side].is_constant(base):
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

    def _hidden(self, region: Region) -> Region | None:
        """Return the region of what mine alone makes of a tensor that golden takes as it is.

        A call of both programs takes golden's tensor in golden and what mine makes of it in mine,
        and gives the same, as a norm hides a factor. So the one stands in the place of the other.
        It is no other form of the same if the region puts it together with what agrees.
        """
        made = (r for call in region.mine for r in call.outputs if self._is_made(1, r))
        for record in (r for r in made if identifies_itself(r.summary)):
            if not self._is_mixed(record, region.mine):
                continue
            makers = self.flows[1].makers(record, after=-1)
            chain = [call for call in region.mine if call in makers]
            for ours in self.flows[1].taken_by.get(record.summary.fingerprint, ()):
                for theirs in self._agreeing(ours):
                    left, right = self.exchange.unsettled(theirs, ours)
                    if len(left) != 1 or len(right) != 1 or not same_bytes(right[0], record):
                        continue
                    if any(self.exchange.same(left[0], r) for call in chain for r in call.inputs):
                        return self._cut(region, [], chain, theirs)
        return None

    def _is_mixed(self, record: Record, calls: Sequence[FlowCall]) -> bool:
        """Tell whether one of mine's calls takes a tensor together with data that agrees."""
        takers = (c for c in calls if any(same_bytes(r, record) for r in c.inputs))
        return any(self._is_data(r, 1) for call in takers for r in call.inputs)

    def _agreeing(self, mine: FlowCall) -> list[FlowCall]:
        """Return the calls of golden in the place of a call of mine whose results all agree."""
        rows = [d for record in mine.outputs for d in self.flows[1].rows[record.id]]
        placed = [d.pair.golden for d in rows if d.pair.at_its_place]
        calls = dict.fromkeys(self.flows[0].call(r) for r in placed if r is not None)
        return [call for call in calls if all(map(self.flows[0].agrees, call.outputs))]

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

    def _backwards(self, region: Region) -> Region:
        """Return the region without the calls from the row's tensors on that do the same."""
        golden, mine = region.row.pair.golden, region.row.pair.mine
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

    def _without_end(self, region: Region) -> Region:
        """Return the region without its last calls if these do the same: what they take differs."""
        if len(region.golden) + len(region.mine) <= 2 or not region.golden or not region.mine:
            return region
        theirs, ours = region.golden[-1], region.mine[-1]
        records = region.row.pair.golden, region.row.pair.mine
        makers = [f.maker(r) for f, r in zip(self.flows, records, strict=True) if r is not None]
        if region.taken is not None or makers != [theirs, ours]:
            return region
        if not self.exchange.does_the_same(theirs, ours):
            return region
        golden, mine = region.golden[:-1], region.mine[:-1]
        before = theirs if not golden else ours if not mine else None
        return self._cut(region, golden, mine, before)

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
