"""Conversion of tensors to raw bytes and back."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np
import torch

from llmdebug_nb.core.dtypes import DTYPE_NAMES, DTYPES
from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.torch_internals import is_fake

_QUANTISED = {torch.qint8: "int8", torch.quint8: "uint8", torch.qint32: "int32"}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype's torch name without prefix; of a quantised tensor that of its integers."""
    return (
        DTYPE_NAMES.get(tensor.dtype)
        or _QUANTISED.get(tensor.dtype)
        or str(tensor.dtype).removeprefix("torch.")
    )


def unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the bytes of a tensor can't be read (sparse, meta, wrapped …), or None."""
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')} has no row-major bytes"
    if tensor.is_nested:
        return "nested tensors have no row-major bytes"
    if tensor.device.type == "meta":
        return "meta tensors hold no values"
    if type(tensor) not in _PLAIN and is_fake(type(tensor)):
        return "fake tensors hold no values"
    if type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__"):
        return f"{type(tensor).__name__} wraps its values"
    if tensor.dtype not in DTYPE_NAMES and tensor.dtype not in _QUANTISED:
        return f"dtype {dtype_name(tensor)} is not supported"
    if tensor.is_cuda and captures_graph():
        return "a CUDA graph was captured: it has values when it is replayed"
    return None


def captures_graph() -> bool:
    """Return whether a CUDA graph is captured: nothing may be read back from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a tensor as an array on the same memory.

    Raises:
        TensorLookupError: it has more dimensions than NumPy's arrays.
        TypeError: NumPy does not have its dtype.
    """
    try:
        return tensor.numpy()
    except ValueError:
        raise TensorLookupError(
            f"NumPy has no arrays of {tensor.dim():,} dimensions; use the tensor of torch"
        ) from None


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# integers that hold the elements of any dtype of their size
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIZES = {dtype: dtype.itemsize for name, dtype in DTYPES.items() if not name.startswith("complex")}


def memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return (address, nbytes) of a tensor whose elements are in host memory in row-major order.

    None if they are not, or may not be: empty, strided, on a device, freed, wrapped, conjugate.
    """
    if type(tensor) not in _PLAIN or not tensor.is_cpu:
        return None
    size = _SIZES.get(tensor.dtype)
    try:
        if not size or not tensor.is_contiguous() or tensor.is_neg():
            return None
        nbytes = tensor.numel() * size
        if type(nbytes) is not int:  # torch.jit.trace turns it into a tensor
            nbytes = tensor.nbytes
        # the address of a freed storage (FSDP frees some) is invalid
        if not 0 < nbytes <= tensor.untyped_storage().nbytes() - tensor.storage_offset() * size:
            return None
        address = tensor.data_ptr()
    except RuntimeError:  # torch.func's wrappers, compressed sparse layouts
        return None
    return (address, nbytes) if address else None


class _Memory(ctypes.Array[ctypes.c_char]):
    """The memory from an address on; a view takes as much as exists.

    One class serves all sizes, as creating classes is slow. ``owner`` keeps the memory alive.
    """

    __slots__ = ("owner",)
    _type_ = ctypes.c_char
    _length_ = sys.maxsize
    owner: torch.Tensor


def memory_at(address: int) -> Any:
    """Return a buffer from an address on; the caller knows its size and lifetime."""
    return _Memory.from_address(address)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor of any dtype and device as a contiguous CPU tensor without gradient.

    A contiguous CPU tensor shares its memory with the result. Quantised tensors become integers;
    conjugate and negative views are resolved.
    """
    t = tensor.detach()
    if t.is_quantized:
        t = t.int_repr()
    if t.is_conj():
        t = t.resolve_conj()
    if t.is_neg():
        t = t.resolve_neg()
    if t.device.type != "cpu":
        t = t.cpu()
    return t if t.is_contiguous() else _packed(t)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a strided CPU tensor, made by this thread alone.

    torch divides a copy among its threads, and a busy machine gives them time late: a copy of
    0.1 ms then takes 20. Only a matrix that is contiguous the other way round it copies by itself.
    """
    word = _WORDS.get(tensor.dtype.itemsize)
    if word is None or (tensor.dim() == 2 and tensor.t().is_contiguous()):
        return tensor.contiguous()
    try:
        words = np.ascontiguousarray(tensor.view(word).numpy())
    except (RuntimeError, TypeError, ValueError):  # wrapped, packed, or too many dimensions
        return tensor.contiguous()
    return torch.from_numpy(words).view(tensor.dtype)


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of ``tensor`` (see `plain`) in row-major order as ``uint8[nbytes]``.

    A contiguous CPU tensor shares its memory with the result and is kept alive by it: use the
    result before the tensor can change.
    """
    found = memory(tensor)
    if found is not None:
        return view(tensor, found)
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    # view(uint8) refuses contiguous tensors whose dimensions of size 1 have unusual strides
    t = plain(tensor)
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy()


def view(tensor: torch.Tensor, found: tuple[int, int]) -> np.ndarray:
    """Return the bytes of a tensor at the address and size ``found`` that `memory` returned."""
    room = memory_at(found[0])
    room.owner = tensor
    return np.frombuffer(room, np.uint8, found[1])


def from_bytes(
    data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a CPU tensor of ``shape`` that owns ``data``: a bytearray itself, else a copy.

    Raises:
        ValueError: unknown dtype, or ``data`` is not as long as shape and dtype say.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    kind = DTYPES[dtype]
    count = math.prod(shape)
    if any(size < 0 for size in shape) or count * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not make a {dtype} tensor of shape {list(shape)}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    owned = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(owned, dtype=kind).reshape(shape)
