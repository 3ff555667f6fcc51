"""Figures of tensors on accelerators: measured there, and read back together.

A tensor is measured as soon as it is seen, in one launch of a Triton kernel; where there is no
Triton, by torch. What is found stays on the device, as rows of a page, until somebody asks for it,
so that recording never waits.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from llmdebug_nb.core.errors import first_line
from llmdebug_nb.core.kernels.native import Figures
from llmdebug_nb.core.kernels.summary import real

ROWS = 1 << 15  # of a page: 2 MiB
COLUMNS = 8  # min, max, sum, sum of squares, counts of nan, inf and zero; 64 bytes a row
_OF_PROGRAM, _MOST_PROGRAMS = 1 << 13, 512  # elements for each program of a launch, if not too many
_BLOCK, _WARPS = 1024, 4
# elements: the kernel counts them in 32 bits, and goes on by as many as its programs take at once
_LARGEST = (1 << 31) - _MOST_PROGRAMS * _BLOCK
# dtypes that the kernel reads, and whether their values need float64
WIDE = {
    torch.float32: False, torch.float16: False, torch.bfloat16: False, torch.float64: True,
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8), True),
}  # fmt: skip


Doubles: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Page:
    """Rows on one device, written by one stream: the current one. ``used``: how many are taken."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        kind = torch.float32 if device.type == "mps" else torch.float64
        # not in inference mode: else they could not be written to outside of it
        with torch.inference_mode(False):
            self.rows = torch.empty((ROWS, COLUMNS), dtype=kind, device=device)
        self.used = self._have = 0
        self._read = np.empty((ROWS, COLUMNS))

    def read(self, used: int) -> Doubles:
        """Return the first ``used`` rows. Waits for the device if some of them are new."""
        have = self._have
        if used > have:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._read[have:used] = self.rows[have:used].cpu().numpy()
            self._have = used
        return self._read[:used]


class Measured(NamedTuple):
    """A tensor that was measured: it has ``length`` rows of a page from ``first`` on.

    ``size``: its elements.
    """

    page: Page
    first: int
    length: int
    size: int


class Pages:
    """The pages of a recording, of all devices that it meets."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.device, object], Page] = {}  # by device and stream

    def measure(self, tensor: torch.Tensor) -> Measured | None:
        """Measure a tensor, without waiting for its device; None if it is empty.

        Raises RuntimeError: torch can't do it. NotImplementedError: it can't read the dtype.
        """
        count = tensor.numel()
        if count == 0:
            return None
        with torch.no_grad():
            tensor = _readable(tensor)
            fits = tensor.dtype in WIDE and count < _LARGEST and _kernel_works(tensor.device)
            length = programs(count) if fits else 1
            page = self.page(tensor.device, length)
            found = Measured(page, page.used, length, count)
            page.used += length
            if fits:
                launch(tensor.contiguous(), page.rows, found.first, length)
            else:
                page.rows[found.first, :7] = _by_torch(real(tensor), page.rows.dtype)
        return found

    def page(self, device: torch.device, length: int) -> Page:
        """Return a page with room for so many rows."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        page = self._open.get((device, stream))
        if page is None or page.used + length > ROWS:
            page = self._open[device, stream] = Page(device)
        return page


def figures(measured: Sequence[Measured]) -> list[Figures]:
    """Return what `summary.figures` returns of each tensor. Waits for the devices.

    Raises RuntimeError: they could not be read back.
    """
    found: dict[int, Figures] = {}
    by_page: dict[Page, list[int]] = {}
    for number, each in enumerate(measured):
        by_page.setdefault(each.page, []).append(number)
    for page, numbers in by_page.items():
        places = np.array([measured[number][1:] for number in numbers])
        for number, (low, high, mean, norm, *counts) in zip(
            numbers, figures_of(page, places).tolist(), strict=True
        ):
            nan, inf, zero = map(int, counts)
            found[number] = low, high, mean, norm, nan, inf, zero
    return [found[number] for number in range(len(measured))]


