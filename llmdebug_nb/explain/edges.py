"""The first row that differs inside a module whose inputs agree, and what it was made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.findings import EXPECTED, Difference
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import Call, Calls

_KINDS = (
    (re.compile(r"mask"), causes.WRONG_MASK),
    (re.compile(r"position|\b(cos|sin)\b|rotary"), causes.WRONG_POSITION),
    (re.compile(r"past|cache"), causes.WRONG_CACHE),
)


@dataclass(frozen=True)
class Edge:
    """``row``: the first row that differs, of ``call``; ``cause`` and ``words``: what that says."""

    call: Call
    row: Difference
    cause: str
    words: str


def look_inside(module: Call, calls: Calls) -> Edge | None:
    """Return the first thing that is wrong inside a module call, or None where nothing that was recorded in it is."""
    inner = calls.inside(module)
    bad = [
        (row.index, call, row) for call in inner for row in call.rows() if row.verdict == "diverged"
    ]
    if not bad:
        return _alone(inner, module, None)
    _, call, row = min(bad, key=lambda each: each[0])
    if row.site.role != "input":
        return _given_less(module, call, row)
    kind = kind_of(row)
    if kind is not None:
        call, row = _deepest(call, row, calls)
        return Edge(
            call, row, kind, f"{call.path} was given another {row.site.slot}{_made_by(row, calls)}"
        )
    return (
        by_producer(row, calls)
        or _alone(inner, module, row)
        or _other_part(module, call, row, calls)
    )


def _given_less(module: Call, call: Call, row: Difference) -> Edge:
    """Blame what a call was given on one side only: on the code that gave it, where that is a module's."""
    alone = [d for d in call.inputs if d.verdict == "unmatched"]
    cause = next(filter(None, map(kind_of, alone)), causes.INTRODUCED)
    names = ", ".join(f"{d.site.slot} ({(d.reason or '').partition(':')[0]})" for d in alone[:3])
    blamed = call if call.is_operator else module
    return Edge(
        blamed,
        row if blamed is call else module.bad_output or row,
        cause,
        f"{call.path} was called with other arguments: {names}",
    )


def kind_of(row: Difference) -> str | None:
    """Return the cause that a wrong input is, where it is a mask, positions or a cache: by its name, or its values."""
    for pattern, cause in _KINDS:
        if pattern.search(row.site.slot):
            return cause
    return (
        causes.WRONG_MASK
        if any(_masks(r) for r in (row.pair.golden, row.pair.mine) if r is not None)
        else None
    )


def _masks(record: Record) -> bool:
    """Tell whether a tensor is a mask of attention: flags, or the lowest number of a dtype, the same for all heads."""
    summary, kind = record.summary, DTYPES.get(record.summary.dtype)
    if (
        len(summary.shape) < 2
        or kind is None
        or (len(summary.shape) == 4 and summary.shape[1] != 1)
    ):
        return False
    if summary.dtype == "bool":
        return True
    import torch

    return (
        kind.is_floating_point
        and summary.min is not None
        and summary.min <= 0.5 * torch.finfo(kind).min
    )


def is_root(row: Difference, differences: Sequence[Difference]) -> bool:
    """Tell whether the row is of an outermost module: no other path of this step holds it."""
    s = row.site
    return not any(
        d.site.path != s.path and within(s.path, d.site.path)
        for d in differences
        if (d.site.generation, d.site.step) == (s.generation, s.step)
    )


def by_producer(row: Difference, calls: Calls) -> Edge | None:
    """Follow a row back to operators that only one side has: golden's first, or mine's where the module was written anew."""
    call = calls.of(row)
    holder = calls.holder(call) if call is not None else None
    producers = calls.producers(row)
    for producer in producers[::-1] if holder is not None and holder.is_rewritten else producers:
        chain = [(c, d) for c, d in _one_sided(producer, calls) if not _widens(c)]
        if chain:  # the first that takes what both sides have, rather than what it is given along with that
            call, made = next(
                ((c, d) for c, d in reversed(chain) if _takes_common(c, calls)), chain[-1]
            )
            words = f"only {_who(call)} calls {call.op} there, on the way to {row.site.slot} of {row.op}"
            return Edge(call, made, causes.OTHER_OPS, words)
    return None


