"""Why a record has no partner: one of the closed set in `align/reasons.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from llmdebug_nb.align.calls import grouped
from llmdebug_nb.align.exported import is_graph
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import IN_KERNEL, Record


class Reasons:
    """Explains the records of one side that have no partner.

    ``paired``: the records of this side that have one. ``partners``: module -> its partners.
    ``left_out``: paths that have no partner by the user's mapping.
    """

    def __init__(
        self,
        own: list[Record],
        other: list[Record],
        paired: Iterable[Record],
        partners: dict[str, list[str]],
        left_out: set[str],
    ) -> None:
        sites = [record.site for record in other]
        self._ranks = {s.rank for s in sites}
        self._steps = {(s.generation, s.step) for s in sites}
        self._phases = {s.phase for s in sites}
        self._has_operators = {is_operator(s.path) for s in sites}
        self._fused, self._other_fused = (
            any(r.site.slot.startswith(IN_KERNEL) for r in records) for records in (own, other)
        )
        seen = {module_of(s.path) for s in sites}
        self._partners = partners
        self._known = {module for module, others in partners.items() if not seen.isdisjoint(others)}
        self._calls = {record.site.key for record in paired}
        self._left_out = left_out
        graphs = is_graph(own), is_graph(other)
        excuse = Reason.INNER if graphs[0] else Reason.FOLDED
        self._excuse = None if graphs[0] == graphs[1] else excuse

    def why(self, record: Record) -> Reason:
        """Return the first reason that holds."""
        s = record.site
        module, operator = module_of(s.path), is_operator(s.path)
        same_step, same_phase = (s.generation, s.step) in self._steps, s.phase in self._phases
        recorded = same_step and same_phase
        no_level = Reason.NO_LEVEL if operator else Reason.NO_MODULES
        checks = (
            (s.path in self._left_out or module in self._left_out, Reason.LEFT_OUT),
            (len(self._ranks) > 1 and s.rank not in self._ranks, Reason.NO_RANK),
            (s.slot.startswith(IN_KERNEL), Reason.READ),
            (operator and self._other_fused and recorded, Reason.INSIDE),
            (self._excuse is not None and recorded, self._excuse or Reason.INNER),
            (module not in self._partners, Reason.NO_PATH),
            (module not in self._known, Reason.NOT_RECORDED),
            (not same_step, Reason.NO_STEP),
            (not same_phase, Reason.NO_PHASE),
            (operator not in self._has_operators, no_level),
            (s.key in self._calls, Reason.NO_SLOT),
            (operator and self._fused, Reason.WRITTEN),
            (s.key._replace(phase="forward") in self._calls, Reason.NO_BACKWARD),
            (operator, Reason.NO_OPERATOR),
        )
        return next((reason for holds, reason in checks if holds), Reason.NO_CALL)


def reasons(
    sides: tuple[list[Record], list[Record]],
    pairs: Sequence[Pair],
    partners: Mapping[str, Iterable[str]],
    left_out: set[str],
) -> tuple[Reasons, Reasons]:
    """Return, for both sides, the object that explains records without a partner.

    ``partners``: golden's module -> mine's. ``left_out``: golden's paths that the map leaves out.
    """
    there = [(path, other) for path, others in partners.items() for other in others]
    golden, mine = [p.golden for p in pairs if p.golden], [p.mine for p in pairs if p.mine]
    return (
        Reasons(sides[0], sides[1], golden, grouped(there), left_out),
        Reasons(sides[1], sides[0], mine, grouped((m, g) for g, m in there), set()),
    )


def in_order(
    sides: tuple[Sequence[Record], Sequence[Record]],
    pairs: Mapping[int, list[Pair]],
    golden: Reasons,
    mine: Reasons,
) -> list[Pair]:
    """Return all pairs, with the records without a partner where they ran.

    ``pairs``: by the id of golden's record. ``golden``, ``mine``: why a record has no partner.
    """
    last: dict[int, int] = {}  # id of mine's record -> id of golden's in its first pair
    paired = {pair.mine.id for several in pairs.values() for pair in several if pair.mine}
    for several in pairs.values():
        for pair in several:
            if pair.golden and pair.mine and pair.at_its_place:
                last.setdefault(pair.mine.id, pair.golden.id)
    after: dict[int | None, list[Pair]] = defaultdict(list)  # by the id of golden's record
    place: int | None = None
    for record in sides[1]:
        if record.id in last:
            place = last[record.id]
        elif record.id not in paired:
            after[place].append(_alone(None, record, mine.why(record)))
    table = after.pop(None, [])
    for record in sides[0]:
        own = pairs.get(record.id) or [_alone(record, None, golden.why(record))]
        table += [pair if pair.at_its_place else _with_reason(pair, golden, mine) for pair in own]
        table += after.pop(record.id, ())
    return table


def _alone(golden: Record | None, mine: Record | None, reason: Reason) -> Pair:
    """Return a record without a partner as a pair."""
    return Pair(golden, mine, reason.text, reason=reason)


def _with_reason(pair: Pair, golden: Reasons, mine: Reasons) -> Pair:
    """Return a pair of tensors at other places, with why the one has no partner at its own."""
    left, right = pair.own(0), pair.own(1)
    if left is not None:
        return replace(pair, alone=golden.why(left))
    return pair if right is None else replace(pair, alone=mine.why(right))
