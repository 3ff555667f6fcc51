"""The calls of a run: the records of one call of a module or an operator, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from llmdebug_nb.align import sequence
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.sequence import Leeway, Token
from llmdebug_nb.core.records import IN_KERNEL, Record, Summary, summed

Pass = tuple[int, int, int, str]  # rank, generation, step, phase
Kind = Callable[["Call"], str]
Alike = Callable[["Call", "Call"], str]
_ROUNDS = 4  # of aligning anew without pairs that turned out to be none


@dataclass(slots=True)
class Call:
    """``module``: the path of a module; for an operator's call, of the one that it ran in."""

    path: str
    module: str
    operator: bool
    op: str
    records: list[Record] = field(default_factory=list)

    @property
    def made(self) -> Record | None:
        """What it put out first."""
        return next((r for r in self.records if r.site.role == "output"), None)

    @property
    def fused(self) -> bool:
        """It is computed by a kernel together with others: what it is given are the inputs of that."""
        return any(r.site.slot.startswith(IN_KERNEL) for r in self.records)

    @property
    def output(self) -> Summary | None:
        return self.made.summary if self.made is not None else None

    @property
    def shape(self) -> tuple[object, ...]:
        return tuple((r.site.role, r.site.slot, r.summary.shape) for r in self.records)


def passes(records: Iterable[Record]) -> dict[Pass, list[Call]]:
    """Return the calls of each pass over the model, in the order in which they began."""
    found: dict[Pass, dict[tuple[str, int], Call]] = defaultdict(dict)
    for record in records:
        s = record.site
        calls = found[s.rank, s.generation, s.step, s.phase]
        call = calls.get((s.path, s.call))
        if call is None:
            module, slash, _ = s.path.partition("/")
            call = calls[s.path, s.call] = Call(s.path, module, bool(slash), record.op)
        call.records.append(record)
    return {key: list(calls.values()) for key, calls in found.items()}


Numbers = tuple[
    dict[int, int], dict[int, int]
]  # id of a call -> number, on both sides; paired calls have the same


def modules(golden: list[Call], mine: list[Call]) -> Iterator[tuple[Call, Call]]:
    """Yield the calls of one module that answer to each other."""
    sides = [[Token("call", value=call.output) for call in calls] for calls in (golden, mine)]
    for i, j in sequence.align(sides[0], sides[1]):
        yield golden[i], mine[j]


def operators(
    golden: list[Call],
    mine: list[Call],
    kinds: tuple[Kind, Kind],
    paired: Numbers,
    leeway: Leeway,
    alike: Alike,
) -> Iterator[tuple[Call, Call, str]]:
    """Yield the calls of operators that answer to each other, out of the calls within one module, and how they are alike.

    ``kinds``: what a call is, on either side. ``paired``: the inner modules between them.
    ``alike``: what two calls have in common as their values tell, "" if nothing: then the rest is aligned without this pair.
    """
    sides: list[list[Token]] = []
    for calls, numbers, kind in zip((golden, mine), paired, kinds, strict=True):
        calls[:] = [call for call in calls if call.operator or id(call) in numbers]
        sides.append([Token("", anchor=numbers[id(call)]) if id(call) in numbers
                      else Token(kind(call), call.shape, value=call.output) for call in calls])  # fmt: skip
    how: dict[tuple[int, int], str] = {}
    found: list[tuple[int, int]] = []
    for _ in range(_ROUNDS):
        found = sequence.align(
            sides[0], sides[1], leeway, {pair for pair, says in how.items() if not says}
        )
        found = [(i, j) for i, j in found if not sides[0][i].anchor]
        new = [pair for pair in found if pair not in how]
        how |= {(i, j): alike(golden[i], mine[j]) for i, j in new}
        if all(how[pair] for pair in new):
            break
    for i, j in found:
        if how[i, j]:
            yield golden[i], mine[j], how[i, j]


def slots(
    golden: Call, mine: Call, names: Names, replaced: bool, sure: float
) -> Iterator[tuple[Record, Record, str]]:
    """Yield the tensors of two calls that answer to each other, and in what they differ, or "".

    By role and slot; those left by what the map says, by value, and where a role has but one left of a shape, by that.
    ``sure``: digits of agreement that tell a tensor from others. ``replaced``: the two do the same in other ways, so only outputs, and inputs of the same values, answer to each other.
    """
    if golden.fused or mine.fused:
        yield from _outputs(golden, mine)
        return
    theirs = {(r.site.role, r.site.slot): r for r in mine.records}
    left: list[Record] = []
    swapped = {} if replaced or not golden.operator else _swapped(golden, mine, sure)
    for record in golden.records:
        if record.id in swapped:
            other = swapped[record.id]
            del theirs[other.site.role, other.site.slot]
            yield (
                record,
                other,
                f"{record.site.slot} is {other.site.slot} there: operands in another order",
            )
            continue
        same_slot = not replaced or record.site.role == "output"
        partner = theirs.pop((record.site.role, record.site.slot), None) if same_slot else None
        if partner is not None:
            yield record, partner, ""
        else:
            left.append(record)
    for record in left:
        partner = _other_slot(record, list(theirs.values()), [] if replaced else left, names)
        if partner is not None:
            del theirs[partner.site.role, partner.site.slot]
            place = f"{partner.site.role}[{partner.site.slot}]"
            yield record, partner, f"{record.site.role}[{record.site.slot}] is {place} there"


