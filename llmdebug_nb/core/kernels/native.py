"""Loading, testing and calling the C kernel (`summary.c`).

It is optional: torch gives the same figures.

The build hook compiles it where there is a C compiler; it is never compiled at run time.
``LLMDEBUG_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

Figures = tuple[
    float | None, float | None, float | None, float | None, int | None, int | None, int | None
]

LIBRARY = Path(__file__).with_name("_summary.so")  # on every platform: it is opened by its path
# those of summary.c
TABLE = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64",
)  # fmt: skip
KINDS: dict[torch.dtype, int] = {getattr(torch, name): kind for kind, name in enumerate(TABLE)}
KINDS[torch.bool] = KINDS[torch.uint8]

# the Call of summary.c: address, nbytes, kind, threads; its Summary: low, high, mean, norm, nan, …
_QUESTION, _ANSWER = struct.Struct("=Qqqq"), struct.Struct("=4d3q")
# Bytes from which torch is asked how many threads it uses: two are worth it then, see summary.c
LARGE = 1 << 21
Kernel = Callable[[int, int, int], Figures]


class _Exchange(ctypes.Structure):
    """The beginning of DLPack's ``DLPackExchangeAPI`` (dlpack.h, 1.3)."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
    )


class _Room(threading.local):
    """A Call for each thread."""

    def __init__(self) -> None:
        self.call = ctypes.create_string_buffer(_QUESTION.size + _ANSWER.size)


@cache
def kernel() -> Kernel | None:
    """Return the C kernel, or None if it isn't used.

    It takes an address (aligned or not), the size of the elements in bytes (not 0) and one of
    `KINDS`, and returns (min, max, mean, l2norm, nan, inf, zero). It releases the GIL, and uses as
    many threads as torch does; the figures do not depend on their number.
    """
    return _load()[0]


def why_not() -> str | None:
    """Return why the C kernel isn't used, or None if it is."""
    return _load()[1]


@cache
def tensor_function(name: str, result: type) -> tuple[Callable[..., Any], int] | None:
    """Return a C function that takes tensors themselves, and the address of torch's view of one.

    ``result``: its ctypes type. None if the C kernel isn't used, or torch lacks the view.
    """
    view = tensor_view()
    if kernel() is None or view is None:
        return None
    try:
        # PyDLL keeps the GIL, which torch's function needs
        function = getattr(ctypes.PyDLL(str(LIBRARY)), name)
    except (OSError, AttributeError):
        return None  # a library of an older version
    function.restype = result
    function.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_int64]
    return function, view


@cache
def tensor_view() -> int | None:
    """Return the address of torch's function that views a tensor; None if torch lacks it."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    head = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    view: int | None = head.dltensor_from_py_object_no_sync
    return view if head.major == 1 else None


@cache
def _load() -> tuple[Kernel | None, str | None]:
    """Return the kernel, or None and the reason."""
    if os.environ.get("LLMDEBUG_NATIVE") == "0":
        return None, "LLMDEBUG_NATIVE=0 turns it off"
    if not LIBRARY.is_file():
        why = "llmdebug_nb was installed without a working C compiler"
        return None, f"{LIBRARY.name} was not built: {why}"
    try:
        function = ctypes.CDLL(str(LIBRARY)).llmdebug_figures
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} can't be loaded: {error}"
    room, ask, answer, at = _Room(), _QUESTION.pack_into, _ANSWER.unpack_from, _QUESTION.size

    def kernel(address: int, nbytes: int, kind: int) -> Figures:
        call = room.call
        ask(call, 0, address, nbytes, kind, torch.get_num_threads() if nbytes >= LARGE else 1)
        if function(call):
            raise ValueError(f"there is no kernel {kind}")
        return answer(call, at)

    wrong = [name for name in TABLE if not _is_right(kernel, name)]
    if wrong:
        return None, f"{LIBRARY.name} gives wrong figures of {', '.join(wrong)}"
    return kernel, None


def _is_right(kernel: Kernel, name: str) -> bool:
    """Test with more numbers than a vector holds; NaN and infinity if the dtype has them."""
    kind = TABLE.index(name)

    def got(values: list[float]) -> Figures:
        # without torch: a mode may create its tensors on a device, or none at all
        wide = np.array(values, np.float32 if name == "bfloat16" else name)
        data = (wide.view(np.uint32) >> 16).astype(np.uint16) if name == "bfloat16" else wide
        return kernel(data.ctypes.data, data.nbytes, kind)

    values = [1.0, 0.0, 1.0, 1.0] * 41 + [0.0]
    right = got(values) == (0, 1, 123 / 165, math.sqrt(123), 0, 0, 42)
    if "float" not in name:
        return right
    values[7], values[-1] = math.inf, -2
    right &= got(values) == (-2, math.inf, math.inf, math.inf, 0, 1, 41)
    *figures, nan, inf, zero = got([*values, math.nan])
    return right and all(figure != figure for figure in figures) and (nan, inf, zero) == (1, 1, 41)
