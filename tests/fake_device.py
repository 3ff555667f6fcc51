"""A device for the tape that is none: CPU tensors seem to lie there, and kernels run here.

All of the tape's own code runs as on a GPU, but for the kernel, which is NumPy's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from llmdebug_nb.capture import recorder
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.tape import devices, native, torch_observer
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.kernels import native as summary
from llmdebug_nb.core.kernels import on_device

_CUDA = 2  # in DLPack
_VIEW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_LAUNCH = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p,
)  # fmt: skip
_NAMES = sorted(DTYPES)


def _wide(raw: Any, dtype: torch.dtype) -> np.ndarray:
    return torch.frombuffer(raw, dtype=dtype).double().numpy()


class FakeDevice:
    """``launches``: how many kernels ran. ``refuses``: the driver fails to launch any.

    ``reads``: how often a page can still be read back; then the device is broken.
    """

    def __init__(self) -> None:
        self.launches, self.refuses, self.capturing = 0, False, False
        self.reads = math.inf
        self.kernels: set[tuple[str, bool, bool]] = set()
        self._real = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
            summary.tensor_view()
        )
        self.view, self.launch = _VIEW(self._view), _LAUNCH(self._launch)

    def _view(self, tensor: object, out: int) -> int:
        done: int = self._real(tensor, out)
        ctypes.c_int32.from_address(out + 8).value = _CUDA
        return done

    def new_page(self, index: int) -> tuple[Any, int, int, str]:
        page = torch_modes.run_unseen(_Page, self)
        return page, page.rows.data_ptr(), on_device.ROWS, f"cuda:{index}"

    def new_kernel(
        self, index: int, name: str, packed: bool, aligned: bool
    ) -> tuple[int, int, int]:
        self.kernels.add((name, packed, aligned))
        if DTYPES[name] not in on_device.WIDE and name != "bool":
            raise KeyError(name)
        return 1 + 2 * _NAMES.index("uint8" if name == "bool" else name) + packed, 128, 32

    def _launch(self, function: int, length: int, *rest: Any) -> int:
        if self.refuses:
            return 1
        self.launches += 1
        name, packed = _NAMES[(function - 1) // 2], (function - 1) % 2
        places = (ctypes.c_void_p * 6).from_address(rest[-2])
        data, rows = (ctypes.c_uint64.from_address(place).value for place in places[:2])
        count, inner, stride, first = (ctypes.c_int32.from_address(p).value for p in places[2:])
        at = np.arange(count)
        where = at if packed else at // inner * stride + at % inner
        size = DTYPES[name].itemsize
        raw = (ctypes.c_char * ((int(where.max()) + 1) * size)).from_address(data)
        flat = torch_modes.run_unseen(_wide, raw, DTYPES[name])[where]
        table = np.frombuffer((ctypes.c_double * (8 * on_device.ROWS)).from_address(rows))
        for number in range(length):
            part = flat[number * len(flat) // length : (number + 1) * len(flat) // length]
            known = part[~np.isnan(part)]
            low, high = known.min(initial=np.inf), known.max(initial=-np.inf)
            table[8 * (first + number) :][:7] = [
                low, high, part.sum(), (part**2).sum(),
                np.isnan(part).sum(), np.isinf(part).sum(), (part == 0).sum(),
            ]  # fmt: skip
        return 0


class _Page(on_device.Page):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._device = device

    def read(self, used: int) -> on_device.Doubles:
        self._device.reads -= 1
        if self._device.reads < 0:
            raise RuntimeError("an illegal memory access was encountered\nmore")
        return super().read(used)


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Let tapes that are made in the block believe that all tensors lie on a device."""
    device = FakeDevice()
    with patch.context() as patched:
        patched.setattr(torch_observer, "observer", lambda: None)
        view = ctypes.cast(device.view, ctypes.c_void_p).value
        launch = ctypes.cast(device.launch, ctypes.c_void_p).value
        patched.setattr(native.native, "tensor_view", lambda: view)
        patched.setattr(native, "_is_right", lambda tape: True)
        patched.setattr(devices, "_launch_of_driver", lambda: launch)
        patched.setattr(devices, "_new_page", device.new_page)
        patched.setattr(devices, "_new_kernel", device.new_kernel)
        state = lambda index: 0, lambda: 0, lambda: device.capturing
        patched.setattr(pytorch, "CUDA_STATE", state)
        patched.setattr(recorder, "on_host", lambda tensor: False)
        native._make.cache_clear()
        try:
            yield device
        finally:
            native._make.cache_clear()
