"""Reads the filter above a list of rows: words, and bounds on the recorded figures.

``nan``, ``inf``: the tensor holds one. ``>1e3``: its maximum is greater. ``<1e-3``: its minimum is
less. ``abs>1e3``, ``abs<1e-3``: its largest magnitude is; ``mean`` and ``l2norm`` likewise.
``id:3_1``: its call has this execution id or ran inside that call. ``rank:1``: it was recorded on
that rank; of several, on one of them. Anything else is a word of the row. All parts must hold. A
tensor with a NaN has no minimum, maximum, mean or norm, so no bound holds for it.
"""

from __future__ import annotations

import functools
import math
import re

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.store.row_filter import COUNTS, FIGURES, Bound, RowFilter

_ID = re.compile(r"id:(\d{1,9}(?:_\d{1,9})*(?:\.\d{1,9})?|\.\d{1,9})")
_RANK = re.compile(r"rank:([0-9]{1,9})")
_BOUND = re.compile(r"(\w*)([<>]=?)(.*)")


class FilterError(LLMDebugError):
    """A filter that can't be read."""


@functools.lru_cache(maxsize=32)
def read(text: str) -> RowFilter:
    """Return the filter in ``text``. Raises FilterError."""
    parts = text.lower().split()
    bounds = {part: _bound(part) for part in parts}
    ids = {part: _id(part) for part in parts}
    counts = tuple(part for part in parts if part in COUNTS)
    ranks = {part: rank for part in parts if (rank := _rank(part)) is not None}
    read = {*COUNTS, *ranks, *(part for part in parts if bounds[part] or ids[part])}
    return RowFilter(
        tuple(part for part in parts if part not in read),
        counts,
        tuple(filter(None, bounds.values())),
        tuple(filter(None, ids.values())),
        ranks=tuple(ranks.values()),
    )


def problem(text: str) -> str:
    """Return why ``text`` can't be read, "" if it can."""
    try:
        read(text)
    except FilterError as error:
        return str(error)
    return ""


def _id(part: str) -> str | None:
    """Return the execution id in ``part``, or None."""
    return _after("id:", part, _ID, "an execution id, as in id:3_1 or id:3_1.4")


def _rank(part: str) -> int | None:
    """Return the rank in ``part``, or None."""
    found = _after("rank:", part, _RANK, "the number of a rank, as in rank:1")
    return None if found is None else int(found)


def _after(prefix: str, part: str, form: re.Pattern[str], needed: str) -> str | None:
    """Return what stands behind a prefix; None if ``part`` does not begin with it."""
    if not part.startswith(prefix):
        return None
    match = form.fullmatch(part)
    if match is None:
        raise FilterError(f"can't read the filter {part!r}: {prefix} needs {needed}")
    return match[1]


def _bound(part: str) -> Bound | None:
    """Return the bound in ``part``, or None for a word."""
    match = _BOUND.fullmatch(part)
    if match is None:
        return None
    figure, sign, number = match.groups()
    figure = figure or ("max" if sign[0] == ">" else "min")
    if figure not in FIGURES:
        known = ", ".join(FIGURES)
        raise FilterError(
            f"can't read the filter {part!r}: unknown figure {figure!r}; known: {known}"
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise FilterError(
            f"can't read the filter {part!r}: {sign} needs a number, as in >1e3 or abs<1e-3"
        )
    return Bound(figure, sign, value)
