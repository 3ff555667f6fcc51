"""Small CPU tensors: copied and measured by one call of C (`look.c`), turned into rows later.

Between two hooks the program pushes our own code and data out of the caches, so every step in a
hook costs several times what it costs in a loop. While the program waits, the elements are only
copied and measured; the rest follows in `Arena.take`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from llmdebug_nb.core.kernels import native
from llmdebug_nb.core.kernels.native import Figures
from llmdebug_nb.core.kernels.raw import memory_at

Look = Callable[[int, torch.Tensor, int], int]  # address of an arena, tensor, bytes of its storage
# dtype name, shape, figures, and the elements' bytes in row-major order, valid until `Arena.clear`
Looked = tuple[str, tuple[int, ...], Figures, memoryview]

ROOM, MANY, LARGEST = 1 << 20, 4096, 64 << 10  # bytes, tensors, bytes of one tensor
NO_ROOM, NOT_FOR_THIS = -1, -2  # as in look.c
_KINDS = (*native.TABLE, "bool")  # as in look.c
_LOOK = struct.Struct("=12q4d3q")
_DIMS = 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def sample(tensor: torch.Tensor) -> bytes | None:
    """Return 64 words spread evenly over a CPU tensor's storage.

    None if it is too small or unreadable.
    """
    try:
        start = tensor.storage_offset() * tensor.element_size()
        words = (tensor.untyped_storage().nbytes() - start) // 8
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if words < 64 or not address:
        return None
    return np.frombuffer(memory_at(address), np.int64, words)[:: words // 64].tobytes()


class _Arena(ctypes.Structure):
    """The Arena of look.c."""

    _fields_ = (
        ("view", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("looks", ctypes.c_void_p),
        ("most", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("largest", ctypes.c_int64),
    )


class Arena:
    """Copies of tensors with their figures. Not thread-safe: the owner holds a lock and the GIL."""

    def __init__(
        self, function: Look, view: int, room: int = ROOM, many: int = MANY, largest: int = LARGEST
    ) -> None:
        """``function``: ``llmdebug_look``. ``view``: address of torch's function for it."""
        self._room = np.empty(room, np.uint8)
        self._looks, self._view = np.empty(many * _LOOK.size, np.uint8), self._room.data
        self._arena = _Arena(
            view, self._room.ctypes.data, room, 0, self._looks.ctypes.data, many, 0, largest
        )
        self._function, self._address = function, ctypes.addressof(self._arena)

    def look(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
        """Copy and measure a tensor; return its number, NO_ROOM or NOT_FOR_THIS.

        NOT_FOR_THIS are tensors on other devices, of special classes and dtypes, and empty, large
        or freed ones. A small strided tensor is copied in row-major order.
        """
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return NOT_FOR_THIS
        return self._function(self._address, tensor, storage.nbytes())

    def take(self, number: int) -> Looked:
        """Return the tensor of that number."""
        kind, start, nbytes, dims, *rest = _LOOK.unpack_from(self._looks.data, number * _LOOK.size)
        return (
            _KINDS[kind],
            tuple(rest[:dims]),
            tuple(rest[_DIMS:]),
            self._view[start : start + nbytes],
        )

    def clear(self) -> None:
        """Make room; the bytes of taken tensors become invalid."""
        self._arena.used = self._arena.count = 0


def arena() -> Arena | None:
    """Return a new arena, or None if the C kernel isn't used or torch lacks the function."""
    parts = _parts()
    return None if parts is None else Arena(*parts)


@cache
def _parts() -> tuple[Look, int] | None:
    """Return ``llmdebug_look`` and torch's function for it, both tested."""
    parts = native.tensor_function("llmdebug_look", ctypes.c_int64)
    return parts if parts is not None and _is_right(Arena(*parts)) else None


def _is_right(arena: Arena) -> bool:
    """Test with a strided tensor, without torch's factories: a mode may watch them."""
    values = np.array([[1, 2], [3, 4]], np.float32)
    tensor = torch.from_numpy(values).t()
    if arena.look(tensor, tensor.untyped_storage()) != 0:
        return False
    dtype, shape, figures, data = arena.take(0)
    right = (dtype, shape, figures[:2], figures[4:]) == ("float32", (2, 2), (1.0, 4.0), (0, 0, 0))
    return right and data.tobytes() == values.T.tobytes()
