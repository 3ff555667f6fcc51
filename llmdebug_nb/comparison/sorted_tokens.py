"""Tokens that a program sorts, as by their experts: rows of a tensor that say nothing of places.

A tensor of one row a token looks the same whether its rows are in the order of the batch or sorted.
Where the runs were given other batches, or padding, sorted rows lie in other places. So they are
known by what they hold. Whether all is put back is judged where places show again.
"""

from __future__ import annotations

import numpy as np
import torch

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import error_of
from llmdebug_nb.core import constants


def in_any_order(
    golden: torch.Tensor, mine: torch.Tensor, count: int, in_place: metrics.Metrics
) -> metrics.Metrics | None:
    """Return what two matrices differ by in the rows that are nearest to each other.

    ``count``: the tokens that both have. ``in_place``: what they differ by row for row; None if
    that is no other order.
    """
    if error_of(in_place) <= constants.CERTAIN_LAYOUT:
        return None
    rows = nearest_rows(golden, mine, count)
    return None if rows is None else metrics.compare(*rows)


def nearest_rows(
    golden: torch.Tensor, mine: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return so many rows of both, each with the nearest one of the other: the nearest pairs first.

    Each row is taken once. None if there are fewer, if they hold too little to be known by it, or
    if there are too many of them.
    """
    if golden.dim() != 2 or golden.shape[1:] != mine.shape[1:] or not count:
        return None
    if golden.shape[1] < constants.FEWEST_ELEMENTS or count > min(len(golden), len(mine)):
        return None
    if len(golden) * len(mine) > constants.ROW_PAIRS:
        return None
    columns = np.unique(np.linspace(0, golden.shape[1] - 1, constants.SLICES).astype(np.int64))
    own, other = (x[:, torch.from_numpy(columns)].float() for x in (golden, mine))
    far = torch.cdist(own, other).nan_to_num(torch.inf)
    distances, taken = far.numpy(), np.zeros(len(mine), bool)
    rows = distances.min(1).argsort(kind="stable")[:count]
    partners = np.zeros(count, np.int64)
    for number, row in enumerate(rows):
        partners[number] = np.where(taken, np.inf, distances[row]).argmin()
        taken[partners[number]] = True
    return golden[torch.from_numpy(rows)], mine[torch.from_numpy(partners)]
