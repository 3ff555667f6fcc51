"""Find the first row that differs inside a module whose inputs agree, and trace it back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.core.dtypes import DTYPES, epsilon, is_floating
from llmdebug_nb.core.findings import EXPECTED, Difference
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Record, Summary
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import Calls, ComparedCall

_KINDS = (
    (re.compile(r"mask"), causes.WRONG_MASK),
    (re.compile(r"position|\b(cos|sin)\b|rotary"), causes.WRONG_POSITION),
    (re.compile(r"past|cache"), causes.WRONG_CACHE),
)
_LOWEST = 0.5  # share of a dtype's lowest number: a mask has entries below this


@dataclass(frozen=True)
class Edge:
    """The first row that differs, its call, the cause, and the evidence in words."""

    call: ComparedCall
    row: Difference
    cause: str
    words: str


def look_inside(module: ComparedCall, calls: Calls) -> Edge | None:
    """Return the first error inside a module call; None if no recorded row differs there."""
    inner = calls.inside(module)
    bad = [(d.index, call, d) for call in inner for d in call.rows() if d.verdict == "diverged"]
    if not bad:
        return _one_sided_operator(inner, module, None)
    _, call, row = min(bad, key=lambda each: each[0])
    if row.site.role != "input":
        return _other_arguments(module, call, row)
    kind = kind_of(row)
    if kind is not None:
        call, row = _innermost(call, row, calls)
        words = f"{call.path} received another {input_name(row)}{_origin(row, calls)}"
        return Edge(call, row, kind, words)
    return (
        by_producer(row, calls)
        or _one_sided_operator(inner, module, row)
        or _code_before(module, call, row, calls)
    )


def _other_arguments(module: ComparedCall, call: ComparedCall, row: Difference) -> Edge:
    """Blame the inputs that a call has on one side only, or for a module the code around it."""
    alone = [d for d in call.inputs if d.verdict == "unmatched"]
    cause = next(filter(None, map(kind_of, alone)), causes.INTRODUCED)
    words = f"{call.path} was called with other arguments: {slots(alone)}"
    if call.is_operator:
        return Edge(call, row, cause, words)
    return Edge(module, module.bad_output or row, cause, words)


def input_name(row: Difference) -> str:
    """Return ``position_ids`` for a keyword argument, and ``input 1`` for a positional one."""
    slot = row.site.slot
    return f"input {slot}" if slot.isdigit() else slot.removeprefix("kwargs.")


def slots(rows: Sequence[Difference]) -> str:
    """Return the slots of the first rows, each with the first words of its reason."""
    return ", ".join(f"{d.site.slot} ({(d.reason or '').partition(':')[0]})" for d in rows[:3])


def kind_of(row: Difference) -> str | None:
    """Return the cause for a mask, positions or a cache, recognised by name or values."""
    for pattern, cause in _KINDS:
        if pattern.search(row.site.slot):
            return cause
    masks = any(_is_mask(r) for r in (row.pair.golden, row.pair.mine) if r is not None)
    return causes.WRONG_MASK if masks else None


def _is_mask(record: Record) -> bool:
    """Tell whether a tensor is an attention mask, the same for all heads.

    Its values are booleans, or reach the lowest number of its dtype.
    """
    s = record.summary
    if len(s.shape) < 2 or (len(s.shape) == 4 and s.shape[1] != 1):
        return False
    if s.dtype == "bool":
        return True
    if not is_floating(s.dtype) or s.min is None:
        return False
    return s.min <= _LOWEST * torch.finfo(DTYPES[s.dtype]).min


def is_root(row: Difference, differences: Sequence[Difference]) -> bool:
    """Tell whether a row belongs to an outermost module of its step."""
    s = row.site
    return not any(
        d.site.path != s.path and within(s.path, d.site.path)
        for d in differences
        if (d.site.generation, d.site.step) == (s.generation, s.step)
    )


def by_producer(row: Difference, calls: Calls) -> Edge | None:
    """Follow a row back to operators of one side: golden's first, unless mine was rewritten."""
    call = calls.of(row)
    holder = calls.holder(call) if call is not None else None
    producers = calls.producers(row)
    for producer in producers[::-1] if holder is not None and holder.is_rewritten else producers:
        chain = [(c, d) for c, d in _one_sided(producer, calls) if not _widens(c)]
        if not chain:
            continue
        # the earliest operator with an input that both sides have
        common = ((c, d) for c, d in reversed(chain) if _takes_common(c, calls))
        call, output = next(common, chain[-1])
        reaches = f"{row.site.role} {row.site.slot} of {row.op}"
        words = f"only {_owner(call)} calls {call.op}, and its result reaches {reaches}"
        return Edge(call, output, causes.OTHER_OPS, words)
    return None


