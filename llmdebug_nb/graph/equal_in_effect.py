"""Tensors that only one program has: does what is made of them agree?

A fused kernel keeps what it computes on the way to itself, and a rewritten function computes
something else on the way. If each tensor that the other program makes of such a value agrees, the
value is written otherwise there, and equal in effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from llmdebug_nb.align.reasons import WRITTEN_OTHERWISE
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow


def equal_in_effect(flow: Flow, rejoins: Collection[int]) -> Iterator[Difference]:
    """Yield the rows of tensors without a partner of which only what agrees is made.

    ``rejoins``: the indices of rows that differ and are known to be written otherwise. Two kinds
    stay out: a tensor that nothing recorded is made of, as nothing tells of its effect, and one
    that the other recording lacks although the program may have it.
    """
    alone, harmless = _alone(flow, rejoins)
    takers: dict[int, list[Record]] = defaultdict(list)
    passed: dict[int, int] = {}  # from where a tensor is passed on
    for record in flow.records.values() if alone else ():
        sources, maker = flow.sources(record)
        if record.id in alone and maker is None and sources:
            passed[record.id] = sources[0].id
        for source in sources:
            if source.id in alone:
                takers[source.id].append(record)
    unused = passed.keys() - takers.keys()  # only given on, as a layer's input to its attention
    for at in sorted(takers, reverse=True):  # what is made of a tensor comes after it
        used = [each for each in takers[at] if each.id not in unused]
        if used and all(flow.agrees(each) or each.id in harmless for each in used):
            harmless.add(at)
            yield from filter(_is_unpaired, flow.rows[at])
    for at in unused:
        if passed[at] in harmless:
            yield from filter(_is_unpaired, flow.rows[at])


def _alone(flow: Flow, rejoins: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the records that the other program has nowhere, and those known to do no harm.

    Results are left out: they are what counts.
    """
    alone: set[int] = set()
    harmless: set[int] = set()
    for record in flow.records.values():
        apart = [row for row in flow.rows[record.id] if row.index in rejoins]
        for row in apart:
            flow.take_apart(record, row)
        is_result = record.site.role == "output" and flow.call(record).around is None
        if apart and not flow.rows[record.id]:
            harmless.add(record.id)
        elif not is_result and flow.agrees(record) is None:
            alone.add(record.id)
    return alone, harmless


def _is_unpaired(row: Difference) -> bool:
    otherwise = row.pair.reason in WRITTEN_OTHERWISE or row.rule is Rule.CLOSE
    return row.verdict == "unmatched" and otherwise
