"""Pair the results of two programs that give them in other modules, or under other names.

A right port has golden's results somewhere, so their values pair them. Where a bug changes them,
nothing is left to pair by but the place and the shape. They have to be paired: a comparison that
leaves out what a program computes says nothing about it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.program_results import Results
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core.dtypes import is_floating, is_integer
from llmdebug_nb.core.identity import telling_bytes
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import CallKey, Record

_Slot = tuple[str, str]  # path and slot
_Key = tuple[str, tuple[object, ...]]
_Place = tuple[str, int, int, str, str]  # path, call of how many, role and slot


class ResultMatches:
    """Pairs the results of each pass; remembers which of them had the same values before."""

    def __init__(self) -> None:
        self._known: dict[_Slot, _Slot] = {}

    def match(
        self, sides: tuple[Sequence[Record], Sequence[Record]], pairs: Collection[Pair]
    ) -> Iterator[tuple[Record, Record]]:
        """Yield golden's and mine's results that belong together and have no partner yet.

        ``sides``: the records of one pass. ``pairs``: those of the pass that are paired.
        """
        golden, mine = (_floating(records) for records in sides)
        theirs, ours = ({record.id for record in side} for side in (golden, mine))
        found = {
            pair.golden.id: pair.mine.id
            for pair in pairs
            if pair.golden is not None and pair.mine is not None and pair.golden.id in theirs
        }
        answered = set(found.values()) & ours
        by_id = {record.id: record for record in mine}
        for record in golden:
            if found.get(record.id) in answered:
                self._known.setdefault(_slot(record), _slot(by_id[found[record.id]]))
        left = [record for record in golden if record.id not in found]
        if not left:
            return
        placed = {pair.mine.id for pair in pairs if pair.mine is not None and pair.at_its_place}
        handed_on = _Partners(pairs, ours)
        taken = answered | placed
        free = _Free(record for record in mine if record.id not in taken)
        shapes = Counter(record.summary.shape for record in left)
        # beside what golden computes inside: it is mine's result all the same
        inside = {_slot(record): record for record in mine if record.id in placed - answered}
        for record in reversed(left):
            shapes[record.summary.shape] -= 1
            alone = not shapes[record.summary.shape]
            slot = self._known.get(_slot(record))
            partner = handed_on.of(record) or (inside.get(slot) if slot is not None else None)
            if partner is not None:
                yield record, partner
                continue
            partner = self._partner(record, alone, free, bool(found))
            if partner is not None:
                free.remove(partner)
                yield record, partner

    def _partner(self, record: Record, alone: bool, free: _Free, answered: bool) -> Record | None:
        """Return the partner of a result: as in an earlier step, else by its shape.

        If ``answered``, other results have partners, and this one may be one that mine does not
        give; then its shape has to be the only one of its kind: ``alone`` among golden's that are
        left, and in mine. Else the last one of mine counts.
        """
        slot = self._known.get(_slot(record))
        partner = free.first("slot", slot) if slot is not None else None
        if partner is not None:
            return partner
        shape = record.summary.shape
        if answered:
            return free.only("shape", shape) if alone else None
        return free.last("shape", shape) or (free.last("rows", shape[-1:]) if shape else None)


def place_results(
    sides: tuple[Sequence[Record], Sequence[Record]], pairs: Mapping[int, list[Pair]]
) -> None:
    """Let the pairs of two results stand at their place: both are what the programs give.

    ``sides``: the records of one pass. ``pairs``: by the id of golden's record.
    """
    moved = [r for r in sides[0] for pair in pairs.get(r.id, ()) if pair.elsewhere]
    if not moved:
        return
    golden, mine = Results(sides[0]), Results(sides[1])
    for record in filter(golden.__contains__, moved):
        found = pairs[record.id]
        found[:] = [
            replace(pair, elsewhere="", alone=None) if pair.mine in mine else pair for pair in found
        ]


class _Partners:
    """Mine's results at the places of golden's tensors, by what golden's hold.

    A model hands on what its last module gives: the result that answers to the one answers to the
    other. What mine only computes inside is no answer, as it may do more with it.
    """

    def __init__(self, pairs: Iterable[Pair], ours: Collection[int]) -> None:
        self._found = {
            (pair.golden.summary.fingerprint, pair.golden.summary.shape): pair.mine
            for pair in pairs
            if pair.golden is not None and pair.mine is not None and pair.at_its_place
            and pair.mine.id in ours and pair.golden.site.role == pair.mine.site.role == "output"
        }  # fmt: skip

    def of(self, record: Record) -> Record | None:
        known = telling_bytes(record.summary)
        return self._found.get((known, record.summary.shape)) if known else None


class _Free:
    """Mine's results without a partner, in order. A look takes no longer where there are many."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._found: dict[_Key, dict[int, Record]] = defaultdict(dict)
        for record in records:
            for key in _keys(record):
                self._found[key][record.id] = record

    def first(self, what: str, of: tuple[object, ...]) -> Record | None:
        return next(iter(self._found.get((what, of), {}).values()), None)

    def last(self, what: str, of: tuple[object, ...]) -> Record | None:
        return next(reversed(self._found.get((what, of), {}).values()), None)

    def only(self, what: str, of: tuple[object, ...]) -> Record | None:
        return self.first(what, of) if len(self._found.get((what, of), ())) == 1 else None

    def remove(self, record: Record) -> None:
        for key in _keys(record):
            del self._found[key][record.id]


