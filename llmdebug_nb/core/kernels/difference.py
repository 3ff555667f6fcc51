"""Loading, testing and calling the C kernel (`difference.c`) of what two tensors differ by.

It is optional, as that of `native.py`: NumPy gives the same bits (`comparison/sums.py`).
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.native import KINDS


class Sums(NamedTuple):
    """The sums of one pass over golden's elements g and mine's m, with d = m - g.

    ``gd`` is that of g * d, and so on; ``gd_gd`` that of its squares. They cover the positions
    where both are finite, ``finite`` of them. ``relative``: of |d / g| where golden is
    ``sizeable``; ``within_1``, ``within_5``: how many of these are below 0.001 and 0.005. ``most``,
    ``most_...``: the largest |d| and so on. ``ulps`` and ``most_ulps`` are 0 if the dtype has none.
    ``mismatched``, ``nan``, ``inf``: see `metrics.FIELDS`.
    """

    gd: float = 0.0
    gd_gd: float = 0.0
    gg: float = 0.0
    gg_gg: float = 0.0
    mm: float = 0.0
    gm: float = 0.0
    dd: float = 0.0
    abs_d: float = 0.0
    abs_g: float = 0.0
    abs_m: float = 0.0
    ulps: float = 0.0
    relative: float = 0.0
    most: float = 0.0
    most_relative: float = 0.0
    most_ulps: float = 0.0
    finite: int = 0
    sizeable: int = 0
    within_1: int = 0
    within_5: int = 0
    mismatched: int = 0
    nan: int = 0
    inf: int = 0


# with the sums of each row, float64 [rows, ROW_SUMS]: gg, dd, gd and gg_gg; None without rows
Found = tuple[Sums, "np.ndarray | None"]
ROW_SUMS = 4
_ZEROS = Sums()
# the Call of difference.c: addresses, kinds and sizes, limits; then the sums
_QUESTION, _ANSWER = struct.Struct("=5Q5q2d"), struct.Struct("=15d7q")
_BOTH = struct.Struct("=5Q5q2d15d7q")
Kernel = Callable[
    [torch.Tensor, torch.Tensor, "torch.dtype | None", int, int, float, float], "Found | None"
]
Narrow = Callable[[torch.Tensor], torch.dtype | None]


class _Room(threading.local):
    """A Call for each thread."""

    def __init__(self) -> None:
        self.call = ctypes.create_string_buffer(_BOTH.size)


@cache
def kernel() -> Kernel | None:
    """Return the C kernel, or None if it isn't used.

    It takes golden's and mine's elements, flat and on the CPU, the dtype in whose ulps they are
    measured (None for none), the length of a row (0 for none), how many elements are added up at
    once (whole rows), from which size on a number is infinite, and up to which one it is none that
    others are relative to. It returns what is `Found`, or None for dtypes that it does not know,
    and if one has more elements.
    """
    found = _functions()
    return None if found is None else found[0]


@cache
def narrow() -> Narrow | None:
    """Return the C function that tells which dtype of 16 bits holds all of some numbers.

    It takes a flat CPU tensor of float32 or float64. None if it isn't used.
    """
    found = _functions()
    return None if found is None else found[1]


@cache
def _functions() -> tuple[Kernel, Narrow] | None:
    if native.kernel() is None:
        return None
    try:
        library = ctypes.CDLL(str(native.LIBRARY))
        difference, held_by = library.llmdebug_difference, library.llmdebug_narrow
    except (OSError, AttributeError):
        return None  # a library of an older version
    held_by.restype = ctypes.c_int64
    held_by.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    dtypes = {KINDS[dtype]: dtype for dtype in (torch.bfloat16, torch.float16)}
    room = _Room()

    def kernel(
        golden: torch.Tensor,
        mine: torch.Tensor,
        unit: torch.dtype | None,
        width: int,
        chunk: int,
        huge: float,
        least: float,
    ) -> Found | None:
        kinds = KINDS.get(golden.dtype), KINDS.get(mine.dtype)
        if None in kinds or golden.numel() != mine.numel():
            return None
        call, count = room.call, golden.numel()
        golden, mine = golden.contiguous(), mine.contiguous()  # a part of each row may have strides
        rows = np.empty((count // width if width else 0, ROW_SUMS))
        of_unit = -1 if unit is None else KINDS[unit]
        _ANSWER.pack_into(call, _QUESTION.size, *_ZEROS)
        for start in range(0, count, chunk):
            g, m = (x if chunk >= count else x[start : start + chunk] for x in (golden, mine))
            bits = (None, None) if unit is None else (_as(unit, g), _as(unit, m))
            places = (0 if x is None else x.data_ptr() for x in (g, m, *bits))
            row = rows.ctypes.data + (rows.itemsize * ROW_SUMS * (start // width) if width else 0)
            _QUESTION.pack_into(
                call, 0, *places, row, *kinds, of_unit, g.numel(), width, huge, least
            )
            if difference(call):
                return None
        sums = Sums._make(_ANSWER.unpack_from(call, _QUESTION.size))
        return sums, rows if width else None

    def narrow(numbers: torch.Tensor) -> torch.dtype | None:
        numbers = numbers.contiguous()
        kind = held_by(numbers.data_ptr(), numbers.numel(), KINDS[numbers.dtype])
        return dtypes.get(kind)

    return (kernel, narrow) if _is_right(kernel) and _is_right_of_dtypes(narrow) else None


def _as(unit: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is unit else x.to(unit)


def _is_right(kernel: Kernel) -> bool:
    """Test with one row that both have, one that differs, and one with what is not finite."""
    with torch.device("cpu"):
        golden = torch.tensor([1.0, 2.0, 3.0, 4.0, math.inf, 0.0])
        mine = torch.tensor([1.0, 2.0, 3.0, 6.0, 1.0, math.nan])
    right = Sums(
        gd=8.0, gd_gd=64.0, gg=30.0, gg_gg=354.0, mm=50.0, gm=38.0, dd=4.0, abs_d=2.0, abs_g=10.0,
        abs_m=12.0, ulps=2.0**22, relative=0.5, most=2.0, most_relative=0.5, most_ulps=2.0**22,
        finite=4, sizeable=4, within_1=3, within_5=3, mismatched=3, nan=1, inf=1,
    )  # fmt: skip
    found = kernel(golden, mine, torch.float32, 2, 2, 1e30, 0.0)
    rows = [[5.0, 0.0, 0.0, 17.0], [25.0, 4.0, 8.0, 337.0], [0.0] * ROW_SUMS]
    if found is None or found[1] is None:
        return False
    return found[0] == right and found[1].tolist() == rows


def _is_right_of_dtypes(narrow: Narrow) -> bool:
    """Test with numbers that bfloat16 holds, that float16 does, and that neither does."""
    cases = {2.0**100: torch.bfloat16, 1 + 2.0**-10: torch.float16, 1 + 2.0**-20: None}
    with torch.device("cpu"):
        return all(narrow(torch.tensor([1.0, number])) == dtype for number, dtype in cases.items())
