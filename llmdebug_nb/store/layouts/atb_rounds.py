"""Rounds of an ATB dump as tokens.

A round is the n-th execution of a graph, and a generation has two graphs: one for the prompt
(prefill), one for each later token (decode). So the first round holds tokens 0 and 1, and round n
holds token n + 1. If the service warmed up, the first round is the warm-up, the second one holds
tokens 0 and 1, and round n holds token n. Source: msit's ``llm dump``, "execute range".

The graphs are told apart by their operations: in one round, two operations of one number are of two
graphs. Later rounds only have the graph of decode; in a dump of one round, it is the one that takes
fewer rows (tokens).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from llmdebug_nb.core.records import Site
from llmdebug_nb.store.layouts.drafts import Draft

Shape = tuple[int, ...]
Op = str  # the folder of an outermost operation: ``2_Prefill_layer``


@dataclass(frozen=True, slots=True)
class Executions:
    """What a process ran. ``rows``: of the first input, by round and operation.

    ``calls``: how often an operation ran in a round.
    """

    rows: Mapping[int, Mapping[Op, int]]
    calls: Mapping[tuple[int, Op], int]

    @property
    def last(self) -> int:
        return max(self.rows)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """``rounds``: those that hold both; ``prefill``: its own operations; the others decode's.

    ``shared``: operations of both, in such a round the first call is prefill's.
    """

    rounds: list[int]
    prefill: set[Op]
    shared: set[Op]

    def place(self, site: Site) -> Site:
        """Return a site with token and generation in the place of its round."""
        op, number = _outermost(site), site.step
        both = number in self.rounds
        warmup = number < self.rounds[-1]
        first = op in self.prefill or (both and op in self.shared and site.call == 0)
        first |= warmup and not both  # one that ran prefill alone
        call = site.call - (both and op in self.shared and not first)
        if warmup:
            return replace(site, generation=-1, step=0 if first else 1, call=call)
        return replace(site, step=0 if first else number - self.rounds[-1] + 1, call=call)


def as_tokens(drafts: list[Draft], shapes: Mapping[Site, Shape]) -> tuple[list[Draft], bool]:
    """Return the drafts with tokens as steps, and whether it is known that they are.

    ``shapes``: of the tensors, by site. Rounds stay rounds where a dump has but one graph, or more
    prefills than a warm-up and a generation have.
    """
    found = {rank: _graphs(_executions(rank, drafts, shapes)) for rank in _ranks(drafts)}
    graphs = {rank: known for rank, known in found.items() if known is not None}
    if not graphs or len(graphs) < len(found):
        return drafts, False
    return [
        replace(draft, site=graphs[draft.site.rank].place(draft.site)) if draft.op else draft
        for draft in drafts
    ], True


def _ranks(drafts: Iterable[Draft]) -> set[int]:
    return {draft.site.rank for draft in drafts if draft.op}


def _outermost(site: Site) -> Op:
    return site.path.partition(".")[0]


def _executions(rank: int, drafts: Iterable[Draft], shapes: Mapping[Site, Shape]) -> Executions:
    rows: dict[int, dict[Op, int]] = defaultdict(dict)
    calls: dict[tuple[int, Op], int] = {}
    for draft in drafts:
        site = draft.site
        if draft.op and site.rank == rank:
            op = _outermost(site)
            rows[site.step].setdefault(op, 0)
            if (site.path, site.role, site.slot) == (op, "input", "0"):
                rows[site.step][op] = math.prod(shapes.get(site, ())[:-1])
            calls[site.step, op] = max(site.call + 1, calls.get((site.step, op), 0))
    return Executions(rows, calls)


def _graphs(ran: Executions) -> _Graphs | None:
    """Return the two graphs of a generation; None if they can't be told apart."""
    both = {number: pairs for number in sorted(ran.rows) if (pairs := _pairs(ran.rows[number]))}
    rounds = list(both)
    if not rounds or not {*rounds} <= {*sorted(ran.rows)[:2]}:
        return None  # one graph alone, or more prefills than a warm-up and a generation have
    prefill: set[Op] = set()
    decode: set[Op] = set()
    for number, pairs in both.items():
        for pair in pairs:
            first = _of_prefill(pair, number, ran)
            if first is None:
                return None
            prefill.add(first)
            decode |= {*pair} - {first}
    shared = {op for number in rounds for op in ran.rows[number] if ran.calls[number, op] > 1}
    for number in rounds:
        rest = ran.rows[number].keys() - prefill - decode - shared
        prefill |= {op for op in rest if _only_in_prefill(op, number, ran, decode)}
    return None if prefill & decode else _Graphs(rounds, prefill, shared)


def _pairs(ops: Iterable[Op]) -> list[tuple[Op, ...]]:
    """Return the operations that have one number, if they are two."""
    by_number: dict[str, list[Op]] = defaultdict(list)
    for op in sorted(ops):
        by_number[op.partition("_")[0]].append(op)
    return [tuple(found) for found in by_number.values() if len(found) == 2]


def _of_prefill(pair: tuple[Op, ...], number: int, ran: Executions) -> Op | None:
    """Return which of two operations belongs to prefill: not the one that goes on in later rounds.

    In the last round it is the one that takes more rows.
    """
    later = [op for op in pair if number < ran.last and op in ran.rows[ran.last]]
    if len(later) == 1:
        return next(op for op in pair if op not in later)
    small, large = sorted(pair, key=lambda op: ran.rows[number][op])
    return large if ran.rows[number][large] > ran.rows[number][small] else None


def _only_in_prefill(op: Op, number: int, ran: Executions, decode: set[Op]) -> bool:
    """Tell whether an operation whose number no other one has is prefill's."""
    if number < ran.last:
        return op not in ran.rows[ran.last]
    return op.partition("_")[2] in {other.partition("_")[2] for other in decode}
