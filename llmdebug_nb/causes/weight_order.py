"""The order of weights that take the same input, as gate and up, or keys and values.

A port takes gate where golden takes up: either its code is wrong, or its weights were loaded in
another order. If they lie in golden's order, be it in one fused tensor, the code is wrong. Else
the weights are. A weight that lies otherwise in one layer alone is wrong as well.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.paths import any_layer, module_of, parent_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import AGREES, Flow

_Way = tuple[str, str, bool]  # mine's module in any layer, the layout, and if the weights agree


def in_other_order(
    flows: tuple[Flow, Flow], golden: Record, mine: Record
) -> tuple[Difference, Difference] | None:
    """Return the rows of two weights that lie in mine in another order than in golden.

    ``golden``, ``mine``: the tensors that golden and mine take in one place. The weights are those
    that golden makes them with. None if the order is the same, or unknown.
    """
    wanted, ours = _weight(flows[0], golden), _weight(flows[1], mine)
    if wanted is None or ours is None:
        return None
    rows = [d for d in flows[0].rows[wanted.id] if d.pair.mine is not None]
    for row, other in itertools.product(rows, flows[1].rows[ours.id]):
        held = other.pair.golden
        if held is None or held.site.role != "weight" or held.site.path == wanted.site.path:
            continue
        first, last = (row, other) if wanted.id < held.id else (other, row)
        before, after = _place(first), _place(last)
        in_order = (before.record, before.end) < (after.record, after.begin)
        # in the places that they have in other layers they differ: here they have others
        if not in_order or row.verdict == other.verdict == "diverged":
            return row, other
    return None


def never_undone(flows: tuple[Flow, Flow], entries: Iterable[Difference]) -> Difference | None:
    """Return the row of a weight that lies in another order, if no part of what it makes agrees.

    ``entries``: the tensors that a region takes, one of which it makes. Code that divides queries,
    keys and values as they lie in mine has golden's parts.
    """
    for entry in entries:
        made = entry.pair.mine
        weight = _weight(flows[0], entry.pair.golden) if entry.pair.golden is not None else None
        if made is None or weight is None:
            continue
        row = next((d for d in flows[0].rows[weight.id] if d.pair.mine is not None), None)
        if row is None or not has_other_order(row):
            continue
        parts = [
            r
            for r in flows[1].records.values()
            if r.id > made.id and r.summary.numel < made.summary.numel
            and identifies_itself(r.summary) and flows[1].made_by(r, {made.id})
        ]  # fmt: skip
        if parts and not any(map(flows[1].agrees, parts)):
            return row
    return None


def row_order(row: Difference) -> torch.Tensor | None:
    """Return which of golden's rows each row of mine's weight is, int64[rows]; None if unknown."""
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    if golden is None or mine is None or golden.summary.shape != mine.summary.shape:
        return None
    shape = golden.summary.shape
    if row.verdict == "diverged" or len(shape) != 2 or (fit is not None and fit.grain is not None):
        return None  # a quantised weight is brought to values, which places are not
    rows = torch.arange(shape[0])[:, None].expand(shape)
    theirs, ours = (rows, rows) if fit is None else fit(rows, rows)
    order = torch.empty(shape[0], dtype=torch.int64)
    order[ours[:, 0]] = theirs[:, 0]
    return order


def has_other_order(row: Difference) -> bool:
    """Tell whether the rows of mine's weight are known to have another order than golden's."""
    order = row_order(row)
    return order is not None and not torch.equal(order, torch.arange(len(order)))


def unlike_other_layers(flow: Flow, tensors: Iterable[Record]) -> Difference | None:
    """Return the row of a weight that lies in mine otherwise than it does in most layers.

    ``flow``: golden's. ``tensors``: those of golden that a region takes; the weight makes one of
    them. A converter that is right treats all layers alike.
    """
    weights = {w.site.path: w for w in (_weight(flow, r) for r in tensors) if w is not None}
    layers: dict[str, dict[str, frozenset[_Way]]] = defaultdict(dict)
    wanted = set(map(any_layer, weights))
    for path, weight in flow.matrices.items():
        if any_layer(path) in wanted:
            layers[any_layer(path)][path] = _lies(flow.rows[weight.id])
    for path, weight in weights.items():
        lies = layers[any_layer(path)][path]
        ways = {p: w for p, w in layers[any_layer(path)].items() if _parents(w) == _parents(lies)}
        usual, count = Counter(ways.values()).most_common(1)[0]
        if lies != usual and 2 * count > len(ways) > 2:
            return next((d for d in flow.rows[weight.id] if d.pair.mine is not None), None)
    return None


def _parents(ways: frozenset[_Way]) -> set[str]:
    """Return the modules of mine around a weight: one layer alone may be written anew."""
    return {parent_of(path) for path, _, _ in ways}


def _lies(rows: Iterable[Difference]) -> frozenset[_Way]:
    """Return where a weight of golden lies in mine: the modules, the layouts, and if it agrees."""
    return frozenset(
        (in_any_layer(d.pair.mine.site.path), d.pair.fit.says if d.pair.fit else "", agrees)
        for d in rows
        if d.pair.mine is not None
        for agrees in [d.verdict in AGREES]
    )


def in_any_layer(path: str) -> str:
    """Return a path without its numbers; those in names, as of ``w1`` and ``w3``, stay."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _weight(flow: Flow, record: Record) -> Record | None:
    """Return the matrix of the module whose code makes a tensor."""
    _, call = flow.sources(flow.base(record))
    return None if call is None else flow.matrices.get(module_of(call.key.path))


class _Place(NamedTuple):
    """Where in mine a weight of golden is: the record, and its first and last element there."""

    record: int
    begin: int
    end: int


def _place(row: Difference) -> _Place:
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    assert golden is not None
    assert mine is not None
    whole = _Place(mine.id, 0, mine.summary.numel - 1)
    if fit is None:
        return whole
    shapes = golden.summary.shape, mine.summary.shape
    numbers = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    try:
        part = fit(numbers[0], numbers[1])[1]
    except ValueError:
        return whole
    return _Place(mine.id, int(part.min()), int(part.max())) if part.numel() else whole