def _one_sided(producer: Difference | None, calls: Calls) -> Iterator[tuple[Call, Difference]]:
    """Yield the calls that only one side makes, from the one that made a row backwards, along the edges."""
    queue, seen = [producer], set()
    while queue:
        row = queue.pop(0)
        call = calls.of(row) if row is not None and row.verdict == "unmatched" else None
        if row is None or call is None or not call.one_sided or id(call) in seen:
            continue
        seen.add(id(call))
        yield call, row
        queue += [p for d in call.inputs for p in calls.producers(d)]


def _changes_nothing(call: Call) -> bool:
    """Tell whether an operator gives what it is given, but for its dtype or layout: casts and copies, by their norms.

    Of a backward call with one gradient nothing says that it does more.
    """
    given, made = (
        [r.summary for d in rows if (r := d.pair.either)]
        for rows in (call.inputs[:1], call.outputs)
    )
    if call.key.phase == "backward" and not made:
        return True
    if len(given) != 1 or len(made) != 1 or given[0].numel != made[0].numel:
        return False
    norms = given[0].l2norm, made[0].l2norm
    kinds = [
        kind
        for s in (*given, *made)
        if (kind := DTYPES.get(s.dtype)) is not None and kind.is_floating_point
    ]
    if None in norms or not kinds:
        return False
    return abs((norms[0] or 0.0) - (norms[1] or 0.0)) <= max(map(_eps, kinds)) * (norms[0] or 0.0)


def _widens(call: Call) -> bool:
    """Tell whether an operator only casts to a finer dtype, which loses nothing."""
    given, made = (
        [DTYPES.get(r.summary.dtype) for d in rows if (r := d.pair.either)]
        for rows in (call.inputs, call.outputs)
    )
    if len(given) != 1 or len(made) != 1 or None in (*given, *made) or given == made:
        return False
    floats = all(kind is not None and kind.is_floating_point for kind in (*given, *made))
    return floats and _eps(made[0]) < _eps(given[0])


def _eps(kind: Any) -> float:
    import torch

    return torch.finfo(kind).eps


def _takes_common(call: Call, calls: Calls) -> bool:
    return any(
        p is not None and p.verdict != "unmatched" for d in call.inputs for p in calls.producers(d)
    )


def _alone(inner: list[Call], module: Call, row: Difference | None) -> Edge | None:
    """Return the first operator right in the module that only one side has, up to the row that differs."""
    last = row.index if row is not None else module.place
    alone = [
        c
        for c in inner
        if c.one_sided
        and c.is_operator
        and c.module == module.path
        and c.start <= last
        and not _changes_nothing(c)
        and any(row.verdict != EXPECTED for row in c.rows())
    ]
    if not alone:
        return None
    call = alone[0]
    return Edge(
        call, next(call.rows()), causes.OTHER_OPS, f"only {_who(call)} calls {call.op} there"
    )


def _other_part(module: Call, call: Call, row: Difference, calls: Calls) -> Edge:
    """Blame the code in front of a call that is given something else, though what that is made of agrees."""
    made = _made_by(row, calls)
    golden, mine = calls.producers(row)
    if call.is_operator or (golden is not None and mine is not None and golden is not mine):
        words = f"the first to differ is what {call.path} is given{made}"
        return Edge(call, row, causes.INTRODUCED, words)
    words = f"{call.path} is the first to be given something else{made}"
    return Edge(module, module.bad_output or row, causes.INTRODUCED, words)


def _deepest(call: Call, row: Difference, calls: Calls) -> tuple[Call, Difference]:
    """Return the innermost module call that the same tensor is handed to."""

    def prints(d: Difference) -> tuple[str | None, ...]:
        return tuple(r.summary.fingerprint if r else None for r in (d.pair.golden, d.pair.mine))

    same = [
        (c, d)
        for c in calls.inside(call)
        for d in c.inputs
        if not c.is_operator and d.verdict == "diverged" and prints(d) == prints(row)
    ]
    return max(same, key=lambda each: each[0].path.count("."), default=(call, row))


def _made_by(row: Difference, calls: Calls) -> str:
    golden, mine = calls.producers(row)
    names = [
        f"{p.site.path} in {side}"
        for p, side in ((golden, "golden"), (mine, "mine"))
        if p is not None
    ]
    return f" (it comes from {' and '.join(dict.fromkeys(names))})" if names else ""


def _who(call: Call) -> str:
    return "golden" if call.mine is None else "mine"
