"""The collectives of a run: the calls of all ranks that belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from llmdebug_nb.core.paths import is_operator, operator_of
from llmdebug_nb.core.placement import COLLECTIVE, COLLECTIVES
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.store.rank_checks import Collective
from llmdebug_nb.store.run import Run

_FACTS = """SELECT rank, generation, step, phase, path, call, slot, value FROM scalar_rows
 WHERE role = ? AND value IS NOT NULL"""
_Roles: TypeAlias = dict[str, list[Record]]
_Facts: TypeAlias = Mapping[CallKey, Mapping[str, str]]
_Channels: TypeAlias = dict[tuple[str, ...], list[Record]]  # from, to, tag, ranks


def collectives(run: Run, unchecked: dict[str, int]) -> Iterator[Collective]:
    """Yield the collectives that all ranks of their groups called, with their tensors.

    ``unchecked``: counts those that can't be read, by the reason.
    """
    facts: dict[CallKey, dict[str, str]] = defaultdict(dict)
    rows = run.index.query(tuple[int, int, int, str, str, int, str, str], _FACTS, (COLLECTIVE,))
    for row in rows:
        rank, generation, step, phase, path, number, slot, value = row
        facts[CallKey(rank, generation, step, phase, path, number)][slot] = value
    records: dict[CallKey, _Roles] = defaultdict(lambda: {"input": [], "output": []})
    for record in run.records(role=("input", "output")):
        where = record.site.path
        if is_operator(where) and operator_of(where).startswith(COLLECTIVES):
            records[record.site.key][record.site.role].append(record)
    yield from _messages(run, facts, records, unchecked)
    for key, said in facts.items():
        if "tag" in said:
            continue
        group = [int(rank) for rank in said.get("ranks", "").split(",") if rank.isdecimal()]
        if len(group) < 2 or key.rank != group[0]:
            continue
        calls = {rank: records.get(key._replace(rank=rank)) for rank in group}
        why = _unreadable(calls)
        if why:
            unchecked[why] = unchecked.get(why, 0) + 1
            continue
        there = {rank: roles for rank, roles in calls.items() if roles is not None}
        first = there[group[0]]["input"][0]
        yield Collective(
            replace(first.site, role="output"),
            operator_of(key.path).removeprefix(COLLECTIVES),
            {rank: facts[key._replace(rank=rank)] for rank in group},
            {rank: _values(run, roles["input"]) for rank, roles in there.items()},
            {rank: _values(run, roles["output"]) for rank, roles in there.items()},
        )


def _messages(
    run: Run, facts: _Facts, records: Mapping[CallKey, _Roles], unchecked: dict[str, int]
) -> Iterator[Collective]:
    """Yield each message that was received, with what was sent.

    Messages of two ranks are told by their number; a recording that began in between counts
    otherwise, so what is equal belongs together first.
    """
    sent: _Channels = defaultdict(list)
    received: _Channels = defaultdict(list)
    alone, from_any = 0, set[str]()
    for key, said in facts.items():
        if "tag" not in said:
            continue
        rank, way, roles = str(key.rank), (said["tag"], said.get("ranks", "")), records.get(key, {})
        if "to" in said:
            sent[(rank, said["to"], *way)] += roles.get("input", [])
        elif "from" in said:
            received[(said["from"], rank, *way)] += roles.get("output", [])
        else:
            alone += 1
            from_any.add(rank)
    for channel in {**sent, **received}:
        others = sorted(sent[channel], key=lambda each: each.id)
        alone += max(0, len(others) - len(received[channel]))
        by_number = {facts[each.site.key].get("number"): each for each in others}
        if channel[1] in from_any:
            by_number.clear()  # some of these may be among them
        equal = {each.summary.fingerprint: each for each in others}
        for record in sorted(received[channel], key=lambda each: each.id):
            number = facts[record.site.key].get("number")
            other = equal.get(record.summary.fingerprint) or by_number.get(number)
            if number is None or other is None or not all(map(has_values, (record, other))):
                alone += 1
                continue
            ends = other, record
            yield Collective(
                record.site, "recv", {each.site.rank: facts[each.site.key] for each in ends},
                {other.site.rank: [run.load(other)]}, {record.site.rank: [run.load(record)]},
            )  # fmt: skip
    if alone:
        unchecked["messages without values, or that one of both ranks did not record"] = alone


def has_values(record: Record) -> bool:
    """Tell whether all values of a tensor were kept."""
    return record.payload is not None and record.kept is None


def _unreadable(calls: Mapping[int, _Roles | None]) -> str:
    """Say why a collective can't be checked; "" if it can be."""
    if any(roles is None for roles in calls.values()):
        return "collectives that not all ranks of their group recorded"
    tensors = [roles for roles in calls.values() if roles is not None]
    if any(not roles["input"] or not roles["output"] for roles in tensors):
        return "collectives without a recorded result (asynchronous ones)"
    kept = (each for roles in tensors for some in roles.values() for each in some)
    if not all(map(has_values, kept)):
        return "collectives without values"
    return ""


def _values(run: Run, records: Sequence[Record]) -> list[torch.Tensor]:
    return [run.load(record) for record in sorted(records, key=lambda each: each.id)]
