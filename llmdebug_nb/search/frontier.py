"""Find where two programs part for good, along the flow of their tensors.

A pair of tensors that differs is followed back on both sides, through tensors that only one side
has, to tensors that both have. If one of these differs too, the error is inherited, and the search
goes on there. If they all agree, the calls on the way make the error: they are a **region**. A
region may be one call that both programs make, a chain of calls that one of them writes otherwise
or leaves out, or the code between two recorded calls.

The search begins at what can be observed: what the outermost modules give. A difference that does
not reach it is another way to write the same (`rejoins`), unless both programs make the same call
on the same tensors: such a call must give the same result.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.comparison.input_rounding import INPUT_ROUNDING
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon, is_floating, is_integer
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.paths import any_layer, operator_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.data_dependence import Origin
from llmdebug_nb.graph.flow import AGREES, Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.graph.trace_back import back
from llmdebug_nb.search.reordered_values import reordered

OwnNumber = Callable[[FlowCall, FlowCall, tuple[Flow, Flow]], "tuple[str, str] | None"]


class Frontier:
    """The regions that make the differences of one phase.

    ``guilty``: those from which a difference reaches what counts; in execution order.
    ``flows``, ``origins``: of golden and of mine.
    ``same_code``: tells whether two records were made by the same code. ``rejoins``: rows that
    differ and reach nothing. ``passes_on``: tells of a region behind an expected difference whether
    it only passes that on; ``passed_on`` are the indices of the rows of such regions.
    ``holds_the_same``: whether mine's tensor has golden's values in another order. ``own_number``:
    the texts of a number with which a call of mine gives golden's result on its own tensors.
    """

    def __init__(
        self,
        differences: Sequence[Difference],
        phase: str,
        same_code: Callable[[Record, Record], bool],
        passes_on: Callable[[Region], bool] = lambda region: False,
        holds_the_same: Callable[[Difference], bool] = lambda row: False,
        own_number: OwnNumber = lambda golden, mine, flows: None,
    ) -> None:
        self._same_code, self._passes_on, self._own_number = same_code, passes_on, own_number
        self.passed_on: set[int] = set()
        rows = [d for d in differences if d.site.phase == phase]
        self.flows = Flow(rows, 0), Flow(rows, 1)
        self.origins = Origin(self.flows[0]), Origin(self.flows[1])
        self._bad = [d for d in rows if d.differs]
        # generations in which tokens of one run lie elsewhere than in the other
        self._moved = {d.site.generation for d in rows if d.pair.fit and d.pair.fit.shared}
        self._counting: dict[int, bool] = {}  # by the row's index: it counts by itself
        self._apart: list[Difference] = []
        self._inherits, self._regions = dict[int, list[Difference]](), dict[int, Region]()
        self._reordered = reordered(self._bad, self.inherited, self._is_other_code, holds_the_same)
        self._take_apart(self._refuted())
        self._follow()
        harmless = self._harmless()
        if harmless:
            self._take_apart(harmless)
            self._follow()

    def _follow(self) -> None:
        """Follow back what counts."""
        self._inherits.clear()
        self._regions.clear()
        self.reaching: set[int] = set()  # indices of rows from which an observable is reached
        queue = [d for d in self._bad if self._counts(d)]
        while queue:
            row = queue.pop()
            if row.index not in self.reaching:
                self.reaching.add(row.index)
                queue += self.inherited(row)

    def _refuted(self) -> list[Difference]:
        """Return the pairs of tensors that are two things, though they stand at one place.

        One program gives angles, the other one their cosines. If a call that takes golden's gives
        what mine has too, mine has golden's tensor in another form. Then the pair says nothing.
        What counts by itself stays: a wrong result is wrong, whatever is made of it later.
        """
        rows = [row for row in self._bad if not self._counts(row)]
        crossed = [row for row in rows if self._is_crossed(row)]
        known = {row.index for row in crossed}
        dubious = [row for row in rows if row.index not in known and self.is_dubious(row)]
        if not dubious:
            return crossed
        golden = self.flows[0].taken_by
        return crossed + [
            row
            for row in dubious
            if any(map(self._agrees, golden.get(_bytes(row.pair.golden), ())))
            or self._comes_to_agree(row)
            or self._is_half_constant(row)
        ]

    def _is_half_constant(self, row: Difference) -> bool:
        """Tell whether one tensor is made of what the program is given, and the other is not."""
        return all(origin.is_told for origin in self.origins) and len({
            origin.is_constant(record, held=True)
            for origin, record in zip(self.origins, (row.pair.golden, row.pair.mine), strict=True)
            if record is not None
        }) > 1  # fmt: skip

    def _comes_to_agree(self, row: Difference) -> bool:
        """Tell whether each program makes of its tensor what the other one has, too.

        Of numbers of places, which both make of no tensor, golden's are enough: mine has them.
        """
        golden, mine = (
            {flow.agrees(made) for made in flow.made_of(record)} if record is not None else set()
            for flow, record in zip(self.flows, (row.pair.golden, row.pair.mine), strict=True)
        )
        return (True in golden and True in mine) or (self.is_constant(row) and golden == {True})

    def is_constant(self, row: Difference) -> bool:
        """Tell whether operators made both tensors of no other one."""
        return all(
            record is not None and origin.is_constant(record)
            for origin, record in zip(self.origins, (row.pair.golden, row.pair.mine), strict=True)
        )

    def _is_crossed(self, row: Difference) -> bool:
        """Tell whether two containers of other code pass two things through one place.

        Both programs have both tensors, as where a layer gives what it adds and what it adds to. Or
        they are of two kinds, as a mask of tokens and one of scores. What is inside tells which
        tensors are taken.
        """
        golden, mine = row.pair.golden, row.pair.mine
        if golden is None or mine is None or self._same_code(golden, mine):
            return False
        calls = [flow.call(r) for flow, r in zip(self.flows, (golden, mine), strict=True)]
        if not all(call.inner for call in calls):
            return False
        return _are_unlike(row, golden, mine) or all(
            flow.is_elsewhere(r) for flow, r in zip(self.flows, (golden, mine), strict=True)
        )

    def _harmless(self) -> list[Difference]:
        """Return pairs whose difference proved harmless in another layer.

        There, the same lines take the same tensors, and what follows agrees: one program has them
        in another form. Or what one of the two places gives there is made of what agrees and
        differs from its partner too, and what follows agrees. The same layer in another step is no
        evidence: there, too little may have been left of the effect of a bug in it.
        """
        reaching = [d for d in self._bad if d.index in self.reaching]
        unsure = [d for d in reaching if not self._counts(d)]
        if not unsure:
            return []
        rest = [d for d in self._bad + self._apart if d.index not in self.reaching]
        own = [d for d in rest if self._is_made(d)]
        quiet: dict[object, set[str]] = defaultdict(set)  # by place, the paths
        for place, path in itertools.chain.from_iterable(map(_places, own)):
            quiet[place].add(path)
        bad = {d.pair.mine.id for d in reaching if d.pair.mine is not None}
        paths: list[dict[object, set[str]]] = [defaultdict(set), defaultdict(set)]
        for flow, places in zip(self.flows, paths, strict=True):
            for record in flow.records.values():
                if record.site.role == "input" and (flow is self.flows[0] or record.id not in bad):
                    places[_in_any_layer(record)].add(record.site.path)
        return [
            d
            for d in unsure
            if any(quiet[place] - {path} for place, path in _places(d))
            or all(
                record is not None and places[_in_any_layer(record)] - {record.site.path}
                for record, places in zip((d.pair.golden, d.pair.mine), paths, strict=True)
            )
        ]

    def _is_made(self, row: Difference) -> bool:
        """Tell whether a difference is made of what agrees, or of what does no harm and is less."""
        sources = self.inherited(row)
        if any(source.index in self.reaching for source in sources):
            return False
        entering = max((source.error or 0.0 for source in sources), default=0.0)
        return (row.error or 0.0) > constants.AMPLIFICATION * entering

    def _take_apart(self, rows: Sequence[Difference]) -> None:
        apart = {row.index for row in rows}
        self._bad = [row for row in self._bad if row.index not in apart]
        self._apart += rows
        for row in rows:
            for flow, record in zip(self.flows, (row.pair.golden, row.pair.mine), strict=True):
                if record is not None:
                    flow.take_apart(record, row)

    def _agrees(self, call: FlowCall) -> bool:
        """Tell whether a call of golden gives what mine has too: numbers of a float."""
        outputs = [r for r in call.outputs if is_floating(r.summary.dtype)]
        told = {self.flows[0].agrees(record) for record in outputs}
        return True in told and False not in told

    def is_dubious(self, row: Difference) -> bool:
        """Tell whether two tensors of other code may be two things, or have no say.

        They were paired by place and have nothing in common, or little and are made of no tensor,
        as numbers of places and masks are. Or they are weights, which a program may store in its
        own form, and what they are used on differs too.
        """
        golden, mine = row.pair.golden, row.pair.mine
        if golden is None or mine is None or self._same_code(golden, mine):
            return False
        if golden.site.role == "weight":
            return not any(map(self.flows[0].agrees, self.flows[0].call(golden).inputs))
        if golden.site.role == "grad" or any(
            d.verdict in AGREES for d in self.flows[1].rows[mine.id]
        ):
            return False  # what mine takes in its place is known
        if row.error is None or not row.error < constants.UNRELATED:
            return True
        return not row.error < constants.PERTURBED and self.is_constant(row)

    def is_sure(self, region: Region) -> bool:
        """Tell whether a region begins at tensors that are one thing.

        They are if calls make them that take one tensor, however little they have in common.
        """
        makers = [side[-1].inputs if side else [] for side in (region.golden, region.mine)]
        golden, mine = (
            {d.index for r in taken if identifies_itself(r.summary) for d in flow.rows[r.id]}
            for flow, taken in zip(self.flows, makers, strict=True)
        )
        return bool(region.taken or golden & mine) or not self.is_dubious(region.row)

    @cached_property
    def guilty(self) -> list[Region]:
        """The regions, each of a tensor of its own."""
        regions: dict[object, Region] = {}
        for row in self._first_rows():
            self.inherited(row)
            region = self._regions[row.index]
            if not regions or not _passes_on(region):
                regions.setdefault(row.content, region)
        return list(regions.values())

    def _first_rows(self) -> list[Difference]:
        """Return the rows in which the differences begin, in execution order.

        Rows that follow from each other, as pairs that cross do, begin with the first of them.
        Behind a row that only passes an expected difference on, differences may begin again.
        """
        rows = [row for row in self._bad if row.index in self.reaching]
        follows: dict[int, list[Difference]] = defaultdict(list)
        waits = {row.index: len(self.inherited(row)) for row in rows}
        for row in rows:
            for source in self.inherited(row):
                follows[source.index].append(row)
        origins: list[Difference] = []
        explained: set[int] = set()
        for ready in ([row for row in rows if not waits[row.index]], *([row] for row in rows)):
            for row in ready:  # it grows
                if row.index in explained:
                    continue
                explained.add(row.index)
                if not self._is_passed_on(row):
                    origins.append(row)
                    _add_all(explained, row, follows)
                    continue
                self.passed_on.add(row.index)
                for later in follows[row.index]:
                    waits[later.index] -= 1
                    if not waits[later.index]:
                        ready.append(later)
        return sorted(origins, key=lambda row: row.index)

    def _is_passed_on(self, row: Difference) -> bool:
        sources = self.inherited(row)
        region = self._regions[row.index]
        region.expected += [source for source in sources if source.index in self.passed_on]
        return bool(region.expected) and self._passes_on(region)

    @cached_property
    def rejoins(self) -> list[Difference]:
        blamed = self.reaching - self.passed_on
        reaching = [d.pair.mine for d in self._bad if d.index in blamed]
        seen = {record.id for record in reaching if record is not None}  # in another row, perhaps
        rest = [d for d in self._bad if d.index not in self.reaching]
        rest = [d for d in rest if d.pair.mine is None or d.pair.mine.id not in seen]
        return rest + self._apart

    def inherited(self, row: Difference) -> list[Difference]:
        """Return the rows that differ and that the tensors of a row are made from."""
        if row.index not in self._inherits:
            self._inherits[row.index] = self._explain(row)
        return self._inherits[row.index]

    def _explain(self, row: Difference) -> list[Difference]:
        region = self._regions[row.index] = Region(row)
        bad: list[list[Difference]] = []
        known: list[bool] = []
        sides = (row.pair.golden, region.golden), (row.pair.mine, region.mine)
        for flow, (record, calls) in zip(self.flows, sides, strict=True):
            sources, between = (
                back(flow, record, flow.share(record, row)) if record is not None else ([], [])
            )
            calls += between
            upstream: list[Difference] = []
            for source in sources:
                rows = [d for d in flow.rows[source.id] if d.verdict != "unmatched"]
                if flow.agrees(source) is not False:
                    region.entries += rows
                    region.expected += [d for d in rows if d.verdict == EXPECTED]
                else:
                    upstream += [d for d in rows if d.differs and d is not row]
            bad.append(upstream)
            known.append(bool(sources) and record is not None and not flow.is_lost(record))
        if any(bad) and (alone := self._by_number(row, region.entries)):
            self._regions[row.index] = alone
            return []
        # what mine makes of tensors that agree is its own; golden decides where mine's way is lost,
        # as behind an operator that only an exported graph has
        return bad[1] if known[1] else bad[0]

    def _by_number(self, row: Difference, entries: list[Difference]) -> Region | None:
        """Return the region of one operator whose number makes the error, whatever it takes."""
        golden, mine = row.pair.golden, row.pair.mine
        if golden is None or mine is None or {golden.site.role, mine.site.role} != {"output"}:
            return None
        theirs, ours = self.flows[0].call(golden), self.flows[1].call(mine)
        if not (theirs.is_operator and ours.is_operator):
            return None
        numbers = self._own_number(theirs, ours, self.flows)
        return Region(row, [theirs], [ours], entries, numbers=numbers) if numbers else None

    def _is_other_code(self, row: Difference) -> bool:
        """Tell whether other operators make mine's tensor than golden's."""
        golden, mine = (
            {operator_of(call.key.path) for call in calls}
            for calls in (self._regions[row.index].golden, self._regions[row.index].mine)
        )
        return golden != mine

    def is_result(self, row: Difference) -> bool:
        """Tell whether a row is of what golden's outermost module gives, if only as it is."""
        golden = row.pair.golden
        if golden is None or row.site.role != "output":
            return False
        return self.flows[0].call(golden).around is None or golden.id in self._handed_on

    @cached_property
    def _handed_on(self) -> set[int]:
        """Return the ids of golden's tensors that an outermost module gives as they are."""
        flow = self.flows[0]
        given = [r for c in flow.calls.values() if c.around is None for r in c.outputs]
        makers = ((r, flow.records.get(r.producer)) for r in given if r.producer is not None)
        return {
            maker.id
            for r, maker in makers
            if maker is not None and maker.summary.fingerprint == r.summary.fingerprint is not None
        }

    def is_vague(self, region: Region, others: Iterable[Region]) -> bool:
        """Tell whether a region is all before a result, and another one is a part of its code."""
        return self.is_result(region.row) and any(map(region.has_in_it, others))

    def _counts(self, row: Difference) -> bool:
        if row.index not in self._counting:
            self._counting[row.index] = self._counts_itself(row)
        return self._counting[row.index]

    def _counts_itself(self, row: Difference) -> bool:
        """Tell whether a difference counts by itself.

        It does in a result of golden's outermost module, in a gradient of a weight, where both
        programs run the same code, and in a quantised weight that is further off than its steps.
        Where products round what they multiply, what follows agrees within so much that it proves
        nothing.
        Numbers of places are others where tokens lie elsewhere: what is made of them counts. So it
        is where mine makes at once what golden makes in two calls, if that can be seen to agree.
        """
        golden, mine = row.pair.golden, row.pair.mine
        if golden is None or mine is None:
            return False
        if self.is_result(row):
            return True
        if row.index in self._reordered:
            return False
        numbers = row.site.generation in self._moved and not is_floating(golden.summary.dtype)
        if is_integer(golden.summary.dtype) and self.is_constant(row):
            numbers = numbers or self._comes_to_agree(row)
        if row.site.role == "grad" or (self._same_code(golden, mine) and not numbers):
            return True
        if self._rounds_factors and not row.pair.elsewhere and row.metrics:
            return row.site.role != "input" and (row.error or 0.0) < constants.UNRELATED
        # noise as large as that of a quantised model hides it
        is_off = bool(row.metrics.get("channels_off")) or row.rule is Rule.PRODUCT_OFF
        return is_off or row.index in self._hidden

    @cached_property
    def _rounds_factors(self) -> bool:
        """Whether a program rounds what it multiplies, see `input_rounding.py`."""
        return any(
            INPUT_ROUNDING in row.metrics for each in self.flows[0].rows.values() for row in each
        )

    @cached_property
    def _hidden(self) -> set[int]:
        """The rows whose whole error is left in what a coarser dtype alone lets agree.

        What rounds an error away shows that it does not matter. An error that is larger than what
        rounding to that dtype makes, and is as large behind it, is only hidden there.
        """
        flow, hidden = self.flows[0], set[int]()
        if len({epsilon(record.summary.dtype) for record in flow.records.values()} - {0.0}) < 2:
            return hidden
        ends: dict[int, float] = {}  # by row: the coarsest dtype that its error lasts in
        passed: dict[int, list[int]] = {}  # by row: those that it lasts in on the way
        both = [(d.pair.golden, d) for d in self._bad if d.pair.golden and d.pair.mine]
        rows = [each for each in both if each[1].metrics and not each[1].pair.elsewhere]
        rows.sort(key=lambda each: each[0].id)
        for golden, row in reversed(rows):
            error, eps = row.error or 0.0, epsilon(golden.summary.dtype)
            if not eps or not error < constants.UNRELATED:
                continue
            made = [d for r in flow.made_of(golden) for d in flow.rows[r.id]]
            last = [d for d in made if 2 * (d.error or 0.0) > error]
            passed[row.index] = [d.index for d in last if d.index in ends]
            coarse = (epsilon(d.pair.either.summary.dtype) for d in last if d.verdict in AGREES)
            found = [each for each in coarse if error > constants.BOTH_ROUND * each]
            found += [ends[index] for index in passed[row.index]]
            if found:
                ends[row.index] = max(found)
                hidden |= {row.index} if ends[row.index] > eps else set()
        for _, row in rows:
            hidden.update(passed[row.index] if row.index in hidden else ())
        return hidden


