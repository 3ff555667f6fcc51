"""ggml's tensors: their fields, and how their values are read. Nothing of ours is compiled.

``struct ggml_tensor`` and the numbers of its types are those of ``ggml/include/ggml.h``, as of
llama-cpp-python 0.3.36. The size that the library itself tells has to agree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from llmdebug_nb.core.errors import CaptureError

_OBJECT = 32  # bytes of `struct ggml_object`, which stands before each tensor in its pool
_BYTES = 24  # the number of the type int8
_WEIGHTS = 1  # of `enum ggml_backend_buffer_usage`
# dtype to read with, and torch's dtype of the same bits, by the number of ggml's type
_TYPES: dict[int, tuple[str, torch.dtype]] = {
    0: ("<f4", torch.float32),
    1: ("<f2", torch.float16),
    24: ("<i1", torch.int8),
    25: ("<i2", torch.int16),
    26: ("<i4", torch.int32),
    27: ("<i8", torch.int64),
    28: ("<f8", torch.float64),
    30: ("<i2", torch.bfloat16),
}

Pointer: TypeAlias = "ctypes._Pointer[Tensor]"


class Tensor(ctypes.Structure):
    """``struct ggml_tensor``. ``ne``, ``nb``: elements and bytes of each axis, fastest first."""

    type: int
    buffer: int | None
    ne: Sequence[int]
    nb: Sequence[int]
    op: int
    op_params: Sequence[int]
    src: Sequence[Pointer]
    view_src: Pointer
    data: int | None
    name: bytes


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "ggml_tensor_overhead": (ctypes.c_size_t, []),
    "ggml_op_desc": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_buffer_get_usage": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
    "ggml_backend_buffer_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_tensor_get": (
        None,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
    ),
}  # fmt: skip


class Reading(Protocol):
    """What is asked of ggml. `Library` asks the real one."""

    def op(self, tensor: Tensor) -> str: ...
    def type_name(self, number: int) -> str: ...
    def is_weight(self, tensor: Tensor) -> bool: ...
    def device(self, tensor: Tensor) -> str: ...
    def values(self, tensor: Tensor) -> torch.Tensor: ...
    def rows(self, tensor: Tensor, width: int) -> np.ndarray: ...


class Library:
    """ggml's functions, by a handle of our own: the program's declarations stay as they are."""

    def __init__(self, library: ctypes.CDLL, release: str) -> None:
        """Raises CaptureError: a function is missing, or tensors have another layout."""
        own = ctypes.CDLL(library._name, handle=library._handle)
        self._functions: dict[str, Callable[..., object]] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(own, name)
            except AttributeError as error:
                raise CaptureError(f"llama_cpp {release}: ggml has no {name!r}") from error
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        size = self._call("ggml_tensor_overhead")
        if size != _OBJECT + ctypes.sizeof(Tensor):
            raise CaptureError(
                f"llama_cpp {release}: ggml's tensors and their head have {size} bytes, and"
                f" {_OBJECT + ctypes.sizeof(Tensor)} in 0.3.36, whose layout is known;"
                " record with that release"
            )

    def _call(self, name: str, *arguments: object) -> object:
        return self._functions[name](*arguments)

    def op(self, tensor: Tensor) -> str:
        """Return the name of the operation: ``MUL_MAT``, ``SILU``."""
        return self._call("ggml_op_desc", ctypes.byref(tensor)).decode()  # type: ignore[attr-defined, no-any-return]

    def type_name(self, number: int) -> str:
        """Return the name of a type: ``q8_0``."""
        return self._call("ggml_type_name", number).decode()  # type: ignore[attr-defined, no-any-return]

    def is_weight(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is of the model: its buffer holds weights."""
        buffer = _buffer(tensor)
        return bool(buffer) and self._call("ggml_backend_buffer_get_usage", buffer) == _WEIGHTS

    def device(self, tensor: Tensor) -> str:
        """Return the name of the buffer that a tensor lies in, ``CUDA0``; "" for plain memory."""
        buffer = _buffer(tensor)
        if not buffer or self._call("ggml_backend_buffer_is_host", buffer):
            return ""
        return self._call("ggml_backend_buffer_name", buffer).decode()  # type: ignore[attr-defined, no-any-return]

    def values(self, tensor: Tensor) -> torch.Tensor:
        """Return a copy of the values, slowest axis first, also from a device.

        Raises CaptureError: a quantised type, or strides that leave the tensor.
        """
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        return strided(self._bytes(tensor), tensor.type, shape, strides)

    def rows(self, tensor: Tensor, width: int) -> np.ndarray:
        """Return the bytes of each row, uint8[ne3, ne2, ne1, width], of a type in blocks.

        Raises CaptureError: strides that leave the tensor.
        """
        shape, strides = (*tuple(tensor.ne)[:0:-1], width), (*tuple(tensor.nb)[:0:-1], 1)
        return strided(self._bytes(tensor), _BYTES, shape, strides).numpy().view(np.uint8)

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        """Return a copy of the bytes, uint8[n]."""
        this = ctypes.byref(tensor)
        count: int = self._call("ggml_nbytes", this)  # type: ignore[assignment]
        raw = np.empty(count, np.uint8)
        self._call("ggml_backend_tensor_get", this, raw.ctypes.data, 0, count)
        return raw


def _buffer(tensor: Tensor) -> int | None:
    return tensor.view_src.contents.buffer if tensor.view_src else tensor.buffer


def is_plain(kind: int) -> bool:
    """Tell whether a type has a value for each element, and is no type in blocks."""
    return kind in _TYPES


def _check(kind: int, shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int) -> None:
    if kind not in _TYPES:
        raise CaptureError(f"values of ggml's type {kind} are not read: its elements are blocks")
    end = width = _TYPES[kind][1].itemsize
    cut = False
    for n, step in zip(shape, strides, strict=True):
        end += (n - 1) * step
        cut |= step % width != 0
    if cut or min(shape) < 0 or (0 not in shape and end > nbytes):
        raise CaptureError(
            f"a tensor of shape {shape} with strides {strides} does not lie in {nbytes} bytes"
        )


def strided(
    raw: np.ndarray, kind: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return the values in bytes, uint8[n], as a contiguous tensor, which may share their memory.

    ``strides``: in bytes.

    Raises CaptureError: a type without values of its own (quantised), or strides that leave the
    bytes or cut an element. The numbers come from the engine and are not trusted.
    """
    _check(kind, shape, strides, raw.nbytes)
    name, dtype = _TYPES[kind]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    values: np.ndarray = np.ndarray(shape, name, raw.data, strides=strides)
    return torch.from_numpy(np.ascontiguousarray(values)).view(dtype)
