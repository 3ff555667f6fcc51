"""The order of weights that take the same input, as gate and up, or keys and values.

A port takes gate where golden takes up: either its code is wrong, or its weights were loaded in
another order. If they lie in golden's order, be it in one fused tensor, the code is wrong. Else
the weights are.
"""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.flow import AGREES, Flow


def in_other_order(
    flows: tuple[Flow, Flow], golden: Record, mine: Record
) -> tuple[Difference, Difference] | None:
    """Return the rows of two weights that lie in mine in another order than in golden.

    ``golden``, ``mine``: the tensors that golden and mine take in one place. The weights are those
    that golden makes them with. None if the order is the same, or unknown.
    """
    tensors = mine, flows[1].base(mine)
    rows_of_mine = [d for r in tensors for d in flows[1].rows[r.id] if d.verdict in AGREES]
    wanted = _weight(flows[0], golden)
    for partner in (d.pair.golden for d in rows_of_mine):
        held = _weight(flows[0], partner) if partner is not None else None
        if wanted is None or held is None or wanted is held:
            continue
        if wanted.site.path == held.site.path or wanted.summary.shape[1:] != held.summary.shape[1:]:
            continue
        rows = _row(flows[0], wanted), _row(flows[0], held)
        places = [_place(row) for row in rows if row is not None]
        if rows[0] is None or rows[1] is None or len(places) < 2:
            continue
        if (wanted.id < held.id) != (places[0] < places[1]):
            return rows[0], rows[1]
    return None


def _weight(flow: Flow, record: Record) -> Record | None:
    """Return the matrix of the module whose code makes a tensor."""
    _, call = flow.sources(flow.base(record))
    return None if call is None else flow.matrices.get(module_of(call.key.path))


def _row(flow: Flow, weight: Record) -> Difference | None:
    """Return the row that says where in mine a weight of golden is."""
    rows = (d for d in flow.rows[weight.id] if d.pair.mine is not None)
    return next((d for d in rows if d.pair.mine and d.pair.mine.site.role == "weight"), None)


def _place(row: Difference) -> tuple[int, int]:
    """Return the record of mine that holds golden's weight, and at which element it begins."""
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    assert golden is not None
    assert mine is not None
    if fit is None:
        return mine.id, 0
    shapes = golden.summary.shape, mine.summary.shape
    numbers = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    try:
        part = fit(numbers[0], numbers[1])[1]
    except ValueError:
        return mine.id, 0
    return mine.id, int(part.flatten()[0]) if part.numel() else 0
