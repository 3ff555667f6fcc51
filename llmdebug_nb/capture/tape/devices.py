"""What a tape needs to measure tensors on CUDA devices: pages, compiled kernels and the driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.kernels import on_device
from llmdebug_nb.core.kernels.on_device import Page


class Means(NamedTuple):
    """``launch``: the address of the driver's function that launches kernels.

    ``new_page(index)``, ``new_kernel(index, dtype, packed, aligned)``: see below.
    ``stream(index)``: the current one of a device. ``current()``: the number of the current device.
    ``capturing()``: whether the current stream captures a graph.
    """

    launch: int
    new_page: Callable[[int], object]
    new_kernel: Callable[[int, str, bool, bool], object]
    stream: Callable[[int], object]
    current: Callable[[], object]
    capturing: Callable[[], object]


def means() -> Means | None:
    """Return what a tape needs; None without CUDA in PyTorch, Triton or the driver.

    CUDA is not initialised by it.
    """
    launch = _launch_of_driver() if len(pytorch.CUDA_STATE) == 3 else None
    return None if launch is None else Means(launch, _new_page, _new_kernel, *pytorch.CUDA_STATE)


@cache
def _launch_of_driver() -> int | None:
    """Return the address of the driver's function that launches kernels, or None."""
    if torch.version.cuda is None or not on_device.has_triton():
        return None
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _new_page(index: int) -> tuple[Page, int, int, str]:
    """Return a page on a device, the address of its rows, their count, and the device's name."""
    device = torch.device("cuda", index)
    page = torch_modes.run_unseen(Page, device)
    return page, page.rows.data_ptr(), on_device.ROWS, str(device)


def _new_kernel(index: int, name: str, packed: bool, aligned: bool) -> tuple[int, int, int]:
    """Return the kernel for tensors of a dtype: its handle, threads and shared memory in bytes.

    ``aligned``: to 16 bytes. Raises if Triton can't make it.
    """
    dtype = DTYPES["uint8" if name == "bool" else name]
    device = torch.device("cuda", index)
    return torch_modes.run_unseen(on_device.compiled, dtype, device, bool(packed), bool(aligned))
