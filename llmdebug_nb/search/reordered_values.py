"""Tensors that hold golden's values in another order, which by itself is no error.

No program says in which order equal elements are sorted, and CPU and CUDA differ. Other code may
compute tokens sorted by their experts, or in their own order. What counts is whether all is put
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.core.paths import sorts
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs


def reordered(
    rows: Sequence[Difference],
    made_from: Callable[[Difference], Iterable[Difference]],
    is_other_code: Callable[[Difference], bool],
    holds_the_same: Callable[[Difference], bool],
) -> set[int]:
    """Return the indices of such rows, of those that differ, in execution order.

    ``made_from``: the rows that differ and that the tensors of a row are made from.
    ``is_other_code``: whether other operators make mine's tensor. ``holds_the_same``: see there.
    Whether all is put back has to be told by what follows.
    """
    found: set[int] = set()
    for row in filter(_may_hold_the_same, rows):
        sources = [source.index for source in made_from(row)]
        may_be = found.issuperset(sources) if sources else _sorts(row) or is_other_code(row)
        if may_be and holds_the_same(row):
            found.add(row.index)
    return found


def holds_the_same(row: Difference, runs: Runs) -> bool:
    """Tell whether mine's tensor has golden's values, in another order. False without values.

    In the order of their size they are within noise, and as they lie much further apart.
    """
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or golden.summary.numel != mine.summary.numel:
        return False
    floating = [is_floating(record.summary.dtype) for record in (golden, mine)]
    if floating[0] != floating[1] or golden.summary.numel < 2:
        return False
    try:
        values = [runs.golden.load(golden), runs.mine.load(mine)]
    except (CannotReplay, CorruptDumpError):
        return False
    if any(x.is_complex() for x in values):
        return False
    g, m = (x.flatten().double().sort().values for x in values)
    apart = ratio(float((m - g).norm()), float(g.norm()))
    return apart <= (row.limit or 0.0) and apart * constants.LAYOUT_TIE < (row.error or 0.0)


def _may_hold_the_same(row: Difference) -> bool:
    """Tell whether the norms of two tensors are near enough; True if they are unknown.

    Vectors that are within a share of the first one's norm have norms within that share.
    """
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None:
        return False
    one, other = golden.summary.l2norm, mine.summary.l2norm
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return True
    rounding = constants.SAME_SUM * one  # of the norms, which are summed in float64
    return abs(one - other) <= (row.limit or 0.0) * one + rounding


def _sorts(row: Difference) -> bool:
    """Tell whether a row is of the places that an operator gives which sorts."""
    golden, mine = row.pair.golden, row.pair.mine
    return (
        golden is not None
        and mine is not None
        and row.site.role == "output"
        and golden.op == mine.op
        and sorts(golden.op)
        and not is_floating(golden.summary.dtype)
    )
