"""Tensors that hold golden's values in another order, as equal elements were sorted otherwise.

No program says in which order equal elements come, and CPU and CUDA differ. Tokens that go to one
expert, say, are then computed in another order, and put back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon, is_floating
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
    a, b = golden.summary, mine.summary
    coarsest = max(epsilon(a.dtype), epsilon(b.dtype))
    close = max(constants.SAME_VALUES, constants.SAME_VALUES_EPSILONS * coarsest)
    room = close if coarsest else constants.SAME_SUM  # whole numbers are the same
    reach = max(abs(a.min or 0.0), abs(a.max or 0.0))
    scales = reach, reach, (a.l2norm or 0.0) / math.sqrt(max(a.numel, 1)), a.l2norm or 0.0
    figures = zip(
        (a.min, a.max, a.mean, a.l2norm), (b.min, b.max, b.mean, b.l2norm), scales, strict=True
    )
    return all(
        one is not None and other is not None and abs(one - other) <= room * scale
        for one, other, scale in figures
    )
