"""Moving the values of a tensor a little, by chance.

What carries no value stays: zeros, NaN, infinities, and the fills of masks.
"""

from __future__ import annotations

import torch

from llmdebug_nb.core import constants

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_move(x: torch.Tensor) -> bool:
    """Tell whether a tensor has elements that `by_one_ulp` and `by_noise` know how to move."""
    return x.dtype.is_floating_point and x.itemsize in _BITS and x.numel() > 0


def by_one_ulp(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor whose elements are one representable number away, up or down by chance."""
    moved = x.detach().clone()
    bits = moved.view(_BITS[x.itemsize])
    draws = torch.rand(x.shape, generator=generator, device=x.device)
    step = torch.where(draws < 0.5, 1, -1).to(bits.dtype)
    bits += torch.where(_movable(x), step, 0)
    return moved


def by_noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor with errors as large as those of 8 bits with one scale a row (last axis).

    They are even over one step of that scale: the largest magnitude of the row over 127.
    """
    movable = _movable(x)
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    kept = torch.where(movable, wide, 0.0)
    rows = kept.reshape(-1, x.shape[-1]) if x.dim() else kept.reshape(1, 1)
    scale = rows.abs().amax(-1, keepdim=True) / constants.BYTE_STEPS
    draws = torch.rand(rows.shape, generator=generator, device=x.device, dtype=wide.dtype) - 0.5
    noise = (draws * scale).reshape(x.shape)
    return torch.where(movable, (wide + noise).to(x.dtype), x)


def relative_square(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the squared relative L2 distance of what can be moved; 0 if that is nothing."""
    movable = _movable(before)
    old = torch.where(movable, before, 0.0).double()
    new = torch.where(movable, after, 0.0).double()
    size = float(old.square().sum())
    return float((new - old).square().sum()) / size if size else 0.0


def _movable(x: torch.Tensor) -> torch.Tensor:
    size = x.detach().abs()
    return (size > 0) & (size < constants.INFINITE_SHARE * torch.finfo(x.dtype).max)