def figures_of(page: Page, places: Integers) -> Doubles:
    """Return min, max, mean, norm, counts of nan, inf, zero of tensors on one page, ``[n, 7]``.

    ``places``: ``[n, 3]``, the first row of each, the count of rows, that of elements.
    """
    first, at, of = np.unique(places[:, 0], return_index=True, return_inverse=True)
    ends = np.column_stack([first, first + places[at, 1]]).ravel()  # equal tensors share rows
    read = page.read(max(page.used, int(ends.max())))
    if ends[-1] == len(read):
        ends = ends[:-1]  # the last one ends with the page
    with np.errstate(over="ignore", invalid="ignore"):  # sums of infinities
        whole = np.add.reduceat(read, ends)[::2, :7]
        whole[:, 0] = np.minimum.reduceat(read[:, 0], ends)[::2]
        whole[:, 1] = np.maximum.reduceat(read[:, 1], ends)[::2]
        whole = whole[of]
        whole[whole[:, 4] > 0, :2] = math.nan
        whole[:, 2] /= places[:, 2]
        whole[:, 3] = np.sqrt(whole[:, 3])
    whole[:, :2] += 0.0  # the sign of a zero is arbitrary
    return whole


def programs(count: int) -> int:
    """Return how many programs measure so many elements; the same on all devices."""
    return min(-(-count // _OF_PROGRAM), _MOST_PROGRAMS)


def launch(
    tensor: torch.Tensor, rows: torch.Tensor, first: int, length: int, packed: bool = True
) -> Any:
    """Measure a contiguous tensor into rows from ``first`` on; return the compiled kernel.

    ``packed``: the kernel need not work out where each element lies.
    """
    from llmdebug_nb.core.kernels.on_device_kernel import measure

    count = tensor.numel()
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        return measure[(length,)](
            tensor, rows, count, count, count, first,
            PACKED=packed, WIDE=WIDE[tensor.dtype], BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip


def compiled(
    dtype: torch.dtype, device: torch.device, packed: bool, aligned: bool
) -> tuple[int, int, int]:
    """Return the kernel's handle in the driver, its threads, and bytes of shared memory.

    Its arguments: where the elements and the rows are, and what follows in `measure`, in 32 bits.
    ``aligned``: the elements begin at 16 bytes. Raises KeyError for a dtype it doesn't read.
    """
    made = _compiled(dtype, device, packed, aligned)
    return made.function, 32 * _WARPS, made.metadata.shared


@cache  # it is unloaded with the last reference to it
def _compiled(dtype: torch.dtype, device: torch.device, packed: bool, aligned: bool) -> Any:
    rows = torch.zeros((1, COLUMNS), dtype=torch.float64, device=device)
    elements = torch.zeros(32, dtype=dtype, device=device)[0 if aligned else 1 :]
    return launch(elements, rows, 0, 1, packed)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements without lazy negation, and booleans as bytes."""
    tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def has_triton() -> bool:
    """Return whether Triton is installed."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # something else has its name
        return False


@cache
def _kernel_works(device: torch.device) -> bool:
    """Return whether the kernel runs on a device: Triton may lack a compiler, or a place to write.

    Without it, torch measures, more slowly, and a warning says so once.
    """
    if device.type != "cuda" or not has_triton():
        return False
    try:
        compiled(torch.float32, device, True, True)
    except Exception as error:  # whatever Triton, its compiler and the driver raise
        warnings.warn(
            f"tensors on {device} are measured by PyTorch, which is slower, as Triton can't run a"
            f" kernel there ({type(error).__name__}: {first_line(error)})",
            stacklevel=2,
        )
        return False
    return True


def _by_torch(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the first seven columns of a row."""
    low, high = torch.aminmax(values)
    wide = values.to(kind)
    return torch.stack(
        [
            low.to(kind),
            high.to(kind),
            wide.sum(),
            wide.square().sum(),
            torch.isnan(values).sum().to(kind),
            torch.isinf(values).sum().to(kind),
            (values.numel() - torch.count_nonzero(values)).to(kind),
        ]
    )
