"""Find the tensors of two runs that hold the same values, wherever they were made.

Code that somebody else wrote calls other operators, in other modules and another order. What it
computes on the way is the same. So tensors are paired by what they hold: equal bytes first, then
tensors of the same size whose statistics agree, then those that lie in larger ones
(`landmarks.py`). The values confirm it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmdebug_nb.align import sequence
from llmdebug_nb.align.calls import grouped
from llmdebug_nb.align.landmarks import Landmarks
from llmdebug_nb.align.sequence import MatchTolerance
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.identity import identifies_itself, telling_bytes
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Record

_Sides = tuple[Mapping[object, Sequence[Record]], Mapping[object, Sequence[Record]]]
_Found = tuple[float, object, object]  # the error, and the keys of two tensors


@dataclass(frozen=True, slots=True)
class ValueMatch:
    """Two records that hold the same values. ``error``: relative L2, 0 for equal bytes."""

    golden: Record
    mine: Record
    error: float

    def likeness(self) -> tuple[float, bool, bool]:
        """Return what decides between records that hold the same: rounding, role and operator."""
        golden, mine = self.golden, self.mine
        return self.error, golden.site.role != mine.site.role, golden.op != mine.op


class ValueMatches:
    """The tensors of one pass that both runs have, by the id of a record of either side.

    ``paired``: ids of golden's and of mine's records that nobody will ask for: they have a partner.
    They may be what another record matches.
    """

    def __init__(
        self,
        golden: Iterable[Record],
        mine: Iterable[Record],
        layouts: LayoutFinder,
        tolerance: MatchTolerance,
        paired: tuple[Container[int], Container[int]] = ((), ()),
    ) -> None:
        self._layouts, self._tolerance = layouts, tolerance
        sides = [_distinct(records) for records in (golden, mine)]
        self._wanted = [
            {key for key, records in side.items() if any(r.id not in done for r in records)}
            for side, done in zip(sides, paired, strict=True)
        ]
        self._key = [
            {record.id: key for key, records in side.items() for record in records}
            for side in sides
        ]
        self._records = sides
        self._partners: tuple[dict[object, list[tuple[float, object]]], ...] = (
            defaultdict(list),
            defaultdict(list),
        )
        self._match((sides[0], sides[1]))

    def of_golden(self, record: Record) -> list[ValueMatch]:
        """Return the matches of a record of golden: the closest first, then in execution order."""
        return [
            ValueMatch(record, other, error)
            for error, key in self._partners[0].get(self._key[0].get(record.id), ())
            for other in self._records[1][key]
        ]

    def of_mine(self, record: Record) -> list[ValueMatch]:
        """Return the matches of a record of mine, likewise."""
        return [
            ValueMatch(other, record, error)
            for error, key in self._partners[1].get(self._key[1].get(record.id), ())
            for other in self._records[0][key]
        ]

    def holders(self, record: Record, side: int) -> list[ValueMatch]:
        """Return the matches with all of golden's (0) or mine's (1) tensor that both were given."""
        found = []
        for match in (self.of_golden, self.of_mine)[side](record):
            other = (match.mine, match.golden)[side]
            if record.summary.numel > other.summary.numel:
                fit = self._layouts.fit(match.golden, match.mine, fused=True)
                if fit is None or not fit.shared:
                    continue  # the rest may be another part
            found.append(match)
        return found

    def _match(self, sides: _Sides) -> None:
        equal = sides[0].keys() & sides[1].keys()
        for key in equal:
            self._partners[0][key].append((0.0, key))
            self._partners[1][key].append((0.0, key))
        golden, mine = ({key: records[0] for key, records in side.items()} for side in sides)
        wanted = [keys - equal for keys in self._wanted]  # an equal of theirs may lie otherwise
        candidates = [
            both
            for both in self._candidates(golden, mine, wanted[0] | wanted[1])
            if both[0] in wanted[0] or both[1] in wanted[1]
        ]
        # values are read in execution order: those of a program that runs again come so, too
        errors = {
            (one, other): self._error(golden[one], mine[other])
            for one, other in sorted(candidates, key=lambda each: golden[each[0]].id)
        }
        whole = [(error, *both) for both in candidates if (error := errors[both]) is not None]
        for error, one, other in _closest(each for each in whole if each[1] not in equal):
            self._partners[0][one].append((error, other))
        turned = [(error, other, one) for error, one, other in whole if other not in equal]
        for error, other, one in _closest(turned):
            self._partners[1][other].append((error, one))
        for side, alone in enumerate((golden, mine)):
            found = {each[1 + side] for each in whole}
            small = {key: r for key, r in alone.items() if key in wanted[side] and key not in found}
            for error, one, other in _closest(self._holders(small, side)):
                self._partners[side][one].append((error, other))
                self._partners[1 - side][other].append((error, one))

    def _candidates(
        self, golden: dict[object, Record], mine: dict[object, Record], wanted: set[object]
    ) -> Iterator[tuple[object, object]]:
        """Yield pairs of keys whose statistics agree, the few best of each tensor.

        Tensors of a size of which none is ``wanted`` are left out.
        """
        groups: dict[tuple[int, bool], tuple[list[object], list[object]]] = {}
        for side, records in enumerate((golden, mine)):
            for key, record in records.items():
                s = record.summary
                kind = s.numel, is_floating(s.dtype)
                groups.setdefault(kind, ([], []))[side].append(key)
        for ours, theirs in groups.values():
            if not ours or not theirs or wanted.isdisjoint((*ours, *theirs)):
                continue
            digits = sequence.digits(
                [golden[key].summary for key in ours], [mine[key].summary for key in theirs]
            )
            enough = digits >= min(self._tolerance.sure_digits, constants.TELLING_DIGITS)
            one, other = np.nonzero(enough)
            alike = digits[one, other]
            best = _first_of_each(one, other, alike) | _first_of_each(other, one, alike)
            for i, j in zip(one[best].tolist(), other[best].tolist(), strict=True):
                yield ours[i], theirs[j]

    def _holders(self, small: Mapping[object, Record], side: int) -> list[_Found]:
        """Return the larger tensors of the other run that hold small ones of this run.

        Not of those that both runs were given at one place, as weights are: they are compared.
        """
        marks = Landmarks(self._numbers(small, side), self._tolerance.close)
        if not marks.keys:
            return []
        others = {
            key: records[0]
            for key, records in self._records[1 - side].items()
            if key in self._wanted[1 - side] or not _are_given(records)
        }
        sizes = {key: record.summary.numel for key, record in others.items()}
        least = min(small[key].summary.numel for key in marks.keys)
        large = {
            key: others[key] for key in sorted(sizes, key=sizes.__getitem__) if sizes[key] > least
        }
        order = {key: place for place, key in enumerate(large)}
        holders = grouped(marks.holders(self._numbers(large, 1 - side)))
        found = []
        for key, own in small.items():
            size = 0  # of the smallest tensors that hold it
            own_size = own.summary.numel
            for other in sorted(holders.get(key, ()), key=order.__getitem__):
                numel = sizes[other]
                if numel <= own_size or 0 < size < numel:
                    continue
                pair = (own, large[other]) if side == 0 else (large[other], own)
                if (error := self._error(*pair, part=True)) is not None:
                    found.append((error, key, other))
                    size = numel
        return found

    def _numbers(
        self, records: Mapping[object, Record], side: int
    ) -> Iterator[tuple[object, np.ndarray]]:
        """Yield what tensors hold, float32, in execution order; not of integers or the unknown."""
        for key, record in sorted(records.items(), key=lambda each: each[1].id):
            floating = is_floating(record.summary.dtype)
            values = self._layouts.values_of(record, side) if floating else None
            if values is not None:
                yield key, values.numpy()

    def _error(self, golden: Record, mine: Record, part: bool = False) -> float | None:
        """Return how far two tensors are apart, if that is near; integers have to be equal."""
        error = self._layouts.distance(golden, mine, part)
        close = self._tolerance.close if is_floating(golden.summary.dtype) else 0.0
        return error if error is not None and error <= close else None


def _are_given(records: Iterable[Record]) -> bool:
    """Tell whether operators take a tensor that no call made: a weight, say."""
    return all(
        is_operator(r.site.path) and r.site.role == "input" and r.producer is None for r in records
    )


def _first_of_each(of: np.ndarray, place: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Return which pairs are among the few most alike of each number in ``of``, bool[n].

    Of pairs that are as much alike, those with a smaller ``place`` come first.
    """
    order = np.lexsort((place, -alike, of))
    begins = np.searchsorted(of[order], of[order])
    first = np.zeros(len(of), bool)
    first[order] = np.arange(len(of)) - begins < constants.CONFIRMED_CANDIDATES
    return first


