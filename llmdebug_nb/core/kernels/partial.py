"""Reductions that are kept in place of a whole tensor: a part of it, or a few figures."""

from __future__ import annotations

from types import EllipsisType

import numpy as np
import torch

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ON_DEVICE = 1 << 24  # elements: sorting more may take more memory than the accelerator has left
_FAR = 1 << 62  # beyond every size, and still an index that torch takes

Index = tuple[int | slice | EllipsisType, ...]


def parse_index(text: str) -> Index:
    """Read an index as written in code, ``0,:,-4:``. Raises ValueError."""
    return tuple(_item(item.strip()) for item in text.split(","))


def _item(text: str) -> int | slice | EllipsisType:
    if text == "...":
        return ...
    numbers = [
        max(-_FAR, min(int(number), _FAR)) if number.strip() else None for number in text.split(":")
    ]
    if len(numbers) > 1:
        return slice(*numbers)
    if numbers[0] is None:
        raise ValueError("an index has an empty place")
    return numbers[0]


def cut(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    """Return the part of a tensor that ``index`` names, by NumPy's rules, as a view.

    Of a quantised tensor it is a part of the integers.

    Raises:
        IndexError: the tensor has fewer dimensions, or ends before a number in the index.
    """
    wanted = sum(item is not ... for item in index)
    if wanted > tensor.dim():
        raise IndexError(f"asks for {wanted} dimensions, the tensor has {tensor.dim()}")
    raw = tensor.detach().int_repr() if tensor.is_quantized else tensor.detach()
    try:
        return raw[index]
    except IndexError:
        raise IndexError("lies beyond the tensor") from None


def minmax(tensor: torch.Tensor) -> torch.Tensor:
    """Return float64[2] on the CPU: minimum and maximum; NaN if a value is NaN or none exists.

    Booleans count as 0 and 1, complex numbers by magnitude.
    """
    flat = _values(tensor)
    if not flat.numel():
        return torch.full((2,), torch.nan, dtype=torch.float64)
    return torch.stack(torch.aminmax(flat)).cpu().double()


def quantiles(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return float64[count] on the CPU: the quantiles 0, 1/(count-1), …, 1, interpolated linearly.

    The tensor may have any size (`torch.quantile` ends at 2**24). All are NaN if a value is NaN or
    none exists. Infinities stay, unlike in `numpy.quantile`.
    """
    flat = _values(tensor)
    size = flat.numel()
    if not size:
        return torch.full((count,), torch.nan, dtype=torch.float64)
    places = np.linspace(0.0, 1.0, count) * (size - 1)
    low = np.floor(places).astype(np.int64)
    sort = _sorted_there if flat.device.type != "cpu" and size <= _ON_DEVICE else _sorted_here
    a, b, last = sort(flat, [low, np.minimum(low + 1, size - 1), np.array([size - 1])])
    if np.isnan(last[0]):  # NaN sorts last
        return torch.full((count,), torch.nan, dtype=torch.float64)
    share = places - low
    with np.errstate(invalid="ignore"):
        between = np.clip(a * (1 - share) + b * share, a, b)
    return torch.from_numpy(np.where(share == 0, a, between))


def _sorted_there(flat: torch.Tensor, places: list[np.ndarray]) -> list[np.ndarray]:
    """Sort the values on their device and return those at ``places`` as float64."""
    ordered = flat.sort().values
    return [ordered[torch.from_numpy(at).to(flat.device)].cpu().double().numpy() for at in places]


def _sorted_here(flat: torch.Tensor, places: list[np.ndarray]) -> list[np.ndarray]:
    """Do the same on the CPU, where `torch.sort` would take 8 bytes more for each element."""
    wide = flat.cpu() if flat.dtype in (torch.float32, torch.float64) else flat.cpu().float()
    ordered = np.sort(wide.numpy())
    return [ordered[at].astype(np.float64) for at in places]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a 1-d tensor of floats that can be put in order."""
    plain = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    flat = plain.reshape(-1)
    if flat.is_complex():
        return (flat.to(torch.complex64) if flat.dtype == torch.complex32 else flat).abs()
    if flat.dtype in _FLOATS:
        return flat
    # mps has no doubles
    exact = flat.device.type != "mps" and not flat.is_floating_point()
    return flat.to(torch.float64 if exact else torch.float32)
