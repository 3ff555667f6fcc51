"""Tensors that hold golden's values in another order, as equal elements were sorted otherwise.

No program says in which order equal elements come, and CPU and CUDA differ. Tokens that go to one
expert, say, are then computed in another order, and put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from llmdebug_nb.align.sequence import agreement
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.findings import Difference

_SORTS = re.compile(r"\w+\.(sort|argsort|msort|topk)(\.\w+)?")


def reordered(
    rows: Sequence[Difference], made_from: Callable[[Difference], Iterable[Difference]]
) -> set[int]:
    """Return the indices of such rows, of those that differ, in execution order.

    ``made_from``: the rows that differ and that the tensors of a row are made from. Whether all is
    put back has to be told by what follows.
    """
    found: set[int] = set()
    if not any(map(_sorts, rows)):
        return found
    for row in filter(_holds_the_same, rows):
        sources = [source.index for source in made_from(row)]
        if found.issuperset(sources) if sources else _sorts(row):
            found.add(row.index)
    return found


def _sorts(row: Difference) -> bool:
    """Tell whether a row is of the places that an operator gives which sorts."""
    golden, mine = row.pair.golden, row.pair.mine
    return (
        golden is not None
        and mine is not None
        and row.site.role == "output"
        and golden.op == mine.op
        and _SORTS.fullmatch(golden.op) is not None
        and not is_floating(golden.summary.dtype)
    )


def _holds_the_same(row: Difference) -> bool:
    """Tell whether the statistics of two tensors agree: no order changes them."""
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or golden.summary.shape != mine.summary.shape:
        return False
    return agreement(golden.summary, mine.summary) >= constants.REPLACED_DIGITS
