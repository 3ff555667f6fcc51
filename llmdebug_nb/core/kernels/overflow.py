"""Overflow: values that are not finite."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.raw import unreadable
from llmdebug_nb.core.kernels.summary import real

NONE, ASK_TORCH = -1.0, -2.0  # as in reach.c
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def reach(tensor: torch.Tensor) -> float | None:
    """Return the largest magnitude of a real or complex tensor; NaN if one element is NaN.

    None: it has no elements, they are integers, or they can't be read. Waits for a device.
    """
    largest = quick_reach()(tensor)
    if largest == ASK_TORCH:
        return torch_reach(tensor)
    return None if largest == NONE else largest


@cache
def quick_reach() -> Callable[[torch.Tensor], float]:
    """Return a function that reads a CPU tensor in place, by C: no mode of torch sees it.

    It returns `reach`, NONE in place of None, or ASK_TORCH: the tensor is not for this function.
    """
    parts = native.tensor_function("llmdebug_reach", ctypes.c_double)
    if parts is None:
        return lambda tensor: ASK_TORCH
    function, view = parts

    def ask(tensor: torch.Tensor) -> float:
        if type(tensor) not in _PLAIN:
            return ASK_TORCH
        try:
            largest: float = function(view, tensor, tensor.untyped_storage().nbytes())
        except (RuntimeError, NotImplementedError, BufferError, TypeError):
            return ASK_TORCH  # a sparse layout, a wrapper of torch.func
        return largest

    return ask if _is_right(ask) else lambda tensor: ASK_TORCH


def _is_right(ask: Callable[[torch.Tensor], float]) -> bool:
    """Test with a strided tensor, without torch's factories: a mode may watch them."""
    tensor = torch.from_numpy(np.array([[1, -7, 2], [3, 4, np.inf]], np.float32)).t()
    return ask(tensor[:2]) == 7 and ask(tensor) == math.inf


def torch_reach(tensor: torch.Tensor) -> float | None:
    """Return `reach` by torch alone, waiting once for a device."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if unreadable(tensor) is not None or not tensor.numel():
        return None
    # minimum and maximum tell in one pass; a sum of large finite values may itself overflow
    low, high = torch.stack(torch.aminmax(real(tensor.detach()))).tolist()
    return float(high if high >= -low or high != high else -low)


def overflows(tensor: torch.Tensor) -> bool:
    """Tell whether a real or complex tensor holds a NaN or an infinity. Waits for a device."""
    largest = reach(tensor)
    return largest is not None and not math.isfinite(largest)
