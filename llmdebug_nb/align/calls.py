"""The calls of a run, and the matching calls and tensors of two runs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from llmdebug_nb.align import quantised, sequence
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.sequence import CallFeatures, MatchTolerance
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.paths import ancestors, is_operator, module_of
from llmdebug_nb.core.records import IN_KERNEL, CallKey, Record, Summary, summed

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
Pass = tuple[int, int, int, str]  # rank, generation, step, phase
Kind = Callable[["RecordedCall"], str]
Compare = Callable[["RecordedCall", "RecordedCall"], str]
# id of a call -> number, for both sides; calls that are paired have the same number
Numbers = tuple[dict[int, int], dict[int, int]]


@dataclass(slots=True)
class RecordedCall:
    """The records of one call. ``module``: its path, or that of the module around an operator.

    ``is_fused``: a kernel computes it together with others; its inputs are then the kernel's.
    """

    path: str
    module: str
    operator: bool
    op: str
    records: list[Record] = field(default_factory=list)
    first_output: Record | None = None
    is_fused: bool = False
    _shape: tuple[object, ...] = ()

    def add(self, record: Record) -> None:
        site = record.site
        self.records.append(record)
        if self.first_output is None and site.role == "output":
            self.first_output = record
        self.is_fused = self.is_fused or site.slot.startswith(IN_KERNEL)

    @property
    def output(self) -> Summary | None:
        """The statistics of the first output."""
        first = self.first_output
        return first.summary if first is not None else None

    @property
    def shape(self) -> tuple[object, ...]:
        """Role, slot and shape of every tensor."""
        if not self._shape:  # all records are there when it is first asked for
            self._shape = tuple([(r.site.role, r.site.slot, r.summary.shape) for r in self.records])
        return self._shape


def grouped(items: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, in their order."""
    groups: dict[_K, list[_V]] = {}
    for key, value in items:
        groups.setdefault(key, []).append(value)
    return groups


def places_of(
    calls: Iterable[RecordedCall], kind: Callable[[RecordedCall], str]
) -> dict[int, tuple[int, int]]:
    """Return which operator of its kind each one is in its module, and of how many; by its id."""
    found: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
    for call in calls:
        if call.operator:
            found[call.module, kind(call)].append(call)
    return {
        id(call): (number, len(alike))
        for alike in found.values()
        for number, call in enumerate(alike)
    }


def calls_by_pass(records: Iterable[Record]) -> dict[Pass, list[RecordedCall]]:
    """Return the calls of each pass over the model, in the order in which they began."""
    passes: dict[Pass, list[RecordedCall]] = defaultdict(list)
    calls: dict[CallKey, RecordedCall] = {}
    for record in records:
        s = record.site
        key = s.key
        call = calls.get(key)
        if call is None:
            call = RecordedCall(s.path, module_of(s.path), is_operator(s.path), record.op)
            calls[key] = call
            passes[s.rank, s.generation, s.step, s.phase].append(call)
        call.add(record)
    return dict(passes)


def by_parent(calls: list[RecordedCall]) -> dict[str, list[RecordedCall]]:
    """Return the calls directly inside each module: its operators, and the modules below it.

    A module belongs to the innermost module around it that was called.
    """
    called = {call.module for call in calls}
    groups: dict[str, list[RecordedCall]] = {}
    for call in calls:
        parent: str | None = call.module
        if not call.operator:
            parent = next((outer for outer in ancestors(call.module) if outer in called), None)
        if parent is not None:
            groups.setdefault(parent, []).append(call)
    return groups


def pair_ranks(golden: Iterable[Pass], mine: Iterable[Pass]) -> dict[int, list[int]]:
    """Return golden's rank -> mine's ranks: the same, or all if one run has a single rank."""
    ours, theirs = (sorted({key[0] for key in keys}) for keys in (golden, mine))
    if len(ours) != len(theirs) and 1 in (len(ours), len(theirs)):
        return dict.fromkeys(ours, theirs)
    return {rank: [rank] for rank in ours}


def match_modules(
    golden: list[RecordedCall], mine: list[RecordedCall]
) -> Iterator[tuple[RecordedCall, RecordedCall]]:
    """Yield the matching calls of one module."""
    if len(golden) == len(mine) == 1:  # nearly all: whatever they give, there is no other call
        yield golden[0], mine[0]
        return
    sides = [[CallFeatures("call", value=c.output) for c in calls] for calls in (golden, mine)]
    for i, j in sequence.align(sides[0], sides[1]):
        yield golden[i], mine[j]


