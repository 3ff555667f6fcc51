"""Rows of two matrices that belong together by what they hold, wherever they lie."""

from __future__ import annotations

import numpy as np
import torch

from llmdebug_nb.core import constants


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
