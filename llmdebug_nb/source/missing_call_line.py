"""The place in one program where a call would stand that only the other one makes there.

The other program's calls take tensors that both have. The place is behind the last call that gives
such a tensor here, and before the call that takes it and should have taken another one.
"""

from __future__ import annotations

from typing import NamedTuple

from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes
from llmdebug_nb.graph.region import Region


class Gap(NamedTuple):
    """The operators before and behind the place; None where no operator stands there."""

    before: FlowCall | None
    behind: FlowCall | None


def gap(region: Region, flows: tuple[Flow, Flow], at: int) -> Gap:
    """Return the place in golden (``at`` 0) or in mine (1) where the other's calls would stand."""
    flow, calls = flows[at], (region.golden, region.mine)
    end = region.row.pair.own(at)
    taker = None if end is None or end.site.role != "input" else flow.call(end)
    behind = region.before or next((c for c in (*calls[at], taker) if c and c.is_operator), None)
    last = behind.start if behind is not None else end.id if end is not None else max(flow.records)
    taken = [r for call in calls[1 - at] for r in call.inputs if _is_data(r, flows[1 - at])]
    every = dict.fromkeys(r for each in taken for r in (each, flows[1 - at].base(each)))
    here = [r for record in every for r in _same(record, flows, at) if r.id < last]
    if not here:
        return Gap(None, behind)
    before = max(here, key=lambda r: r.id)
    own = flow.call(before)
    maker = own if own.is_operator else flow.maker(before)
    return Gap(maker, region.before or _taker(flow, before, last) or behind)


def _taker(flow: Flow, given: Record, last: int) -> FlowCall | None:
    """Return the first operator that takes a tensor, up to a record by its id."""
    base = flow.base(given)
    later = (c for c in flow.calls.values() if c.is_operator and given.id < c.start <= last)
    takers = (c for c in later if any(flow.base(r) is base for r in c.inputs))
    return min(takers, key=lambda call: call.start, default=None)


def _is_data(record: Record, flow: Flow) -> bool:
    """Tell whether a call gave a tensor of numbers that both programs have."""
    made = flow.maker(record) is not None
    return made and identifies_itself(record.summary) and is_floating(record.summary.dtype)


def _same(record: Record, flows: tuple[Flow, Flow], at: int) -> list[Record]:
    """Return what calls of one program give that agrees with a tensor of the other one."""
    rows = (d for d in flows[1 - at].rows[record.id] if d.verdict != "unmatched" and not d.differs)
    partners = [p for d in rows if (p := (d.pair.golden, d.pair.mine)[at]) is not None]
    given = [r for r in flows[at].records.values() if r.site.role == "output"]
    return [r for r in given if any(r.id == p.id or same_bytes(r, p) for p in partners)]
