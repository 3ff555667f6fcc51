"""Overflow: values that are not finite."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.core.kernels.summary import _real


def overflows(tensor: torch.Tensor) -> bool:
    """Tell whether a real or complex tensor holds a NaN or an infinity. Waits for a device."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if unreadable(tensor) is not None or not tensor.numel():
        return False
    # minimum and maximum tell in one pass; a sum of large finite values may itself overflow
    return not all(math.isfinite(value.item()) for value in torch.aminmax(_real(tensor.detach())))
