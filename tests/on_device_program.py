"""Measure tensors with the Triton kernel of accelerators, in Triton's interpreter.

Triton reads TRITON_INTERPRET as it is imported, so this is a process of its own. Prints what was
found and expected of each tensor, and what of strided ones, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from llmdebug_nb.core.kernels import on_device
from llmdebug_nb.core.kernels.on_device_kernel import measure
from llmdebug_nb.core.kernels.summary import figures

SIZES = (1, 5, 1023, 1024, 1025, 40_000)


def tensors():
    generator = torch.Generator().manual_seed(0)
    for dtype in (*on_device.WIDE, torch.bool):
        for size in SIZES:
            yield (torch.randn(size, generator=generator) * 50).to(dtype)
    infinite, both = {5: math.inf, 7: 0.0}, {1: math.inf, 2: -math.inf}
    for places in ({3: math.nan}, infinite, {5: -math.inf}, both):
        values = torch.randn(3000, generator=generator)
        for place, value in places.items():
            values[place] = value
        yield values


def strided(whole: torch.Tensor, inner: int, stride: int, count: int) -> on_device.Measured:
    """Measure runs of ``inner`` elements, ``stride`` apart."""
    page = on_device.Page(whole.device)
    length = on_device.programs(count)
    wide = on_device.WIDE[whole.dtype]
    measure[(length,)](
        whole, page.rows, count, inner, stride, 0, PACKED=False, WIDE=wide, BLOCK=1024
    )
    return on_device.Measured(page, 0, length, count)


def main() -> None:
    on_device._kernel_works = lambda device: True
    pages, found = on_device.Pages(), []
    for tensor in tensors():
        (got,) = on_device.figures([pages.measure(tensor)])
        found.append((str(tensor.dtype), got, figures(tensor)))
    whole = torch.randn(100, 70).to(torch.bfloat16)
    for columns in (slice(0, 7), slice(10, 70), slice(69, 70)):
        part = whole[:, columns]
        got = strided(whole.flatten()[columns.start :], part.shape[1], 70, part.numel())
        found.append((f"columns {columns}", on_device.figures([got])[0], figures(part)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
