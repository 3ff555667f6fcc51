"""The tensors of one run as a graph: the calls that make them and the calls that take them."""

from __future__ import annotations

import bisect
import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.identity import telling_bytes
from llmdebug_nb.core.paths import ancestors, within
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes

AGREES = ("match", "within_noise", EXPECTED)
NONE, ALL = Fraction(0), Fraction(1)  # of a tensor's elements


@dataclass(frozen=True, slots=True)
class Agreement:
    """What is known of a tensor from its partners.

    ``share``: of its elements, those that are known to agree; ``differs``: some partner differs.
    """

    share: Fraction = NONE
    differs: bool = False

    def told(self, share: Fraction) -> bool | None:
        """Tell whether a share of the tensor agrees; None if too little of it is known."""
        if self.differs:
            return False
        return True if self.share is share or self.share >= share else None


class Flow:
    """The tensors of one run: the calls that make and take them.

    ``side``: 0 for golden, 1 for mine.
    """

    def __init__(self, differences: Sequence[Difference], side: int) -> None:
        self.rows: dict[int, list[Difference]] = defaultdict(list)  # by the id of the record
        records: dict[int, Record] = {}
        for d in differences:
            record = _record(d, side)
            if record is not None:
                self.rows[record.id].append(d)
                records[record.id] = record
        self.records = dict(sorted(records.items()))
        # False if no tensor has a producer, as in the dumps of other tools
        self._linked = any(record.producer is not None for record in records.values())
        self.calls: dict[CallKey, FlowCall] = {}
        self._call_of: dict[int, FlowCall] = {}  # by the id of the record
        # what ran inside a call: the tensors that agree, and the others
        self._inside: dict[int, tuple[list[Record], list[Record]]] = {}
        self._side = side
        self._agreements: dict[int, Agreement] = {}
        self._wholes: dict[int, Record | None] = {}  # see `_whole`, by the id of the record
        for record in self.records.values():
            self._add(record)
        self._nest()

    def _add(self, record: Record) -> None:
        key = record.site.key
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = FlowCall(key)
        self._call_of[record.id] = call
        role = record.site.role
        of_role = call.inputs if role == "input" else call.weights if role == "weight" else None
        (call.outputs if of_role is None else of_role).append(record)

    def _nest(self) -> None:
        """Find the call around each call: the last one begun of the innermost path around it.

        If that is over, as where several layers share a module, the module that runs then calls it.
        """
        latest: dict[tuple[object, ...], dict[str, FlowCall]] = defaultdict(dict)  # by pass, path
        # by pass: the calls that run, each with minus the first end of it and those around it
        running: dict[tuple[object, ...], list[tuple[float, FlowCall]]] = defaultdict(list)
        begun = sorted((call.start, at, call) for at, call in enumerate(self.calls.values()))
        for start, _, call in begun:
            key = call.key
            stack, before = running[key[:4]], latest[key[:4]]
            over = bisect.bisect_right(stack, -start, key=operator.itemgetter(0))
            del stack[over:]  # with what ran inside it
            around = next((before[path] for path in ancestors(key.path) if path in before), None)
            if around is not None and self._linked and around.end < start:
                around = stack[-1][1] if stack else None
            if around is not None:
                call.around = around
                around.inner.append(call)
            before[key.path] = call
            if call.outputs and not call.is_operator:
                first = max(-call.end, stack[-1][0]) if stack else -call.end
                stack.append((first, call))

    def call(self, record: Record) -> FlowCall:
        return self._call_of[record.id]

    def agrees(self, record: Record, share: Fraction = ALL) -> bool | None:
        """Tell whether a tensor agrees with its partners; None if too little of it has any.

        ``share``: of its elements, as many as count.
        """
        if record.id not in self._agreements:
            self._agreements[record.id] = self._agreement(record)
        return self._agreements[record.id].told(share)

    def _agreement(self, record: Record) -> Agreement:
        rows = [d for d in self.rows[record.id] if d.verdict != "unmatched" and _is_pair(d)]
        if not all(d.verdict in AGREES and not d.follows for d in rows):
            return Agreement(differs=True)
        parts = [_places(d, self._side) for d in rows]
        if not rows or any(part is None for part in parts):
            return Agreement(ALL if rows else NONE)
        known = torch.cat([part for part in parts if part is not None])
        return Agreement(Fraction(_count(known), record.summary.numel))

    def share(self, record: Record, row: Difference) -> Fraction:
        """Return the share of a tensor that a row compares."""
        places = _places(row, self._side)
        return ALL if places is None else Fraction(_count(places), record.summary.numel)

    def is_chosen(self, record: Record) -> bool:
        """Tell whether an operator took a tensor out of one that both runs have.

        The other run holds it as a part of that one alone: its values are right, and nothing tells
        that it is the right part.
        """
        call = self.call(record)
        if record.site.role != "output" or not call.is_operator:
            return False
        side, other = self._side, 1 - self._side
        partners = self._agreeing(record)
        if not partners or any(_places(d, other) is None for d in partners):
            return False
        taken = (d for r in call.inputs for d in self._agreeing(self.base(r)))
        wholes = {_bytes(d, other) for d in taken if _places(d, side) is None} - {None}
        return all(_bytes(d, other) in wholes for d in partners)

    def is_elsewhere(self, record: Record) -> bool:
        """Tell whether the other run has a tensor that agrees, whatever stands at its place."""
        return telling_bytes(record.summary) in self._found

    @functools.cached_property
    def _found(self) -> set[str | None]:
        """The fingerprints of all tensors that the other run has."""
        found = (record for record in self.records.values() if self._agreeing(record))
        return {record.summary.fingerprint for record in found} - {None}

    def _agreeing(self, record: Record) -> list[Difference]:
        return [d for d in self.rows[record.id] if d.verdict in AGREES and _is_pair(d)]

    def take_apart(self, record: Record, row: Difference) -> None:
        """Leave out a row of a tensor: it says nothing about it."""
        self.rows[record.id].remove(row)
        self._agreements.pop(record.id, None)

    def sources(self, record: Record) -> tuple[list[Record], FlowCall | None]:
        """Return the tensors that a tensor is made from, and the call whose code makes it."""
        whole = self._whole(record)
        if whole is not None:
            return [whole], None
        call, role = self.call(record), record.site.role
        if role == "weight":
            return [], None
        if role == "input":
            around = call.around
            return (self._before(around, record), around) if around is not None else ([], None)
        made_inside = self._before(call, record) if call.inner else []
        if made_inside:
            return made_inside, call
        return [*call.inputs, *call.weights], call

    def _whole(self, record: Record) -> Record | None:
        """Return the tensor that a tensor is a view of, or a copy; None if code makes it."""
        if record.id not in self._wholes:
            producer = self.records.get(record.producer) if record.producer is not None else None
            if (
                producer is None
                or producer.id == record.id
                or _is_anew(record, producer, self.call(record))
            ):
                producer = None if record.site.role == "weight" else self._copied(record)
            self._wholes[record.id] = producer
        return self._wholes[record.id]

    def _copied(self, record: Record) -> Record | None:
        """Return the last output before a tensor that has the same bytes, if any.

        A view that was copied shares no storage with what it is a view of.
        """
        known, summary = telling_bytes(record.summary), record.summary
        if known is None:
            return None
        if record.site.role == "output" and self.call(record).is_operator:
            return None  # an operator makes its result from its inputs
        key = known, summary.dtype, summary.numel
        ids = self._outputs.get(key, [])
        at = bisect.bisect_left(ids, record.id)
        other = self.records[ids[at - 1]] if at else None
        if other is None or other.site.key == record.site.key:
            return None
        return other

    @functools.cached_property
    def _outputs(self) -> dict[object, list[int]]:
        """The ids of all outputs by what they hold, rising."""
        found: dict[object, list[int]] = defaultdict(list)
        for record in self.records.values():
            s = record.summary
            if record.site.role == "output" and s.fingerprint is not None:
                found[s.fingerprint, s.dtype, s.numel].append(record.id)
        return found

    @functools.cached_property
    def matrices(self) -> dict[str, Record]:
        """The first weight of each module that has at least two axes, by the module's path."""
        found: dict[str, Record] = {}
        for record in self.records.values():
            if record.site.role == "weight" and len(record.summary.shape) > 1:
                found.setdefault(record.site.path, record)
        return found

    @functools.cached_property
    def taken_by(self) -> dict[str | None, list[FlowCall]]:
        """The calls that take a tensor, by its fingerprint."""
        found: dict[str | None, list[FlowCall]] = defaultdict(list)
        for call in self.calls.values():
            for fingerprint in {r.summary.fingerprint for r in call.inputs + call.weights} - {None}:
                found[fingerprint].append(call)
        return found

    def is_lost(self, record: Record) -> bool:
        """Tell whether the maker of a tensor was left out of the comparison."""
        return record.producer is not None and record.producer not in self.records

    def known_by(self, record: Record) -> int:
        """Return the id of the last record of all that is there once a tensor is.

        What a call takes beside it is there too, but not what only golden's call is given: mine may
        lack it.
        """
        beside = self.call(record).inputs if record.site.role == "input" else []
        there = (r for r in beside if self._side or self._has_partner(r))
        return max(r.id for r in (record, *there))

    def _has_partner(self, record: Record) -> bool:
        return any(
            d.pair.golden is not None and d.pair.mine is not None for d in self.rows[record.id]
        )

    def made_by(self, record: Record, outputs: Collection[int]) -> bool:
        """Tell whether a tensor is one of these outputs, by id, or a view of one."""
        for _ in range(len(self.records)):
            if record.id in outputs:
                return True
            producer = self.records.get(record.producer) if record.producer is not None else None
            if producer is None or producer.id == record.id:
                return False
            record = producer
        return False

    def takers(self, call: FlowCall, calls: Sequence[FlowCall]) -> list[FlowCall]:
        """Return those calls that take what a call gives, or views of it."""
        outputs = {record.id for record in call.outputs}
        return [c for c in calls if any(self.made_by(r, outputs) for r in c.inputs)]

    def base(self, record: Record) -> Record:
        """Return the tensor that a tensor is a view of, or a copy; itself if it is none."""
        for _ in range(len(self.records)):
            whole = self._whole(record)
            if whole is None:
                break
            record = whole
        return record

    def maker(self, record: Record) -> FlowCall | None:
        """Return the operator that made a tensor, through views and what only passes it on."""
        _, call = self.sources(self.base(record))
        return call if call is not None and call.is_operator else None

    def made_of(self, record: Record) -> Iterator[Record]:
        """Yield the first numbers of a float with a partner that calls make of a tensor."""
        queue, seen = [self.base(record)], set[int]()
        while queue:
            for made in self._made_of[queue.pop().id]:
                if made.id in seen:
                    continue
                seen.add(made.id)
                has_partner = self.agrees(made) is not None and self._whole(made) is None
                if has_partner and is_floating(made.summary.dtype):
                    yield made
                else:
                    queue.append(made)

    @functools.cached_property
    def _made_of(self) -> dict[int, list[Record]]:
        """The tensors that are made of one, or are views of it, by its id.

        Code around calls may make a tensor of any of those before it: nothing tells which.
        """
        found: dict[int, list[Record]] = defaultdict(list)
        for record in self.records.values():
            sources, maker = self.sources(record)
            for source in sources if maker is None or not maker.inner else ():
                found[source.id].append(record)
        return found

    def takes(self, call: FlowCall, record: Record) -> bool:
        """Tell whether a call takes a tensor, or another view of what it is a view of."""
        base = self.base(record)
        return any(self.base(each) is base for each in call.inputs)

    def taker(self, record: Record) -> FlowCall | None:
        """Return the first operator that takes an input of a module there."""
        inner = (c for c in self.calls.values() if within(c.key.path, record.site.path))
        return next(
            (c for c in inner if c.is_operator and c.start >= record.id and self.takes(c, record)),
            None,
        )

    def makers(self, record: Record, after: int) -> list[FlowCall]:
        """Return the calls whose code makes a tensor of those up to a record, by its id."""
        queue, seen, found = [record], {record.id}, []
        while queue:
            sources, call = self.sources(queue.pop())
            if call is not None:
                found.append(call)
            for source in sources:
                if source.id > after and source.id not in seen and not self.agrees(source):
                    seen.add(source.id)
                    queue.append(source)
        return found

    def _before(self, call: FlowCall, record: Record) -> list[Record]:
        """Return what code of a module may use to make a tensor: inputs, and what ran inside.

        Of what ran inside and agrees, the last is enough: it tells where the code begins. Where
        operators were recorded, they tell what they take; other code only passes inputs on. An
        input that a recorded call made would be known as the producer.
        """
        if self._linked and any(inner.is_operator for inner in call.inner):
            return [*(r for r in call.inputs if r.producer is None), *call.weights]
        if id(call) not in self._inside:
            outputs = sorted((r for c in call.inner for r in c.outputs), key=lambda r: r.id)
            self._inside[id(call)] = (
                [r for r in outputs if self.agrees(r)],
                [r for r in outputs if not self.agrees(r)],
            )
        agreeing, others = (
            side[: bisect.bisect_left(side, record.id, key=lambda r: r.id)]
            for side in self._inside[id(call)]
        )
        inputs, others = (
            [r for r in side if not self._is_used_up(r, call, record)]
            for side in (call.inputs, others)
        )
        return [*inputs, *call.weights, *others, *agreeing[-1:]]

    def _is_used_up(self, given: Record, call: FlowCall, record: Record) -> bool:
        """Tell whether inner calls used a tensor up, so that it can't be a source of `record`.

        ``given``: an input, or what ran inside gave it. A call inside takes it, and gives what
        agrees; and it doesn't fit the tensor elementwise, as angles of a head don't fit a residual,
        nor numbers of experts their sum.
        """
        if self.agrees(given) is not None or _broadcasts(given, record):
            return False
        every = self.taken_by.get(given.summary.fingerprint, ())
        takers = [c for c in every if c.around is call]
        told = {self.agrees(r) for c in takers if c.start < record.id for r in c.outputs}
        return True in told and False not in told


