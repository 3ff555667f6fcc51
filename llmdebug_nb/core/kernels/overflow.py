"""Overflow: values that are not finite."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.core.kernels.summary import _real


def reach(tensor: torch.Tensor) -> float | None:
    """Return the largest magnitude of a real or complex tensor; NaN if one element is NaN.

    None: it has no elements, they are integers, or they can't be read. Waits for a device.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if unreadable(tensor) is not None or not tensor.numel():
        return None
    # minimum and maximum tell in one pass; a sum of large finite values may itself overflow
    low, high = torch.aminmax(_real(tensor.detach()))
    least, most = low.item(), high.item()
    return float(most if most >= -least or most != most else -least)


def overflows(tensor: torch.Tensor) -> bool:
    """Tell whether a real or complex tensor holds a NaN or an infinity. Waits for a device."""
    largest = reach(tensor)
    return largest is not None and not math.isfinite(largest)
