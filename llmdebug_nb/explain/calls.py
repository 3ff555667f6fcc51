"""The calls of a comparison: what each was given and gave on both sides, and which call that came from."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmdebug_nb.core.findings import EXPECTED, Difference
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import IN_KERNEL, Record

AGREES = ("match", "within_noise", EXPECTED)
_IN_PLACE = re.compile(r"(?<=[A-Za-z0-9])_(?=\.|$)")


class Key(NamedTuple):
    """Which call of which run."""

    rank: int
    generation: int
    step: int
    phase: str
    path: str
    call: int

    @classmethod
    def of(cls, record: Record) -> Key:
        s = record.site
        return cls(s.rank, s.generation, s.step, s.phase, s.path, s.call)


@dataclass(eq=False)
class Call:
    """The rows of one call. ``golden``/``mine``: which call it is there, or None: only the other run made it.

    ``reads``: where a kernel computes it together with others, in one of the runs, what that reads; ``inputs`` are then the rows in which that was made.
    ``span``: its first and its last row.
    """

    golden: Key | None = None
    mine: Key | None = None
    inputs: list[Difference] = field(default_factory=list)
    weights: list[Difference] = field(default_factory=list)
    outputs: list[Difference] = field(default_factory=list)
    reads: list[Difference] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)

    @property
    def key(self) -> Key:
        key = self.golden or self.mine
        assert key is not None
        return key

    @property
    def path(self) -> str:
        return self.key.path

    @property
    def module(self) -> str:
        """The module that it is, or runs in."""
        return self.key.path.partition("/")[0]

    @property
    def is_operator(self) -> bool:
        return "/" in self.key.path

    @property
    def is_fused(self) -> bool:
        """A kernel computes it together with others, in one of the runs."""
        return bool(self.reads)

    @property
    def op(self) -> str:
        rows = self.outputs or self.inputs or self.weights
        return rows[0].op if rows else ""

    @property
    def ops(self) -> tuple[str | None, str | None]:
        """Golden's and mine's operator, or class of the module."""
        return _op(row.pair.golden for row in self.rows()), _op(
            row.pair.mine for row in self.rows()
        )

    @property
    def one_sided(self) -> bool:
        return self.golden is None or self.mine is None

    @property
    def bad_output(self) -> Difference | None:
        return first_divergence(self.outputs)

    @property
    def bad_input(self) -> Difference | None:
        return first_divergence(self.inputs)

    @property
    def made_it(self) -> bool:
        """Its output diverged and nothing that it was given did, or was there on one side only.

        Another class may take other arguments for the same: of such a call, something that it was given must agree.
        """
        if self.bad_output is None or self.bad_input is not None:
            return False
        agreeing = sum(d.verdict in AGREES for d in self.inputs)
        return agreeing == len(self.inputs) or (agreeing > 0 and self.is_rewritten)

    @property
    def is_rewritten(self) -> bool:
        """It is a module of another class in mine."""
        golden, mine = self.ops
        return not self.is_operator and None not in (golden, mine) and golden != mine

    @property
    def start(self) -> int:
        return min((row.index for row in self.rows()), default=0)

    @property
    def place(self) -> int:
        bad = self.bad_output
        return bad.index if bad else self.start

    def rows(self) -> Iterator[Difference]:
        yield from self.inputs
        yield from self.weights
        yield from self.outputs


def first_divergence(differences: Iterable[Difference]) -> Difference | None:
    """Return the first diverged row in execution order."""
    return next((d for d in differences if d.verdict == "diverged"), None)


def same_operator(golden: str, mine: str) -> bool:
    """Tell whether two operators are one: compiled code does nothing in place, so ``Aten.add_.Tensor`` is ``Aten.add.Tensor``."""
    return golden == mine or _IN_PLACE.sub("", golden) == _IN_PLACE.sub("", mine)


class Calls:
    """The calls of one phase, in execution order."""

    def __init__(self, differences: Sequence[Difference], phase: str) -> None:
        rows = [d for d in differences if d.pair.either.site.phase == phase]
        self._golden: dict[Key, Call] = {}
        self._mine: dict[Key, Call] = {}
        self._made_golden = {d.pair.golden.id: d for d in rows if d.pair.golden}
        self._made_mine = {d.pair.mine.id: d for d in rows if d.pair.mine}
        both = [d for d in rows if d.pair.golden and d.pair.mine]
        for d in both:  # first, so that a row with one side finds the call that it belongs to
            self._join(d)
        self.all: list[Call] = []
        self.operated: set[str] = set()  # modules of which operators were recorded
        seen: set[int] = set()
        for d in rows:
            call = self._join(d)
            {"input": call.inputs, "weight": call.weights}.get(
                d.pair.either.site.role, call.outputs
            ).append(d)
            if id(call) not in seen:
                seen.add(id(call))
                self.all.append(call)
                if call.is_operator:
                    self.operated.add(call.module)
        for call in self.all:
            call.span = _span(call)
        self._starts = [call.span[0] for call in self.all]  # rising, as rows are in order
        for call in self.all:
            if any(
                _in_kernel(r)
                for d in call.inputs
                for r in (d.pair.golden, d.pair.mine)
                if r is not None
            ):
                call.reads = call.inputs
        for call in self.all:
            if call.reads:
                call.inputs = list(self._made_of(call))

    def _join(self, d: Difference) -> Call:
        golden = Key.of(d.pair.golden) if d.pair.golden else None
        mine = Key.of(d.pair.mine) if d.pair.mine else None
        call = self._golden.get(golden) if golden else None
        if call is None:
            there = self._mine.get(mine) if mine else None
            # what is several calls in golden, and one that is fused in mine, stays several
            call = (
                there if there is not None and (golden is None or there.golden is None) else Call()
            )
        if golden is not None and call.golden is None:
            call.golden = golden
            self._golden[golden] = call
        if mine is not None and call.mine is None:
            call.mine = mine
            self._mine.setdefault(mine, call)
        return call

    def _made_of(self, call: Call) -> Iterator[Difference]:
        """Yield the rows in which what a kernel reads was made: these are compared, while only one run reads it like that."""
        side = 1 if any(d.pair.mine and _in_kernel(d.pair.mine) for d in call.reads) else 0
        queue = [
            d
            for d in call.reads
            if (r := (d.pair.golden, d.pair.mine)[side]) is not None and _in_kernel(r)
        ]
        seen: set[int] = set()
        while queue:
            made = self.producers(queue.pop(0))[side]
            if made is None or id(made) in seen:
                continue
            seen.add(id(made))
            if made.verdict != "unmatched":
                yield made
            else:
                before = self.of(made)
                given = (before.reads or before.inputs) if before is not None else []
                queue += [d for d in given if (d.pair.golden, d.pair.mine)[side] is not None]

    def of(self, d: Difference) -> Call | None:
        """Return the call that a row belongs to."""
        pair = d.pair
        return (
            self._golden.get(Key.of(pair.golden))
            if pair.golden
            else self._mine.get(Key.of(pair.either))
        )

    def producers(self, d: Difference) -> tuple[Difference | None, Difference | None]:
        """Return the rows of the tensors that golden's and mine's side of ``d`` were made of, where they were recorded."""
        golden, mine = d.pair.golden, d.pair.mine
        return (
            self._made_golden.get(golden.producer)
            if golden and golden.producer is not None
            else None,
            self._made_mine.get(mine.producer) if mine and mine.producer is not None else None,
        )

    def of_mine(self, number: int) -> Record | None:
        """Return a record of mine that put out a tensor, by its id."""
        row = self._made_mine.get(number)
        return row.pair.mine if row is not None else None

    def holder(self, call: Call) -> Call | None:
        """Return the innermost module call that a call runs within, or None where none was recorded."""
        around = [c for c in self.all if self.is_inside(call, c)]
        return max(around, key=lambda c: len(c.path), default=None)

    def inside(self, call: Call) -> list[Call]:
        """Return the calls that run within a module call, in execution order."""
        first, last = call.span
        places = slice(
            bisect.bisect_left(self._starts, first), bisect.bisect_right(self._starts, last)
        )
        return [other for other in self.all[places] if self.is_inside(other, call)]

    def is_inside(self, other: Call, call: Call) -> bool:
        """Tell whether a call runs within a module call."""
        if call.is_operator or other is call:
            return False
        first, last = call.span
        key, begun = call.key, other.span[0]
        return first <= begun <= last and other.key[:3] == key[:3] and within(other.path, key.path)


def _span(call: Call) -> tuple[int, int]:
    """Return the first and the last row of a call."""
    places = [row.index for row in call.rows()]
    return min(places, default=0), max(places, default=0)


def _in_kernel(record: Record) -> bool:
    return record.site.slot.startswith(IN_KERNEL)


def _op(records: Iterable[Record | None]) -> str | None:
    return next((record.op for record in records if record is not None), None)