def _record(row: Difference, side: int) -> Record | None:
    return row.pair.mine if side else row.pair.golden


def _bytes(row: Difference, side: int) -> str | None:
    record = _record(row, side)
    return None if record is None else record.summary.fingerprint


def _places(row: Difference, side: int) -> torch.Tensor | None:
    """Return the elements of a side's tensor that a row compares, flat int64[n]; None for all."""
    fit, record = row.pair.fit, _record(row, side)
    return None if fit is None or record is None else fit.places(side, record.summary.shape)


def _count(places: torch.Tensor) -> int:
    """Return how many different places there are."""
    return int(torch.bincount(places).count_nonzero())


def _is_pair(row: Difference) -> bool:
    """Tell whether a row compares two tensors, and not nothing with something.

    An expected row may have one tensor. The start of a cache may be empty in one program.
    """
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None:
        return False
    return bool(golden.summary.numel) == bool(mine.summary.numel)


def _is_anew(record: Record, producer: Record, call: FlowCall) -> bool:
    """Tell whether an operator wrote its result into the memory of a tensor from before it."""
    if record.site.role != "output" or not call.is_operator:
        return False
    return call.is_kernel or (producer.id < call.start and not same_bytes(record, producer))


def _broadcasts(given: Record, record: Record) -> bool:
    """Tell whether a tensor can be added to another one, perhaps in another shape."""
    a, b = given.summary, record.summary
    return a.numel in (1, b.numel) or all(
        n in (1, m) for n, m in zip(a.shape[::-1], b.shape[::-1], strict=False)
    )
