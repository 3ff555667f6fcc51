"""How a tensor lies in memory: what makes two tensors the same one, and their sizes as text."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.core import constants

# what makes two tensors equal: their content, or on an accelerator their place and version
Key: TypeAlias = tuple[Hashable, ...]


def identity(tensor: torch.Tensor) -> Key | None:
    """Return a key of a tensor and its state, or None if torch does not keep track of them."""
    storage, version = pytorch.storage_of(tensor), pytorch.version_of(tensor)
    if storage is None or version is None:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
    return storage, version, offset, shape, stride, tensor.dtype, flags


def shape_text(tensor: torch.Tensor) -> str:
    """Return the sizes as JSON; -1 for a size that is no plain number (nested tensors).

    More sizes than a dump can hold are ``[-1]``.
    """
    if tensor.dim() > constants.MOST_DIMENSIONS:
        return "[-1]"
    if tensor.is_nested:
        sizes = [tensor.size(0), *[-1] * (tensor.dim() - 1)]
    else:
        sizes = [size if type(size) is int else -1 for size in tensor.shape]
    return f"[{', '.join(map(str, sizes))}]"


def too_many_sizes(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has more dimensions than a dump can hold, or None."""
    most = constants.MOST_DIMENSIONS
    return f"{tensor.dim():,} dimensions; at most {most:,}" if tensor.dim() > most else None


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether the values can be read without waiting for a device."""
    return tensor.is_cpu