def _one_sided(
    producer: Difference | None, calls: Calls
) -> Iterator[tuple[ComparedCall, Difference]]:
    """Yield the calls of one side, from the producer of a row backwards along the edges."""
    queue, seen = [producer], set()
    while queue:
        row = queue.pop(0)
        call = calls.of(row) if row is not None and row.verdict == "unmatched" else None
        if row is None or call is None or not call.one_sided or id(call) in seen:
            continue
        seen.add(id(call))
        yield call, row
        queue += [p for d in call.inputs for p in calls.producers(d)]


def _changes_nothing(call: ComparedCall) -> bool:
    """Tell whether an operator keeps the values, as a cast or a copy does, by comparing norms.

    A backward call whose result was not recorded counts as such an operator.
    """
    inputs, outputs = _summaries(call.inputs[:1]), _summaries(call.outputs)
    if call.key.phase == "backward" and not outputs:
        return True
    if len(inputs) != 1 or len(outputs) != 1 or inputs[0].numel != outputs[0].numel:
        return False
    a, b = inputs[0].l2norm, outputs[0].l2norm
    dtypes = [s.dtype for s in (*inputs, *outputs) if is_floating(s.dtype)]
    if a is None or b is None or not dtypes:
        return False
    return abs(a - b) <= max(map(epsilon, dtypes)) * a


def _widens(call: ComparedCall) -> bool:
    """Tell whether an operator only casts to a finer dtype, which loses nothing."""
    inputs, outputs = ([s.dtype for s in _summaries(rows)] for rows in (call.inputs, call.outputs))
    if len(inputs) != 1 or len(outputs) != 1:
        return False
    floating = is_floating(inputs[0]) and is_floating(outputs[0])
    return floating and epsilon(outputs[0]) < epsilon(inputs[0])


def _summaries(rows: Sequence[Difference]) -> list[Summary]:
    return [d.pair.either.summary for d in rows]


def _takes_common(call: ComparedCall, calls: Calls) -> bool:
    """Tell whether an input of a call was made by a call that both sides have."""
    producers = (p for d in call.inputs for p in calls.producers(d))
    return any(p is not None and p.verdict != "unmatched" for p in producers)


def _one_sided_operator(
    inner: list[ComparedCall], module: ComparedCall, row: Difference | None
) -> Edge | None:
    """Return the first operator directly in the module that only one side calls, up to the row."""
    last = row.index if row is not None else module.place
    for call in inner:
        own = call.one_sided and call.is_operator and call.module == module.path
        if not own or call.start > last or _changes_nothing(call):
            continue
        if any(d.verdict != EXPECTED for d in call.rows()):
            words = f"only {_owner(call)} calls {call.op} there"
            return Edge(call, next(call.rows()), causes.OTHER_OPS, words)
    return None


def _code_before(module: ComparedCall, call: ComparedCall, row: Difference, calls: Calls) -> Edge:
    """Blame the code before a call: its input differs, but the producer of the input agrees."""
    origin = _origin(row, calls)
    golden, mine = calls.producers(row)
    other_producers = golden is not None and mine is not None and golden is not mine
    if call.is_operator or other_producers:
        words = f"the first tensor to differ is an input of {call.path}{origin}"
        return Edge(call, row, causes.INTRODUCED, words)
    words = f"{call.path} is the first call with another input{origin}"
    return Edge(module, module.bad_output or row, causes.INTRODUCED, words)


def _innermost(
    call: ComparedCall, row: Difference, calls: Calls
) -> tuple[ComparedCall, Difference]:
    """Return the innermost module call with the same tensor as an input."""

    def prints(d: Difference) -> tuple[str | None, ...]:
        return tuple(r.summary.fingerprint if r else None for r in (d.pair.golden, d.pair.mine))

    same = [
        (c, d)
        for c in calls.inside(call)
        for d in c.inputs
        if not c.is_operator and d.verdict == "diverged" and prints(d) == prints(row)
    ]
    return max(same, key=lambda each: each[0].path.count("."), default=(call, row))


def _origin(row: Difference, calls: Calls) -> str:
    """Say which calls made the tensor of a row."""
    sides = zip(calls.producers(row), ("golden", "mine"), strict=True)
    names = [f"{producer.site.path} in {side}" for producer, side in sides if producer is not None]
    return f" (made by {' and '.join(dict.fromkeys(names))})" if names else ""


def _owner(call: ComparedCall) -> str:
    return "golden" if call.mine is None else "mine"