class Operators:
    """The operators of two modules that belong together, to be aligned.

    ``kinds``: for each side, the text that identifies a call. ``paired``: calls that match already.
    Those that are in both modules, be they of inner modules, are the fixed points of the alignment.
    """

    def __init__(
        self,
        golden: list[RecordedCall],
        mine: list[RecordedCall],
        kinds: tuple[Kind, Kind],
        paired: Numbers,
        tolerance: MatchTolerance,
    ) -> None:
        self._tolerance = tolerance
        self._kept, self._features = [], []
        shared = _shared(golden, mine, paired)
        for calls, numbers, kind in zip((golden, mine), shared, kinds, strict=True):
            kept = [call for call in calls if call.operator or id(call) in numbers]
            self._kept.append(kept)
            self._features.append([_known(call, numbers.get(id(call), 0), kind) for call in kept])

    @functools.cached_property
    def are_parallel(self) -> bool:
        """Whether both modules call the same operators in the same order."""
        return sequence.is_parallel(self._features[0], self._features[1], self._tolerance)

    def matches(self, compare: Compare) -> list[tuple[RecordedCall, RecordedCall]]:
        """Return the operator calls that match.

        ``compare``: describes what the values of two calls have in common; "" refuses the pair,
        and the rest is aligned again without it.
        """
        golden, mine = self._features
        says: dict[tuple[int, int], str] = {}
        pairs: list[tuple[int, int]] = []
        for _ in range(constants.ALIGNMENT_ROUNDS):
            refused = {pair for pair, common in says.items() if not common}
            pairs = sequence.align(golden, mine, self._tolerance, refused, self.are_parallel)
            pairs = [(i, j) for i, j in pairs if not golden[i].anchor]
            new = [pair for pair in pairs if pair not in says]
            says |= {(i, j): compare(self._kept[0][i], self._kept[1][j]) for i, j in new}
            if all(says[pair] for pair in new):
                break
        return [(self._kept[0][i], self._kept[1][j]) for i, j in pairs if says[i, j]]


def _shared(golden: list[RecordedCall], mine: list[RecordedCall], paired: Numbers) -> Numbers:
    """Return the numbers of the pairs that have both calls in these lists."""
    ours, theirs = (
        {id(call): numbers[id(call)] for call in calls if id(call) in numbers}
        for calls, numbers in zip((golden, mine), paired, strict=True)
    )
    both = set(ours.values()) & set(theirs.values())
    return (
        {call: number for call, number in ours.items() if number in both},
        {call: number for call, number in theirs.items() if number in both},
    )


def _known(call: RecordedCall, number: int, kind: Kind) -> CallFeatures:
    """Return the features of a call. ``number``: of its pair; 0: it is in none yet."""
    if number:
        return CallFeatures("", anchor=number)
    return CallFeatures(kind(call), call.shape, value=call.output)


def match_tensors(
    golden: RecordedCall, mine: RecordedCall, names: Names, replaced: bool, sure_digits: float
) -> Iterator[tuple[Record, Record, str]]:
    """Yield the matching tensors of two calls, with a text if their slots differ, else "".

    Tensors match by role and slot. The rest matches by the user's map, then by value, then as the
    only tensor of its shape. ``sure_digits``: decimal digits of agreement that identify a tensor.
    ``replaced``: other operators compute the same result: only outputs, and inputs of equal
    values, match.
    """
    if golden.is_fused or mine.is_fused:
        yield from _outputs(golden, mine)
        return
    theirs = {(r.site.role, r.site.slot): r for r in mine.records}
    reordered = {} if replaced or not golden.operator else _reordered(golden, mine, sure_digits)
    left: list[Record] = []
    for record in golden.records:
        s = record.site
        if record.id in reordered:
            other = reordered[record.id]
            del theirs[other.site.role, other.site.slot]
            yield record, other, f"{s.slot} is {other.site.slot} there: operands in another order"
            continue
        same_slot = not replaced or s.role == "output"
        partner = theirs.pop((s.role, s.slot), None) if same_slot else None
        if partner is not None:
            yield record, partner, ""
        else:
            left.append(record)
    for record in left:
        s = record.site
        partner = _other_slot(record, list(theirs.values()), [] if replaced else left, names)
        if partner is not None:
            role, slot = partner.site.role, partner.site.slot
            del theirs[role, slot]
            yield record, partner, f"{s.role}[{s.slot}] is {role}[{slot}] there"


def _outputs(golden: RecordedCall, mine: RecordedCall) -> Iterator[tuple[Record, Record, str]]:
    """Yield the matching outputs of a fused call: one side may have the sum behind a mean."""
    theirs = [r for r in mine.records if r.site.role == "output"]
    for record in golden.records:
        if record.site.role != "output":
            continue
        same_slot = any(r.site.slot == record.site.slot for r in theirs)
        only_same = same_slot and summed(record.site.slot)
        for other in theirs:
            same = other.site.slot == record.site.slot
            if same or (not only_same and _output_slot(other) == _output_slot(record)):
                yield record, other, ""


