"""A device that is none: tensors of the host look to the tape as if they lay on a CUDA device.

Its driver "launches" the kernel by computing with NumPy what `on_device_kernel.py` would write.
"""

from __future__ import annotations

import contextlib
import ctypes
import math

import numpy as np
import torch

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.tape import devices, native, torch_observer
from llmdebug_nb.core.kernels import on_device
from llmdebug_nb.core.kernels.on_device import COLUMNS, Page

NAME = "cuda:0"
_CPU, _CUDA = 1, 2  # in DLPack
_DEVICE = 8  # where the device is in a tensor of DLPack
_VIEW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_LAUNCH = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_size_t,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
_KINDS = {
    "float32": "f4", "float64": "f8", "float16": "f2", "bfloat16": "u2", "bool": "u1",
    **{f"int{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
}  # fmt: skip


class Device:
    """``on``: tensors lie on it. ``launches``: how many. ``reads``: how many it still allows."""

    def __init__(self) -> None:
        self.on = False
        self.launches, self.reads = 0, math.inf
        self._names = [*_KINDS]
        real = _VIEW(native.native.tensor_view())

        def view(tensor, out):
            try:
                done = real(tensor, out)
            except Exception:  # nobody would be told of it
                return -1
            where = (ctypes.c_int32 * 2).from_address(out + _DEVICE)
            if done == 0 and self.on and where[0] == _CPU:
                where[0], where[1] = _CUDA, 0
            return done

        def launch(function, programs, *more):
            *_, params, _ = more
            self.launches += 1
            address, rows = (ctypes.c_void_p.from_address(params[at]).value for at in (0, 1))
            numbers = [ctypes.c_int32.from_address(params[at]).value for at in range(2, 6)]
            with np.errstate(over="ignore", invalid="ignore"):
                self._measure(self._names[function - 1], programs, address, rows, *numbers)
            return 0

        self._kept = _VIEW(view), _LAUNCH(launch)
        self.view = ctypes.cast(self._kept[0], ctypes.c_void_p).value
        self.means = devices.Means(
            ctypes.cast(self._kept[1], ctypes.c_void_p).value,
            lambda index: self._new_page(),
            lambda index, name, packed, aligned: (self._names.index(name) + 1, 128, 0),
            lambda index: 0,
            lambda: 0,
            lambda: False,
        )

    def _new_page(self):
        page = torch_modes.run_unseen(_Page, self)
        return page, page.rows.data_ptr(), len(page.rows), NAME

    def _measure(self, name, programs, address, rows, count, inner, stride, first):
        at = np.arange(count)
        where = at // inner * stride + at % inner
        size = np.dtype(_KINDS[name]).itemsize
        memory = (ctypes.c_char * (int(where.max() + 1) * size)).from_address(address)
        x = np.frombuffer(memory, _KINDS[name])[where]
        if name == "bfloat16":
            x = (x.astype("u4") << 16).view("f4")
        into = (ctypes.c_double * (programs * COLUMNS)).from_address(rows + 8 * COLUMNS * first)
        of = at // on_device._BLOCK % programs
        for program in range(programs):
            own = x[of == program].astype("f8")
            known = own[own == own]
            row = (known.min(initial=math.inf), known.max(initial=-math.inf), own.sum(), own @ own)
            counts = (own != own).sum(), np.isinf(own).sum(), (own == 0).sum()
            into[program * COLUMNS : program * COLUMNS + 7] = [*row, *map(float, counts)]


class _Page(Page):
    def __init__(self, device):
        super().__init__(torch.device("cpu"))
        self._device = device

    def read(self, used):
        self._device.reads -= 1
        if self._device.reads < 0:
            raise RuntimeError("an illegal memory access was encountered\nmore")
        return super().read(used)


@contextlib.contextmanager
def pretended(patch):
    """Let all tensors that a tape sees lie on a `Device`, which is yielded.

    What goes the long way still lies on the host.
    """
    device = Device()
    observer, notes = torch_observer.observer(), native.notes()
    if observer is not None:
        observer.use(notes, False)  # it asks torch itself where a tensor lies
    patch.setattr(torch_observer, "observer", lambda: None)
    patch.setattr(native.native, "tensor_view", lambda: device.view)
    patch.setattr(native.devices, "means", lambda: device.means)
    native._make.cache_clear()
    try:
        assert native._make() is not None
        device.on = True
        yield device
    finally:
        patch.undo()
        native._make.cache_clear()
        if observer is not None:
            observer.use(notes, True)
