"""Modules of a port whose weights hold golden's rows in another order.

A port that rotates neighbouring channels permutes the rows of the query and key weights, so the
outputs are permuted too. Only what takes them tells whether that is right: the order is a layout
here, and if nothing rejoins behind it, the calls that take it are to blame.
"""

from __future__ import annotations

import torch

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.fit import Fit
from llmdebug_nb.align.tensor_layout import LayoutFinder
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.records import Record

SAYS = "golden's rows in another order, as in the weight"


class ReorderedRows:
    """The order of the rows of mine's weights, by golden's and mine's module."""

    def __init__(self, layouts: LayoutFinder) -> None:
        self._layouts = layouts
        self._orders: dict[tuple[str, str], torch.Tensor] = {}

    def fit(self, golden: Record, mine: Record) -> Fit | None:
        """Return the fit that puts golden's rows in mine's order; None if the order is the same.

        Modules of one path are one program: there another order is a bug.
        """
        a, b = golden.site, mine.site
        key = module_of(a.path), module_of(b.path)
        shape = golden.summary.shape
        if key[0] == key[1] or a.role != b.role or shape != mine.summary.shape or not shape:
            return None
        if a.role == "weight" and len(shape) > 1:
            order = self._layouts.row_order(golden, mine)
            if order is not None:
                self._orders[key] = order
        rows = self._orders.get(key)
        if rows is None:
            return None
        axis = -1 if a.role == "output" else 0  # a weight, or an operator's argument that is one
        if a.role == "input" and golden.producer is not None:
            return None
        return Fit(SAYS, (moves.taken(axis, rows),)) if shape[axis] == len(rows) else None
