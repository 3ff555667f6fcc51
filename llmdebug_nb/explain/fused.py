"""The order of the parts of a fused weight.

A port takes gate where golden takes up: either its code splits the fused tensor the wrong way, or
its weight was joined in another order. If the parts lie in the order in which golden makes them,
the weight is as one would join it, and the code is wrong. Else the weight is.
"""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.flow import Flow


def in_other_order(flow: Flow, taken: Record) -> list[Difference]:
    """Return the rows of the parts of the fused tensor that mine takes a part of.

    In the order in which golden makes them; empty if that is their order in mine too.
    ``flow``: of mine. ``taken``: the tensor that mine takes in place of another one.
    """
    record: Record | None = taken
    for _ in range(len(flow.records)):
        if record is None:
            return []
        found = [(d, d.pair.golden) for d in flow.rows[record.id] if _is_part(d)]
        if len(found) > 1:
            rows = [d for d, g in sorted(found, key=lambda each: each[1].id if each[1] else 0)]
            starts = [_start(d) for d in rows]
            known = [start for start in starts if start is not None]
            return rows if len(known) == len(rows) and known != sorted(known) else []
        source = flow.records.get(record.producer) if record.producer is not None else None
        record = None if source is None or source.id == record.id else source
    return []


def _is_part(row: Difference) -> bool:
    """Tell whether golden's tensor of a row is a part of mine's."""
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or row.pair.fit is None or row.site.role != "output":
        return False
    return mine.summary.numel > golden.summary.numel


def _start(row: Difference) -> int | None:
    """Return where in mine's tensor its first element of the part lies."""
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    if golden is None or mine is None or fit is None:
        return None
    shapes = golden.summary.shape, mine.summary.shape
    numbers = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    try:
        part = fit(numbers[0], numbers[1])[1]
    except ValueError:
        return None
    return int(part.flatten()[0]) if part.numel() else None
