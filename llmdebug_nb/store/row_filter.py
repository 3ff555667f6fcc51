"""Filters over the rows of a recording: values of columns, and the filter typed above a list."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypedDict

from llmdebug_nb.core.records import Summary


class _CallColumns(TypedDict, total=False):
    rank: int
    generation: int
    step: int
    path: str
    call: int


class OperatorColumns(_CallColumns, total=False):
    """Columns of an operator call and the values they must have."""

    phase: str


class ScalarColumns(_CallColumns, total=False):
    """Columns of a scalar and the values they must have; a tuple lists alternatives."""

    role: str | tuple[str, ...]
    slot: str


class RecordColumns(OperatorColumns, ScalarColumns, total=False):
    """Columns of a record and the values they must have; a tuple lists alternatives."""

    id: int | tuple[int, ...]
    op: str
    producer: int


def largest(summary: Summary) -> float | None:
    """Return the largest magnitude, or None if none was recorded."""
    low, high = summary.min, summary.max
    return None if low is None or high is None else max(abs(low), abs(high))


FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "abs": largest,
    **{name: operator.attrgetter(name) for name in ("min", "max", "mean", "l2norm")},
}
COUNTS = ("nan", "inf")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Bound(NamedTuple):
    """``figure``: a key of `FIGURES`. ``sign``: ``<``, ``<=``, ``>`` or ``>=``."""

    figure: str
    sign: str
    value: float

    def holds(self, summary: Summary) -> bool:
        figure = FIGURES[self.figure](summary)
        return figure is not None and _COMPARE[self.sign](figure, self.value)


class RowFilter(NamedTuple):
    """Conditions on a row; all must hold.

    ``words``: parts of the row's text. ``counts``: of `COUNTS`, those that must not be 0.
    ``ids``: execution ids; the call has one of them or ran inside such a call.
    ``step``: generation and step. ``module``: the path of a module that holds the row.
    ``bad``: the tensor holds NaN or infinity. ``ranks``: it was recorded on one of these.
    """

    words: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()
    ids: tuple[str, ...] = ()
    step: tuple[int, int] | None = None
    module: str | None = None
    bad: bool = False
    ranks: tuple[int, ...] = ()

    def passes(
        self, text: str, summaries: Iterable[Summary], execution_id: Callable[[], str] = str
    ) -> bool:
        """Tell whether a row fits the words, figures and ids that were typed.

        ``text``: the row's `row_text`. ``summaries``: of its tensors; one of them must fit.
        """
        if self.ids and not any(
            re.fullmatch(rf"{re.escape(one)}([._].*)?", execution_id()) for one in self.ids
        ):
            return False
        if not all(word in text for word in self.words):
            return False
        return not (self.counts or self.bounds) or any(map(self._fits, summaries))

    def _fits(self, summary: Summary) -> bool:
        return all(getattr(summary, name) for name in self.counts) and all(
            bound.holds(summary) for bound in self.bounds
        )


def row_text(path: str, role: str, slot: str, *words: str) -> str:
    """Return the text in which a filter's words are looked for, in lower case.

    It names the slot as the page does (``in[0]``) and as Python does (``input[0]``).
    """
    short = "in" if role == "input" else "out"
    return " ".join((path, f"{role}[{slot}]", f"{short}[{slot}]", *words)).lower()
