"""Floats that were integers: whole multiples of one number, as programs make that only simulate."""

from __future__ import annotations

import torch

from llmdebug_nb.core import constants

_FINE = (torch.float32, torch.float64)  # dtypes that tell multiples up to that from other numbers


def grain(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor | None:
    """Return the grain of a weight, float64, of which mine's rows or groups are such multiples.

    None if they are not, or if golden's are as well.
    """
    width = mine.shape[-1] if mine.dim() == 2 else 0
    for size in (width, 128, 64, 32) if width else ():
        if width % size or step(golden.flatten()[:size]) or not step(mine.flatten()[:size]):
            continue
        groups = mine.reshape(-1, size)
        steps = [step(group) for group in groups]
        if all(steps):
            found = torch.tensor(steps, dtype=torch.float64)
            return found[:, None].expand(groups.shape).reshape(mine.shape)
    return None


def step(x: torch.Tensor) -> float:
    """Return the number of which all values are whole multiples that 8 bits hold; 0 for none."""
    if (
        torch.unique(x.flatten()[: constants.LAYOUT_SAMPLE]).numel() > constants.BYTE_INTEGERS
        or x.dtype not in _FINE
    ):
        return 0.0
    values = torch.unique(x).double()
    if not constants.FEWEST_ELEMENTS <= len(values) <= constants.BYTE_INTEGERS or not bool(
        values.isfinite().all()
    ):
        return 0.0
    for parts in (1, 2, 3):  # no two values may be neighbours
        found = float(values.diff().min()) / parts
        whole = (values / found).round()  # near 0 the distance of two values is not exact
        found = float((values * whole).sum() / (whole * whole).sum())
        places = values / found
        rounding = constants.BYTE_INTEGERS * torch.finfo(x.dtype).eps * parts
        if float((places - places.round()).abs().max()) <= rounding:
            return found if float(places.abs().max()) <= constants.BYTE_INTEGERS else 0.0
    return 0.0
