"""What numbers would fit into a coarser dtype."""

from __future__ import annotations

import torch

from llmdebug_nb.core.kernels import difference

_FEW = 256  # elements that tell at once of most tensors that a narrow dtype can't hold them


def rounding(x: torch.Tensor) -> float:
    """Return the epsilon of the coarsest dtype of 16 bits that holds all values of a tensor.

    It is 0 if none does, if the tensor's own dtype is no finer, or if it has one value alone.
    """
    if x.dtype not in (torch.float32, torch.float64):
        return 0.0
    numbers = x.flatten()
    found = _holder(numbers)
    varies = found is not None and bool((numbers != numbers[:1]).any())
    return torch.finfo(found).eps if found is not None and varies else 0.0


def _holder(numbers: torch.Tensor) -> torch.dtype | None:
    """Return the first dtype of 16 bits that holds all numbers of a flat tensor."""
    kernel = difference.narrow()
    if kernel is not None and numbers.is_cpu:
        return kernel(numbers)
    for dtype in (torch.bfloat16, torch.float16):
        if _holds(dtype, numbers[:_FEW]) and _holds(dtype, numbers):
            return dtype
    return None


def _holds(dtype: torch.dtype, x: torch.Tensor) -> bool:
    return bool(((x.to(dtype).to(x.dtype) == x) | x.isnan()).all())
