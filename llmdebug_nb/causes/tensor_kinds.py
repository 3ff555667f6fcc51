"""What can be told of a tensor that differs: a mask, positions, a copy, where it was made."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES, epsilon, is_floating
from llmdebug_nb.core.paths import is_operator, module_of, parent_of, within
from llmdebug_nb.core.records import Record, Site, Summary
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall

_KINDS = (
    (re.compile(r"mask"), causes.WRONG_MASK),
    (re.compile(r"position|\b(cos|sin)\b|rotary"), causes.WRONG_POSITION),
    (re.compile(r"past|cache"), causes.WRONG_CACHE),
)


def input_name(row: Difference) -> str:
    """Return ``position_ids`` for a keyword argument, and ``input 1`` for a positional one."""
    slot = row.site.slot
    return f"input {slot}" if slot.isdigit() else slot.removeprefix("kwargs.")


def slots(rows: Sequence[Difference]) -> str:
    """Return the slots of the first rows, each with the first words of its reason."""
    return ", ".join(f"{d.site.slot} ({(d.reason or '').partition(':')[0]})" for d in rows[:3])


def kind_of(row: Difference) -> str | None:
    """Return the cause for a mask, positions or a cache, known by a program's name or by values."""
    records = [r for r in (row.pair.golden, row.pair.mine) if r is not None]
    for name in (each for r in records for each in (r.site.slot, r.argument or "")):
        for pattern, cause in _KINDS:
            if pattern.search(name):
                return cause
    masks = any(map(_is_mask, records))
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
    return s.min <= constants.MASK_SHARE * torch.finfo(DTYPES[s.dtype]).min


def is_root(row: Difference, differences: Sequence[Difference]) -> bool:
    """Tell whether a row belongs to an outermost module of its step."""
    s = row.site
    return not any(
        d.site.path != s.path and within(s.path, d.site.path)
        for d in differences
        if (d.site.generation, d.site.step) == (s.generation, s.step)
    )


class OtherTokens:
    """The steps that are given other tokens, as an earlier step differs: all differs from there on.

    ``start``: the first row that differs.
    """

    def __init__(self, differences: Sequence[Difference], start: Difference) -> None:
        self._first: dict[tuple[int, int], int] = {}  # by rank and generation
        begins = start.site.generation, start.site.step
        for row in differences:
            s = row.site
            later = (s.generation, s.step) > begins and s.role == "input" and row.differs
            if (
                not later
                or is_operator(s.path)
                or is_floating(row.pair.either.summary.dtype)
                or kind_of(row) is not None
            ):
                continue
            if (s.rank, s.generation) not in self._first and is_root(row, differences):
                self._first[s.rank, s.generation] = s.step

    def reach(self, site: Site) -> bool:
        """Tell whether a step is given other tokens, or comes behind one that is."""
        first = self._first.get((site.rank, site.generation))
        return first is not None and site.step >= first


def changes_nothing(call: ComparedCall) -> bool:
    """Tell whether an operator keeps every value at its place, as a copy or a cast does.

    A backward call whose result was not recorded counts as such an operator.
    """
    side = int(call.golden is None)
    inputs, outputs = (_summaries(rows, side) for rows in (call.inputs[:1], call.outputs))
    if call.key.phase == "backward" and not outputs:
        return True
    if len(inputs) != 1 or len(outputs) != 1 or inputs[0].numel != outputs[0].numel:
        return False
    a, b = inputs[0], outputs[0]
    if a.dtype == b.dtype:
        return a.fingerprint is not None and a.fingerprint == b.fingerprint
    if not (is_floating(a.dtype) and is_floating(b.dtype)) or a.l2norm is None or b.l2norm is None:
        return False
    return abs(a.l2norm - b.l2norm) <= max(epsilon(a.dtype), epsilon(b.dtype)) * a.l2norm


class OwnRounding:
    """Casts to the coarser dtype that one run computes in throughout: no error of these calls."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        pairs = [d.pair for d in differences if d.pair.at_its_place]
        epsilons = [
            (epsilon(pair.golden.summary.dtype), epsilon(pair.mine.summary.dtype))
            for pair in pairs
            if pair.golden is not None and pair.mine is not None
        ]
        known = [each for each in epsilons if all(each)]
        coarser = [sum(each[side] > each[1 - side] for each in known) for side in (0, 1)]
        least = max(1.0, constants.COARSER_SHARE * len(known))
        self._coarse = [count >= least for count in coarser]

    def is_of(self, call: ComparedCall) -> bool:
        """Tell whether a call that only one run makes is such a cast."""
        side = int(call.golden is None)
        inputs, outputs = (_summaries(rows, side) for rows in (call.inputs[:1], call.outputs))
        if not self._coarse[side] or not inputs or not outputs or not changes_nothing(call):
            return False
        return epsilon(outputs[0].dtype) > epsilon(inputs[0].dtype)


def _summaries(rows: Sequence[Difference], side: int) -> list[Summary]:
    records = [(d.pair.golden, d.pair.mine)[side] for d in rows]
    return [record.summary for record in records if record is not None]


def innermost(call: ComparedCall, row: Difference, calls: Calls) -> tuple[ComparedCall, Difference]:
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


def origin(row: Difference, calls: Calls) -> str:
    """Say which calls made the tensor of a row."""
    sides = zip(calls.producers(row), ("golden", "mine"), strict=True)
    names = [f"{producer.site.path} in {side}" for producer, side in sides if producer is not None]
    return f" (made by {' and '.join(dict.fromkeys(names))})" if names else ""


def near(calls: list[ComparedCall], side: int, row: Difference) -> list[ComparedCall]:
    """Return the calls with those of the row's own module first: what runs there, runs there.

    Masks and positions are made elsewhere, and most of them are right.
    """
    record = (row.pair.golden, row.pair.mine)[side]
    if record is None:
        return calls
    path = record.site.path
    own = {module_of(path), parent_of(module_of(path))}

    def is_elsewhere(call: ComparedCall) -> bool:
        key = (call.golden, call.mine)[side]
        return key is None or module_of(key.path) not in own

    return sorted(calls, key=is_elsewhere)


def around(record: Record | None) -> str:
    """Return the path of the module whose code passes a tensor on: to a call, or as its output."""
    path = record.site.path if record is not None else ""
    gives = record is not None and record.site.role == "output"
    return module_of(path) if is_operator(path) or gives else parent_of(path)


def module_on(row: Difference, side: int) -> str:
    """Return the module of golden's (0) or mine's (1) tensor of a row, "" for none."""
    record = (row.pair.golden, row.pair.mine)[side]
    return record.site.path if record is not None else ""
