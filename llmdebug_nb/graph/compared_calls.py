"""The calls of a comparison, with the rows of their inputs and outputs and their producers."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, module_of, within
from llmdebug_nb.core.records import IN_KERNEL, CallKey, Record
from llmdebug_nb.graph.region import Region

_IN_PLACE = re.compile(r"(?<=[A-Za-z0-9])_(?=\.|$)")


@dataclass(eq=False)
class ComparedCall:
    """The rows of one call.

    ``golden``, ``mine``: the call in each run, None if only the other run made it. ``span``: its
    first and last row; weights are recorded before any call, so theirs are not among them, unless
    it has no others. If one kernel computes several calls, ``reads`` are the inputs of that
    kernel, and ``inputs`` are the rows in which these were outputs.
    """

    golden: CallKey | None = None
    mine: CallKey | None = None
    inputs: list[Difference] = field(default_factory=list)
    weights: list[Difference] = field(default_factory=list)
    outputs: list[Difference] = field(default_factory=list)
    reads: list[Difference] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)

    @property
    def key(self) -> CallKey:
        key = self.golden or self.mine
        assert key is not None
        return key

    @property
    def path(self) -> str:
        return self.key.path

    @property
    def module(self) -> str:
        """The path of the module, for an operator that of the module around it."""
        return module_of(self.key.path)

    @property
    def is_operator(self) -> bool:
        return is_operator(self.key.path)

    @property
    def is_fused(self) -> bool:
        """True if one of the runs computes it in a kernel together with other calls."""
        return bool(self.reads)

    @property
    def op(self) -> str:
        golden, mine = self.ops
        return golden or mine or ""

    @property
    def ops(self) -> tuple[str | None, str | None]:
        """The operator, or class of the module, in golden and in mine."""
        pairs = [row.pair for row in self.rows()]
        return (
            _op((pair.golden for pair in pairs), self.golden),
            _op((pair.mine for pair in pairs), self.mine),
        )

    @property
    def one_sided(self) -> bool:
        return self.golden is None or self.mine is None

    @property
    def bad_output(self) -> Difference | None:
        return first_divergence(self.outputs)

    @property
    def is_rewritten(self) -> bool:
        """True if it is a module of another class in mine."""
        golden, mine = self.ops
        return not self.is_operator and None not in (golden, mine) and golden != mine

    @property
    def same_kind(self) -> bool:
        """True if both programs call the same operator, or a module of the same class."""
        golden, mine = self.ops
        return golden == mine or None in (golden, mine) or same_operator(str(golden), str(mine))

    @property
    def place(self) -> int:
        bad = self.bad_output
        return bad.index if bad else self.span[0]

    def rows(self) -> Iterator[Difference]:
        yield from self.inputs
        yield from self.weights
        yield from self.outputs


def first_divergence(differences: Iterable[Difference]) -> Difference | None:
    """Return the first diverged row in execution order."""
    return next((d for d in differences if d.verdict == "diverged"), None)


def same_operator(golden: str, mine: str) -> bool:
    """Tell whether two operators are equal; compiled code replaces ``add_`` by ``add``."""
    return golden == mine or _IN_PLACE.sub("", golden) == _IN_PLACE.sub("", mine)


def kind_of_operator(op: str) -> str:
    """Return what an operator computes, be it a function, a method or in place: ``matmul``."""
    return _IN_PLACE.sub("", op.partition(".")[2])


def as_one(golden: ComparedCall, mine: ComparedCall) -> ComparedCall:
    """Return a call of golden and one of mine as one."""
    outputs = [d for c in (mine, golden) for d in c.outputs]
    return ComparedCall(golden.golden, mine.mine, [*mine.inputs], outputs=outputs)


class Calls:
    """The calls of one phase, in execution order."""

    def __init__(self, differences: Sequence[Difference], phase: str) -> None:
        rows = [d for d in differences if d.site.phase == phase]
        self._golden: dict[CallKey, ComparedCall] = {}
        self._mine: dict[CallKey, ComparedCall] = {}
        # id of a record -> its row, for both sides
        self._rows = (
            {own.id: d for d in rows if (own := d.pair.own(0))},
            {own.id: d for d in rows if (own := d.pair.own(1))},
        )
        # pairs first, so that a row of one side finds its call; first those with much in common
        pairs = [d for d in rows if d.pair.golden and d.pair.mine and d.pair.at_its_place]
        self._of_pairs = {d.index: self._join(d) for d in sorted(pairs, key=_is_unrelated)}
        self.all: list[ComparedCall] = []
        self.operated: set[str] = set()  # modules whose operators were recorded
        seen: set[int] = set()
        for call, role, d in [(*each, row) for row in rows for each in self._owners(row)]:
            of_role = call.inputs if role == "input" else call.weights if role == "weight" else None
            (call.outputs if of_role is None else of_role).append(d)
            if id(call) not in seen:
                seen.add(id(call))
                self.all.append(call)
                if call.is_operator:
                    self.operated.add(call.module)
        self.has_operators = tuple(  # of golden's run, of mine's
            any(is_operator(key.path) for key in side) for side in (self._golden, self._mine)
        )
        for call in self.all:
            call.span = _span(call)
        self.all.sort(key=lambda call: call.span[0])
        self._starts = [call.span[0] for call in self.all]
        for call in self.all:
            if any(_in_kernel(r) for d in call.inputs for r in (d.pair.golden, d.pair.mine)):
                call.reads = call.inputs
        for call in self.all:
            if call.reads:
                call.inputs = list(self._sources(call))

    def _owners(self, d: Difference) -> Iterator[tuple[ComparedCall, str]]:
        """Yield the calls that a row belongs to, with its role there: two if they differ."""
        if d.pair.at_its_place:
            yield self._of_pairs.get(d.index) or self._join(d), d.site.role
            return
        golden, mine = d.pair.own(0), d.pair.own(1)
        if golden is not None:
            yield self._joined(golden.site.key, None), golden.site.role
        if mine is not None:
            yield self._joined(None, mine.site.key), mine.site.role

    def _join(self, d: Difference) -> ComparedCall:
        golden, mine = d.pair.golden, d.pair.mine
        return self._joined(
            golden.site.key if golden is not None else None,
            mine.site.key if mine is not None else None,
        )

    def _joined(self, golden: CallKey | None, mine: CallKey | None) -> ComparedCall:
        """Return the call of a row, made if it is new."""
        call = self._golden.get(golden) if golden else None
        if call is None:
            there = self._mine.get(mine) if mine else None
            # if mine fuses several calls of golden into one, they stay several
            joins = there is not None and (golden is None or there.golden is None)
            call = there if there is not None and joins else ComparedCall()
        if golden is not None and call.golden is None:
            call.golden = golden
            self._golden[golden] = call
        if mine is not None:
            call.mine = call.mine or mine
            self._mine.setdefault(mine, call)
        return call

    def _sources(self, call: ComparedCall) -> Iterator[Difference]:
        """Yield the rows of the outputs that the inputs of a kernel are.

        Only one run has the kernel's inputs; both runs have these outputs.
        """
        side = 1 if any(_in_kernel(d.pair.mine) for d in call.reads) else 0
        queue = [d for d in call.reads if _in_kernel((d.pair.golden, d.pair.mine)[side])]
        seen: set[int] = set()
        while queue:
            source = self.producers(queue.pop(0))[side]
            if source is None or id(source) in seen:
                continue
            seen.add(id(source))
            if source.verdict != "unmatched":
                yield source
            else:
                before = self.of(source)
                rows = (before.reads or before.inputs) if before is not None else []
                queue += [d for d in rows if (d.pair.golden, d.pair.mine)[side] is not None]

    def of(self, d: Difference) -> ComparedCall | None:
        """Return the call that a row belongs to."""
        record = d.pair.own(0)
        if record is not None:
            return self._golden.get(record.site.key)
        return self._mine.get(d.pair.mine.site.key) if d.pair.mine is not None else None

    def both(self, region: Region) -> tuple[list[ComparedCall], list[ComparedCall]]:
        """Return golden's and mine's calls of a region."""
        return (
            [self.at(0, call.key) for call in region.golden],
            [self.at(1, call.key) for call in region.mine],
        )

    def at(self, side: int, key: CallKey) -> ComparedCall:
        """Return a call by its key in golden (``side`` 0) or in mine (1)."""
        return (self._golden, self._mine)[side][key]

    def producers(self, d: Difference) -> tuple[Difference | None, Difference | None]:
        """Return the rows of the producers of golden's and mine's tensor, if they were recorded."""
        golden, mine = (
            rows.get(record.producer) if record and record.producer is not None else None
            for rows, record in zip(self._rows, (d.pair.golden, d.pair.mine), strict=True)
        )
        return golden, mine

    def holder(self, call: ComparedCall) -> ComparedCall | None:
        """Return the innermost module call around a call, or None if none was recorded."""
        earlier = self.all[: bisect.bisect_right(self._starts, call.span[0])]
        around = [c for c in earlier if not c.is_operator and self.is_inside(call, c)]
        return max(around, key=lambda c: len(c.path), default=None)

    def inside(self, call: ComparedCall) -> list[ComparedCall]:
        """Return the calls inside a module call, in execution order."""
        first, last = call.span
        begin, end = (
            bisect.bisect_left(self._starts, first),
            bisect.bisect_right(self._starts, last),
        )
        return [other for other in self.all[begin:end] if self.is_inside(other, call)]

    def is_inside(self, other: ComparedCall, call: ComparedCall) -> bool:
        """Tell whether a call runs inside a module call."""
        if call.is_operator or other is call:
            return False
        first, last = call.span
        key = call.key
        in_span = first <= other.span[0] <= last
        return in_span and other.key[:3] == key[:3] and within(other.path, key.path)

    def is_made_around(self, call: ComparedCall, own: ComparedCall) -> bool:
        """Tell whether ``own`` is to blame for a call in it that can't be compared: it has ties."""
        given = {d.rule for d in call.outputs}
        return given == {Rule.AFTER_TIE} and self.is_inside(call, own)


def _span(call: ComparedCall) -> tuple[int, int]:
    """Return the first and the last row of a call."""
    places = [row.index for row in call.inputs + call.outputs or call.weights]
    return min(places, default=0), max(places, default=0)


def _is_unrelated(row: Difference) -> bool:
    """Tell whether two tensors that differ have nothing in common."""
    return row.differs and not (row.error is not None and row.error < constants.UNRELATED)


def _in_kernel(record: Record | None) -> bool:
    return record is not None and record.site.slot.startswith(IN_KERNEL)


def _op(records: Iterable[Record | None], key: CallKey | None) -> str | None:
    return next((r.op for r in records if r is not None and r.site.key == key), None)