def _output_slot(record: Record) -> str:
    """Return the slot without the remark that it is still a sum."""
    slot = record.site.slot
    return (summed(slot) or (slot, 0))[0]


def share_inputs(golden: RecordedCall, mine: RecordedCall, sure_digits: float) -> bool:
    """Tell whether two calls share an input up to rounding, or have no input that could show it."""
    if golden.is_fused or mine.is_fused:
        return True
    sides = [[r.summary for r in call.records if r.site.role == "input"] for call in (golden, mine)]
    if not all(sides) or any(s.min is None for side in sides for s in side):
        return True
    return any(_digits(g, m) >= sure_digits for g in sides[0] for m in sides[1])


def _reordered(golden: RecordedCall, mine: RecordedCall, sure_digits: float) -> dict[int, Record]:
    """Return golden's input id -> mine's input, if the operands are equal in another order.

    Empty if the inputs agree slot by slot, or in no order at all.
    """
    theirs = {r.site.slot: r for r in mine.records if r.site.role == "input"}
    pairs = [
        (r, theirs[r.site.slot])
        for r in golden.records
        if r.site.role == "input" and r.site.slot in theirs
    ]
    far = [(r, other) for r, other in pairs if _far(r.summary, other.summary)]
    if len(far) < 2:
        return {}
    left = [other for _, other in far]
    partners: dict[int, Record] = {}
    for record, _ in far:
        other = max(left, key=lambda r: _digits(record.summary, r.summary))
        if _digits(record.summary, other.summary) < sure_digits:
            return {}
        left.remove(other)
        partners[record.id] = other
    return partners


def _far(golden: Summary, mine: Summary) -> bool:
    """Tell cheaply whether two tensors differ by more than rounding."""
    if golden.fingerprint == mine.fingerprint or golden.l2norm is None or mine.l2norm is None:
        return False
    return (
        not abs(golden.l2norm - mine.l2norm) <= constants.NORM_GAP * golden.l2norm
    )  # True for NaN


def _other_slot(
    record: Record, theirs: list[Record], rivals: list[Record], names: Names
) -> Record | None:
    """Return the partner of a record under another slot; ``rivals`` look for partners too."""
    s, value = record.site, record.summary
    free = [r for r in theirs if r.site.role == s.role]
    for other in free:
        if names.same_output((record.op, s.slot), (other.op, other.site.slot)):
            return other
    if s.role == "weight":
        stored = [r for r in free if quantised.stands_for(*sorted((r, record), key=_rounds))]
        if len(stored) == 1:
            return stored[0]
    likeness = [(_digits(value, r.summary), -i) for i, r in enumerate(free)]
    best, place = max(likeness, default=(0.0, 0))
    if best >= constants.TELLING_DIGITS:
        return free[-place]
    rivals = [r for r in rivals if r.site.role == s.role]
    for alike in (same_kind, same_features):
        shaped = [r for r in free if alike(value, r.summary) and _count_alike(value, r.summary)]
        if len(shaped) == sum(alike(value, r.summary) for r in rivals) == 1:
            return shaped[0]
    return None


def _count_alike(golden: Summary, mine: Summary) -> bool:
    """Tell whether both count or neither does: a mask of ones does not stand for positions."""
    constant = [s.min == s.max for s in (golden, mine)]
    return is_floating(golden.dtype) or golden.numel == 1 or constant[0] == constant[1]


def _rounds(record: Record) -> bool:
    return is_floating(record.summary.dtype)


def _digits(golden: Summary, mine: Summary) -> float:
    """Return the decimal digits to which two tensors agree, inf for equal bytes."""
    if golden.fingerprint and (golden.fingerprint, golden.dtype) == (mine.fingerprint, mine.dtype):
        return float("inf")
    return sequence.agreement(golden, mine)


def same_kind(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors have one shape, and both or neither hold integers."""
    whole = [s.dtype.startswith(("int", "uint", "bool")) for s in (golden, mine)]
    return golden.shape == mine.shape and whole[0] == whole[1]


def same_features(golden: Summary, mine: Summary) -> bool:
    """Tell whether two floating tensors have rows of one length, be they tokens or a batch."""
    floating = is_floating(golden.dtype) and is_floating(mine.dtype)
    return floating and bool(golden.shape) and golden.shape[-1:] == mine.shape[-1:]
