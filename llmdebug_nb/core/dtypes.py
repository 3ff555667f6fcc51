"""Dtypes by name, and their machine epsilon."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch

_INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128")
_TINY = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
# torch's names without the prefix; those that this release of torch knows
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_INTEGERS, *_FLOATS, *_TINY) if hasattr(torch, name)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
SINGLE = 2.0**-23  # epsilon of float32, in which sums of narrower dtypes are accumulated


@functools.lru_cache(256)  # it is asked for a few dtypes, many times a row
def is_floating(name: str) -> bool:
    """Tell whether a dtype is a real floating-point one."""
    dtype = DTYPES.get(name)
    return dtype is not None and dtype.is_floating_point


@functools.cache
def is_integer(name: str) -> bool:
    """Tell whether a dtype is one of integers, signed or not."""
    return name.startswith(("int", "uint"))


@functools.cache
def epsilon(name: str) -> float:
    """Return the machine epsilon of a dtype; of a complex one, of its parts.

    It is 0 for dtypes that do not round and for unknown ones.
    """
    dtype = DTYPES.get(name)
    if dtype is not None and dtype.is_complex:
        dtype = dtype.to_real()
    return torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0


def lowest(name: str) -> float:
    """Return the lowest finite number of a floating dtype, by its name; -inf for other dtypes."""
    dtype = DTYPES.get(name)
    if dtype is None or not dtype.is_floating_point:
        return -math.inf
    return torch.finfo(dtype).min


def coarsest(names: Iterable[str]) -> str | None:
    """Return the floating dtype with the largest epsilon, the first of equals; None for none."""
    return max(filter(is_floating, names), key=epsilon, default=None)