def _closest(found: Iterable[_Found]) -> list[_Found]:
    """Return what is about as close as the closest of the same first key, the closest first."""
    found = sorted(found, key=lambda each: each[0])
    least: dict[object, float] = {}
    for error, key, _ in found:
        least.setdefault(key, error)
    return [each for each in found if each[0] <= least[each[1]] * constants.TIED_PARTNERS]


def _distinct(records: Iterable[Record]) -> dict[object, list[Record]]:
    """Return the records by what they hold: equal bytes have one key.

    A tensor that does not identify itself is left out.
    """
    found: dict[object, list[Record]] = {}
    for record in records:
        s = record.summary
        if record.site.role == "weight" or not identifies_itself(s):
            continue
        key = (s.fingerprint, s.dtype, s.numel) if s.fingerprint else record.id
        found.setdefault(key, []).append(record)
    return found


class WeightMatches:
    """The weights of two runs by their bytes: a module may have moved, or hold them elsewhere."""

    def __init__(self, sides: tuple[Sequence[Record], Sequence[Record]]) -> None:
        self._by_bytes: tuple[dict[object, list[Record]], ...] = ({}, {})
        for weights, records in zip(self._by_bytes, sides, strict=True):
            for r in records:
                if r.site.role == "weight" and (known := telling_bytes(r.summary)):
                    weights.setdefault(known, []).append(r)

    def only(
        self, record: Record, of_golden: bool, paired: tuple[Container[int], Container[int]]
    ) -> ValueMatch | None:
        """Return the match of a weight with the only unpaired one of its bytes.

        ``paired``: ids of golden's and of mine's records that have a partner.
        """
        side = int(of_golden)
        same = self._by_bytes[side].get(telling_bytes(record.summary), ())
        free = [other for other in same if other.id not in paired[side]]
        if len(free) != 1:
            return None
        return ValueMatch(*((record, free[0]) if of_golden else (free[0], record)), 0.0)
