"""The tensors with partners that a tensor is made from, and the calls between."""

from __future__ import annotations

from fractions import Fraction

from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import ALL, Flow
from llmdebug_nb.graph.flow_calls import FlowCall


def back(flow: Flow, record: Record, share: Fraction = ALL) -> tuple[list[Record], list[FlowCall]]:
    """Return the nearest tensors with partners that a tensor is made from, and the calls between.

    ``share``: of the tensor's elements, those that count. A tensor of which less is known than what
    flows on is followed back further. The calls are in execution order.
    """
    queue = [(record, share)]
    asked = {record.id: share}
    entries: dict[int, Record] = {}
    calls: dict[int, FlowCall] = {}
    copied = True  # by all calls so far
    while queue:
        taken, share = queue.pop(0)
        sources, maker = flow.sources(taken)
        if maker is not None:
            if id(maker) not in calls:
                copied = copied and maker.passes_on
            calls[id(maker)] = maker
        for source in sources:
            part = share if maker is not None else _part(share, taken, source)
            known = asked.get(source.id)
            if known is not None and (part is known or part <= known):
                continue
            asked[source.id] = part
            entries[source.id] = source
            chosen = copied and flow.is_chosen(flow.base(source))
            if chosen or flow.agrees(source, part) is None:
                del entries[source.id]
                queue.append((source, part))
    return list(entries.values()), sorted(calls.values(), key=lambda call: call.start)


def _part(share: Fraction, taken: Record, source: Record) -> Fraction:
    """Return the share of a tensor that a share of a view of it is: perhaps of a part alone."""
    of, whole = taken.summary.numel, max(source.summary.numel, 1)
    if of == whole or (share == ALL and of > whole):
        return share
    return min(ALL, share * of / whole)
