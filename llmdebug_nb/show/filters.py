"""What is typed to narrow a list: words, and bounds on the figures that were recorded.

``nan``, ``inf``: the tensor holds one. ``>1e3``: its maximum is greater; ``<1e-3``: its minimum is less; ``abs>1e3``,
``abs<1e-3``: its largest magnitude is; ``mean`` and ``l2norm`` likewise. Anything else is a word of the row. All must hold. A tensor
with a NaN in it has no minimum, maximum, mean or norm, and no bound holds of it. ``id:3_1``: of the call with this execution id, or of one in it.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.records import Summary

_ID = re.compile(r"id:(\d{1,9}(?:_\d{1,9})*(?:\.\d{1,9})?|\.\d{1,9})")
_BOUND = re.compile(r"(\w*)([<>]=?)(.*)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def largest(summary: Summary) -> float | None:
    """Return the largest magnitude, None where none was recorded."""
    low, high = summary.min, summary.max
    return None if low is None or high is None else max(abs(low), abs(high))


# each figure as SQL over the index, and of a summary
_FIGURES: dict[str, tuple[str, Callable[[Summary], float | None]]] = {
    "abs": ("max(abs(min), abs(max))", largest),
    **{name: (name, operator.attrgetter(name)) for name in ("min", "max", "mean", "l2norm")},
}
_COUNTS = ("nan", "inf")


# what a row shows beside its path: role, slot, op, dtype. There are few of them, however many rows
Kind = tuple[str, str, str, str]
KIND = "role, slot, op, dtype"
_PARTS = ", ".join(f"json_extract(value, '$[{place}]')" for place in range(4))
_CALLED = "(phase = 'forward' OR path NOT LIKE '%/%') AND (rank, generation, step, path, call) IN (SELECT rank, generation, step, path, call FROM call_rows WHERE id = ? OR id GLOB ?)"
_WORD = f"(path LIKE ? ESCAPE '\\' OR ({KIND}) IN (SELECT {_PARTS} FROM json_each(?)))"


def shown(path: str, role: str, slot: str, op: str, dtype: str, *more: str) -> str:
    """Return what words are looked for in: the row as the page shows it (in[0], out[0]), and as Python calls it, in lower case."""
    short = "in" if role == "input" else "out"
    return " ".join((path, f"{role}[{slot}]", f"{short}[{slot}]", op, dtype, *more)).lower()


class FilterError(LLMDebugError):
    """A filter that can't be read."""


class Bound(NamedTuple):
    """``figure``: a key of `_FIGURES`; ``sign``: one of `_HOLDS`."""

    figure: str
    sign: str
    value: float

    def holds(self, summary: Summary) -> bool:
        figure = _FIGURES[self.figure][1](summary)
        return figure is not None and _HOLDS[self.sign](figure, self.value)


class Filter(NamedTuple):
    """``counts``: of `_COUNTS`, those that must not be 0. ``ids``: execution ids, in one of which the call must be."""

    words: tuple[str, ...]
    counts: tuple[str, ...]
    bounds: tuple[Bound, ...]
    ids: tuple[str, ...] = ()

    def sql(self, kinds: Sequence[Kind]) -> tuple[list[str], list[Any]]:
        """Return clauses over the index, and their values; ``kinds``: all that the index has.

        A word is looked for in each path, and in each kind once: putting together every row's text would take ten times as long.
        """
        clauses = [f"{name} > 0" for name in self.counts]
        clauses += [f"{_FIGURES[bound.figure][0]} {bound.sign} ?" for bound in self.bounds]
        if self.ids:
            clauses.append(f"(({') OR ('.join(_CALLED for _ in self.ids)}))")
        clauses += [_WORD for _ in self.words]  # last, as they take longest
        found = [
            (_like(word), json.dumps([kind for kind in kinds if word in shown("", *kind)]))
            for word in self.words
        ]
        called = [value for one in self.ids for value in (one, f"{one}[._]*")]
        return clauses, [
            *(bound.value for bound in self.bounds),
            *called,
            *(value for pair in found for value in pair),
        ]

    def passes(
        self, shown: str, summaries: Iterable[Summary], id_: Callable[[], str] = str
    ) -> bool:
        """Does a row pass? ``shown``: its text in lower case; ``summaries``: of its tensors, of which one must pass; ``id_()``: of its call."""
        if self.ids and not any(
            re.fullmatch(rf"{re.escape(one)}([._].*)?", id_()) for one in self.ids
        ):
            return False
        if not all(word in shown for word in self.words):
            return False
        return not (self.counts or self.bounds) or any(map(self._measured, summaries))

    def _measured(self, summary: Summary) -> bool:
        return all(getattr(summary, name) for name in self.counts) and all(
            each.holds(summary) for each in self.bounds
        )


@functools.lru_cache(maxsize=32)
def read(text: str) -> Filter:
    """Return what ``text`` asks for. Raises FilterError."""
    parts = text.lower().split()
    bounds = {part: _bound(part) for part in parts}
    ids = {part: _id(part) for part in parts}
    counts = tuple(part for part in parts if part in _COUNTS)
    words = tuple(
        part for part in parts if part not in _COUNTS and bounds[part] is None and ids[part] is None
    )
    return Filter(
        words, counts, tuple(filter(None, bounds.values())), tuple(filter(None, ids.values()))
    )


def problem(text: str) -> str:
    """Say why ``text`` can't be read; "" if it can."""
    try:
        read(text)
    except FilterError as error:
        return str(error)
    return ""


def _id(part: str) -> str | None:
    """Return the execution id that ``part`` asks for, or None."""
    if not part.startswith("id:"):
        return None
    found = _ID.fullmatch(part)
    if found is None:
        raise FilterError(
            f"can't read the filter {part!r}: an execution id belongs behind id:, as in id:3_1 or id:3_1.4"
        )
    return found[1]


def _bound(part: str) -> Bound | None:
    """Return the bound that ``part`` is, or None for a word."""
    found = _BOUND.fullmatch(part)
    if found is None:
        return None
    figure, sign, number = found.groups()
    figure = figure or ("max" if sign[0] == ">" else "min")
    if figure not in _FIGURES:
        raise FilterError(
            f"can't read the filter {part!r}: no figure is called {figure!r}; known: {', '.join(_FIGURES)}"
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise FilterError(
            f"can't read the filter {part!r}: a number belongs behind {sign}, as in >1e3 or abs<1e-3"
        )
    return Bound(figure, sign, value)


def _like(word: str) -> str:
    """Return a LIKE pattern (ESCAPE '\\') for what contains ``word``."""
    for special in "\\%_":
        word = word.replace(special, "\\" + special)
    return f"%{word}%"