def _add_all(explained: set[int], row: Difference, follows: Mapping[int, list[Difference]]) -> None:
    """Add the indices of all rows that follow from a row."""
    queue = [row]
    while queue:
        for later in follows.get(queue.pop().index, ()):
            if later.index not in explained:
                explained.add(later.index)
                queue.append(later)


def _are_unlike(row: Difference, golden: Record, mine: Record) -> bool:
    """Tell whether no layout brings two tensors to one shape, or only one holds whole numbers."""
    dtypes = golden.summary.dtype, mine.summary.dtype
    if "bool" not in dtypes and is_floating(dtypes[0]) != is_floating(dtypes[1]):
        return True
    return row.error == math.inf and not row.metrics


def _in_any_layer(record: Record) -> object:
    """Return what a tensor holds, and where it is taken, in any layer."""
    return record.summary.fingerprint, _place(record), record.site.generation, record.site.step


def _place(record: Record) -> object:
    """Return where a tensor is made or taken, in any layer and step."""
    s = record.site
    return any_layer(s.path), s.role, s.slot, s.call


def _places(row: Difference) -> list[tuple[object, str]]:
    """Return both tensors' places in any layer, and their paths; a row of one tensor has none."""
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None:
        return []
    return [((at, _place(r)), r.site.path) for at, r in enumerate((golden, mine))]


def _bytes(record: Record | None) -> str | None:
    return None if record is None else record.summary.fingerprint


def _passes_on(region: Region) -> bool:
    """Tell whether an error is that of the tensors that enter, a little above its limit.

    Behind an earlier error, tensors may agree within noise and still hold a part of it. What is
    expected to differ was judged by its size already.
    """
    agreeing = (d for d in region.entries if d.verdict != EXPECTED)
    entering = max((d.error or 0.0 for d in agreeing), default=0.0)
    return (region.row.error or 0.0) <= constants.AMPLIFICATION * entering