def _keys(record: Record) -> tuple[_Key, ...]:
    """Return what a result may be found by: its place, its shape, the length of its rows."""
    shape = record.summary.shape
    return ("slot", _slot(record)), ("shape", shape), ("rows", shape[-1:])


class RoleMatches:
    """Pairs tensors whose values identify nothing, at the places that matched in an earlier step.

    Two places that held the same values in an earlier step belong together. So a step of one token
    is paired, whose positions are one number, and a step that differs. Where integers have no
    partner in the first step, what each other's modules take is tried. Which call of several a
    place is can be told only in steps that have as many of them. Golden may make in two calls
    what mine makes at once: the range from an offset on is the sum of a range and that offset. If
    golden takes the range for nothing else, mine's is its sum.
    """

    def __init__(self, layouts: LayoutFinder) -> None:
        self._layouts = layouts
        self._sums: dict[_Place, _Place] = {}  # by the place of golden's range
        self._known: dict[_Place, dict[_Place, tuple[Record, Record]]] = {}  # by mine's place
        # pairs that it lacks, in order, and their places
        self._unread: list[tuple[tuple[_Place, _Place], tuple[Record, Record]]] = []
        self._calls: tuple[Counter[str], ...] = ()  # of either side's pass, by path
        self._agreed: dict[tuple[int, int], bool] = {}

    def match(
        self, sides: tuple[Sequence[Record], Sequence[Record]], pairs: Collection[Pair]
    ) -> Iterator[tuple[Record, Record]]:
        """Yield golden's and mine's tensors without partners that play the same part.

        ``sides``: the records of one pass. ``pairs``: those of the pass that are paired.
        """
        self._calls = tuple(map(_count_calls, sides))
        both = [(p.golden, p.mine) for p in pairs if p.golden is not None and p.mine is not None]
        done = {one.id for one, _ in both}, {other.id for _, other in both}
        left = [r for r in sides[1] if r.id not in done[1] and r.site.role != "weight"]
        found = [*self._as_earlier(sides[0], left, done[0])] if left else []
        done[1].update(other.id for _, other in found)
        found += self._counted(sides[0], [r for r in left if r.id not in done[1]])
        yield from found
        self._unread += [((self._place(g, 0), self._place(m, 1)), (g, m)) for g, m in both + found]
        self._remember_sums({g.id: g for g, _ in both + found if _is_whole(g)}, sides[0])

    def _as_earlier(
        self, golden_records: Sequence[Record], left: Sequence[Record], done: set[int]
    ) -> Iterator[tuple[Record, Record]]:
        """Yield partners of what is left of mine. ``done``: ids of golden's that have one."""
        golden = {self._place(record, 0): record for record in golden_records}
        for (there, here), pair in self._unread:
            self._known.setdefault(here, {}).setdefault(there, pair)
        self._unread.clear()
        for record in left:
            known = [
                other
                for place, then in self._known.get(self._place(record, 1), {}).items()
                if (other := golden.get(place)) is not None
                and (_counts(record) or other.id not in done)
                and self._agree(*then)
            ]
            if not known:
                continue
            value = record.summary.min, record.summary.max
            partner = min(known, key=lambda r: (r.summary.min, r.summary.max) != value)
            place = self._sums.get(self._place(partner, 0))
            total = golden.get(place) if place is not None else None
            if total is not None and not _same_bytes(partner, record):
                partner = total if _same_bytes(total, record) else partner
            yield partner, record

    def _remember_sums(self, paired: Mapping[int, Record], golden: Sequence[Record]) -> None:
        """Remember where golden makes of integers, by one operator alone, the same ones.

        ``paired``: those that have a partner, by id.
        """
        if not paired:
            return
        takers: dict[int, set[CallKey]] = defaultdict(set)
        made: dict[CallKey, Record] = {}
        for record in golden:
            site = record.site
            if site.role == "input" and record.producer is not None:
                takers[record.producer].add(site.key)
            elif site.role == "output" and _is_whole(record) and is_operator(site.path):
                made.setdefault(site.key, record)
        for record in (r for r in paired.values() if telling_bytes(r.summary)):
            maker = record.id if record.site.role == "output" else record.producer
            calls = takers[maker] if maker is not None else ()
            for total in (made[key] for key in calls if key in made and len(calls) == 1):
                if _same_bytes(record, total):
                    self._sums[self._place(record, 0)] = self._place(total, 0)

    def _counted(
        self, golden_records: Sequence[Record], left: Sequence[Record]
    ) -> Iterator[tuple[Record, Record]]:
        left = [record for record in left if _counts(record) and telling_bytes(record.summary)]
        if not left:
            return
        golden = {r.summary.fingerprint: r for r in reversed(golden_records) if _counts(r)}
        partners: dict[str | None, Record | None] = {}  # by the bytes of mine
        for record in left:
            key = record.summary.fingerprint
            if key not in partners:
                partners[key] = next((r for r in golden.values() if self._agree(r, record)), None)
            partner = partners[key]
            if partner is not None:
                yield partner, record

    def _place(self, record: Record, side: int) -> _Place:
        """Return which part a record of golden's (0) or mine's (1) pass plays."""
        site = record.site
        return site.path, site.call, self._calls[side][site.path], site.role, site.slot

    def _agree(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors hold the same values, and not by chance."""
        key = golden.id, mine.id
        if key not in self._agreed:
            same = telling_bytes(golden.summary) and _same_bytes(golden, mine)
            self._agreed[key] = bool(same) or self._layouts.distance(golden, mine) is not None
        return self._agreed[key]


def _is_whole(record: Record) -> bool:
    return is_integer(record.summary.dtype)


def _same_bytes(golden: Record, mine: Record) -> bool:
    known = golden.summary.fingerprint
    return known is not None and known == mine.summary.fingerprint


def _counts(record: Record) -> bool:
    """Tell whether a tensor is an input of a module and holds integers."""
    module = not is_operator(record.site.path)
    return _is_whole(record) and record.site.role == "input" and module


def _count_calls(records: Iterable[Record]) -> Counter[str]:
    """Return how often each path of a pass is called."""
    return Counter(path for path, _ in {(r.site.path, r.site.call) for r in records})


def _floating(records: Sequence[Record]) -> list[Record]:
    """Return the results of a pass that hold numbers of a float."""
    results = Results(records)
    outputs = [r for r in records if r.site.role == "output" and is_floating(r.summary.dtype)]
    return [record for record in outputs if record in results]


def _slot(record: Record) -> _Slot:
    return record.site.path, record.site.slot
