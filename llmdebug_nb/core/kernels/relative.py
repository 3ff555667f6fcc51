"""The relative L2 error of two tensors, ``|mine - golden| / |golden|``."""

from __future__ import annotations

import math

import torch


def ratio(error: float, size: float) -> float:
    """Return ``error / size``; 0 / 0 is 0, and anything else over 0 is inf."""
    if error == 0.0:
        return 0.0
    return error / size if size else math.inf


def relative_l2(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the relative L2 error of two float64 tensors of one shape, inf where it is NaN."""
    error = ratio(float((mine - golden).norm()), float(golden.norm()))
    return math.inf if math.isnan(error) else error
