"""Tensors as raw bytes and back: the one way in and out of a payload."""

from __future__ import annotations

import numpy as np
import torch

_INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128")
_TINY = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
_NAMES = (*_INTEGERS, *_FLOATS, *_TINY)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_QUANTISED = {torch.qint8: "int8", torch.quint8: "uint8", torch.qint32: "int32"}


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype's torch name without the prefix; a quantised tensor is named by its integers."""
    return DTYPE_NAMES.get(tensor.dtype) or _QUANTISED.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the bytes of ``tensor`` can't be read (sparse, meta, wrapped …), or None if they can."""
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')} has no row-major bytes"
    if tensor.is_nested:
        return "nested tensors have no row-major bytes"
    if tensor.device.type == "meta":
        return "meta tensors hold no values"
    if type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__"):
        return f"{type(tensor).__name__} wraps its values"
    if tensor.dtype not in DTYPE_NAMES and tensor.dtype not in _QUANTISED:
        return f"dtype {dtype_name(tensor)} is not supported"
    return None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of ``tensor`` in row-major order as ``uint8[nbytes]``.

    Shares memory with a contiguous CPU tensor: use it before the tensor can change. Strided
    layouts of every dtype, from any device; conjugate and negative views are resolved.
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
    if t.numel() == 0:
        return np.empty(0, np.uint8)
    # a size-1 dimension may have any stride and still count as contiguous, which view(uint8) refuses
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8).numpy()


def from_bytes(data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor of ``shape`` that owns a copy of ``data``.

    Raises:
        ValueError: unknown dtype, or ``data`` is not as long as shape and dtype say.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    kind = DTYPES[dtype]
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if any(size < 0 for size in shape) or count * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not make a {dtype} tensor of shape {list(shape)}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)
