"""What is typed to narrow a list: words, and bounds on the figures that were recorded.

``nan``, ``inf``: the tensor holds one. ``>1e3``: its maximum is greater; ``<1e-3``: its minimum is less; ``abs>1e3``,
``abs<1e-3``: its largest magnitude is; ``mean`` and ``l2norm`` likewise. Anything else is a word of the row. All must hold. A tensor
with a NaN in it has no minimum, maximum, mean or norm, and no bound holds of it. ``id:3_1``: of the call with this execution id, or of one in it.
"""

from __future__ import annotations

import functools
import math
import re

from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.row_filter import COUNTS, FIGURES, Bound, RowFilter

_ID = re.compile(r"id:(\d{1,9}(?:_\d{1,9})*(?:\.\d{1,9})?|\.\d{1,9})")
_BOUND = re.compile(r"(\w*)([<>]=?)(.*)")


class FilterError(LLMDebugError):
    """A filter that can't be read."""


@functools.lru_cache(maxsize=32)
def read(text: str) -> RowFilter:
    """Return what ``text`` asks for. Raises FilterError."""
    parts = text.lower().split()
    bounds = {part: _bound(part) for part in parts}
    ids = {part: _id(part) for part in parts}
    counts = tuple(part for part in parts if part in COUNTS)
    words = tuple(
        part for part in parts if part not in COUNTS and bounds[part] is None and ids[part] is None
    )
    return RowFilter(
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
    if figure not in FIGURES:
        raise FilterError(
            f"can't read the filter {part!r}: no figure is called {figure!r}; known: {', '.join(FIGURES)}"
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