def _outputs(golden: Call, mine: Call) -> Iterator[tuple[Record, Record, str]]:
    """Yield what two calls give, of which a kernel computes one together with others: one may give the sum of a mean."""
    theirs = [r for r in mine.records if r.site.role == "output"]
    for record in golden.records:
        if record.site.role == "output":
            same = [r for r in theirs if r.site.slot == record.site.slot]
            yield from (
                (record, r, "")
                for r in theirs
                if r in same
                or ((not same or not summed(record.site.slot)) and _bare(r) == _bare(record))
            )


def _bare(record: Record) -> str:
    """Return which output a record is, also of one that is still a sum."""
    slot = record.site.slot
    return (summed(slot) or (slot, 0))[0]


def share_inputs(golden: Call, mine: Call, sure: float) -> bool:
    """Tell whether two calls are given a tensor that is the same but for rounding, or none that could tell."""
    if golden.fused or mine.fused:
        return True
    sides = [[r.summary for r in call.records if r.site.role == "input"] for call in (golden, mine)]
    if not all(sides) or any(s.min is None for side in sides for s in side):
        return True
    return any(_digits(g, m) >= sure for g in sides[0] for m in sides[1])


def _swapped(golden: Call, mine: Call, sure: float) -> dict[int, Record]:
    """Return id of an input -> input of mine, where inputs are far apart slot by slot and the same in another order."""
    theirs = {r.site.slot: r for r in mine.records if r.site.role == "input"}
    far = [(r, theirs[r.site.slot]) for r in golden.records if r.site.role == "input" and r.site.slot in theirs
           and _far(r.summary, theirs[r.site.slot].summary)]  # fmt: skip
    if len(far) < 2:
        return {}
    left = [other for _, other in far]
    found: dict[int, Record] = {}
    for record, _ in far:
        other = max(left, key=lambda r: _digits(record.summary, r.summary))
        if _digits(record.summary, other.summary) < sure:
            return {}
        left.remove(other)
        found[record.id] = other
    return found


def _far(golden: Summary, mine: Summary) -> bool:
    """Tell, at little cost, whether two tensors can't be one but for rounding."""
    if golden.fingerprint == mine.fingerprint or golden.l2norm is None or mine.l2norm is None:
        return False
    return not abs(golden.l2norm - mine.l2norm) <= 0.01 * golden.l2norm


def telling(record: Record) -> bool:
    """Tell whether a tensor's bytes say which one it is: they are no constant, and not few."""
    s = record.summary
    return s.fingerprint is not None and s.min is not None and s.min != s.max and s.numel > 3


def _other_slot(
    record: Record, theirs: list[Record], rivals: list[Record], names: Names
) -> Record | None:
    s, value = record.site, record.summary
    free = [r for r in theirs if r.site.role == s.role]
    for other in free:
        if names.same_output((record.op, s.slot), (other.op, other.site.slot)):
            return other
    likeness = [(_digits(value, r.summary), -i) for i, r in enumerate(free)]
    best, place = max(likeness, default=(0.0, 0))
    if best >= sequence.TELLING:
        return free[-place]
    shaped = [r for r in free if _same_kind(value, r.summary)]
    rivals = [r for r in rivals if r.site.role == s.role and _same_kind(value, r.summary)]
    return shaped[0] if len(shaped) == len(rivals) == 1 else None


def _digits(golden: Summary, mine: Summary) -> float:
    """Return how far two tensors agree, more than any statistics can for equal bytes."""
    if golden.fingerprint and (golden.fingerprint, golden.dtype) == (mine.fingerprint, mine.dtype):
        return float("inf")
    return sequence.agreement(golden, mine)


def _same_kind(golden: Summary, mine: Summary) -> bool:
    """Tell whether two tensors have one shape, and are both of whole numbers or both not."""
    whole = [s.dtype.startswith(("int", "uint", "bool")) for s in (golden, mine)]
    return golden.shape == mine.shape and whole[0] == whole[1]
