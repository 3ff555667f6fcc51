"""Summaries of tensors.

Mean and norm are accumulated in float64, so that half-precision tensors neither overflow nor
drift. The figures of CPU tensors are computed by a C kernel (`native`) or by torch; both agree
up to the last digits of sums. For tensors on accelerators see `on_device`.
"""

from __future__ import annotations

import math
import threading

import torch

from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.native import Figures
from llmdebug_nb.core.kernels.raw import dtype_name, memory, plain, to_bytes, unreadable
from llmdebug_nb.core.records import Summary

_CHUNK = 1 << 17  # elements: their float64 copy stays in the second-level cache
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NO_FIGURES: Figures = (None,) * 7


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return real values that reductions accept: magnitudes of complex numbers, fp8 as float32."""
    if tensor.dtype in _FLOATS:
        return tensor
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_complex():
        return (tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor).abs()
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def figures(tensor: torch.Tensor, found: tuple[int, int] | None = None) -> Figures:
    """Return (min, max, mean, l2norm, nan, inf, zero) of a readable CPU tensor.

    All are None if it is empty. ``found``: the result of `raw.memory`, if known. A NaN makes the
    first four NaN; a mean whose sum overflows float64 is infinite or NaN. No zero is negative.
    """
    kernel, kind = native.kernel(), native.KINDS.get(tensor.dtype)
    if kernel is not None and kind is not None:
        # a strided tensor is copied first: equal tensors have equal figures whatever their strides
        found = found or memory(tensor) or memory(tensor := plain(tensor))
        if found is not None:
            address, nbytes = found
            return kernel(address, nbytes, kind)
    return torch_figures(tensor)


def torch_figures(tensor: torch.Tensor) -> Figures:
    """Return `figures` by torch alone, of a CPU tensor of any dtype that torch can read."""
    count = tensor.numel()
    if count == 0:
        return _NO_FIGURES
    values = real(tensor.detach())
    flat = values.reshape(-1) if values.dim() != 1 else values
    low, high, total, squares, nonzero = math.inf, -math.inf, 0.0, 0.0, 0
    nan = inf = 0
    for part in torch.split(flat, _CHUNK) if count > _CHUNK else (flat,):
        part_low, part_high = (x.item() for x in torch.aminmax(part))
        wide = _wide(part)
        total += wide.sum().item()
        squares += torch.dot(wide, wide).item()
        nonzero += int(torch.count_nonzero(part))
        if not (math.isfinite(part_low) and math.isfinite(part_high)):
            part_nan = int(torch.isnan(part).sum())
            nan += part_nan
            inf += int(torch.isinf(part).sum())
        # not min(): a NaN must win on either side
        low = part_low if part_low != part_low or part_low < low else low
        high = part_high if part_high != part_high or part_high > high else high
    if nan:
        low = high = math.nan
    norm = math.sqrt(squares) if squares == squares else math.nan
    # + 0.0: the sign of a zero is arbitrary
    return low + 0.0, high + 0.0, total / count, norm, nan, inf, count - nonzero


class _Scratch(threading.local):
    """Each thread's room for a chunk in float64: fresh memory would cost more than the sums."""

    def __init__(self) -> None:
        self.room = torch.empty(0, dtype=torch.float64)


_scratch = _Scratch()


def _wide(part: torch.Tensor) -> torch.Tensor:
    """Return a 1-d chunk in float64, in memory that the next call uses again."""
    if _scratch.room.numel() < part.numel():
        # otherwise it could not be written to outside of inference mode
        with torch.inference_mode(False):
            _scratch.room = torch.empty(_CHUNK, dtype=torch.float64)
    return _scratch.room[: part.numel()].copy_(part)


def summarize(tensor: torch.Tensor) -> Summary:
    """Describe a tensor of any kind; figures are None if its values can't be read."""
    name, shape = dtype_name(tensor), tuple(tensor.shape)
    if unreadable(tensor) is not None:
        return Summary(name, shape)
    data = to_bytes(tensor)
    local = tensor if tensor.device.type == "cpu" else tensor.cpu()
    return Summary(name, shape, *_safe(local), fingerprint(data))


def _safe(tensor: torch.Tensor) -> Figures:
    """Return the figures; None for a dtype that this build of torch can't read (packed fp4)."""
    try:
        return figures(tensor)
    except (RuntimeError, NotImplementedError):
        return _NO_FIGURES
