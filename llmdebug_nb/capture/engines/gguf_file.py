"""Reading GGUF files: metadata and places of tensors. No length in the file is trusted.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf reads
it too, but believes every length. From it come the names and sizes of types, and dequantisation.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from llmdebug_nb.core.errors import CorruptDumpError, MissingPackageError
from llmdebug_nb.core.printable import printable

Bytes = npt.NDArray[np.uint8]
_VERSIONS = (2, 3)
_AXES = 4  # that a tensor of ggml has at most
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_NAME = 64  # characters of a name that an error shows


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a GGUF file. ``shape``: the slowest axis first, as in PyTorch.

    ``kind``: ggml's name of its type. ``block``: elements and bytes of a block of it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    raw: Bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file. ``metadata``: numbers, texts, and arrays of them, by key."""

    name: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, Stored]

    def number(self, key: str) -> int | float | None:
        """Return a number of the metadata; None if there is none, or one for each layer differs."""
        found = self.metadata.get(key)
        if isinstance(found, np.ndarray) and len(found) and (found == found[0]).all():
            found = found[0].item()
        return found if isinstance(found, (int, float)) else None

    def text(self, key: str) -> str:
        """Return a text of the metadata; "" if there is none."""
        found = self.metadata.get(key)
        return found if isinstance(found, str) else ""


def package(name: str) -> ModuleType:
    """Return the package gguf. Raises MissingPackageError."""
    try:
        return import_module("gguf")
    except ImportError:
        raise MissingPackageError(
            f"{name} is a GGUF file, and the package gguf is not installed:"
            " pip install 'llmdebug-nb[gguf]'"
        ) from None


def read(path: Path) -> GGUFFile:
    """Read metadata and places of tensors; values stay in the file until they are asked for.

    Raises MissingPackageError, and CorruptDumpError for a file that can't be read or contradicts
    itself.
    """
    package(path.name)
    try:
        raw: Bytes = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CorruptDumpError(f"{path.name} can't be read: {error}") from None
    return _Reader(path.name, raw).file()


class _Reader:
    """Goes through the bytes of a file, and never past their end."""

    def __init__(self, name: str, raw: Bytes) -> None:
        self._name, self._raw, self._at = name, raw, 0

    def file(self) -> GGUFFile:
        tensors, pairs = self._head()
        metadata = dict[str, object]()
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise self._bad(f"two values of {_short(key)}")
            metadata[key] = self._value(self._number("<u4"))
        places = [self._place() for _ in range(tensors)]
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self._bad(f"an alignment of {step!r:.20}; expected a power of 2")
        start = -(-self._at // step) * step
        found = dict[str, Stored]()
        for name, shape, kind, offset in places:
            if name in found:
                raise self._bad(f"two tensors {_short(name)}")
            found[name] = self._stored(name, shape, kind, start + offset)
        return GGUFFile(self._name, metadata, found)

    def _head(self) -> tuple[int, int]:
        """Return how many tensors and pairs of metadata there are."""
        magic = self._take(4).tobytes()
        if magic != b"GGUF":
            raise self._bad(f"{magic!r} at its start; expected b'GGUF'")
        version = self._number("<u4")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in _VERSIONS else f"version {version}"
            raise self._bad(f"{kind}; expected little-endian, version 2 or 3")
        tensors, pairs = self._number("<u8"), self._number("<u8")
        left = len(self._raw) - self._at
        if 24 * tensors + 13 * pairs > left:  # the least that each takes
            raise self._bad(f"{tensors:,} tensors and {pairs:,} settings in {left:,} bytes")
        return tensors, pairs

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._text(), self._number("<u4")
        if axes > _AXES:
            raise self._bad(f"{_short(name)} has {axes:,} axes; expected {_AXES} at most")
        shape = tuple(self._number("<u8") for _ in range(axes))[::-1]
        return name, shape, self._number("<u4"), self._number("<u8")

    def _stored(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Stored:
        gguf = package(self._name)
        try:
            found = gguf.GGMLQuantizationType(kind)
            elements, size = (int(n) for n in gguf.GGML_QUANT_SIZES[found])
        except (ValueError, KeyError):
            raise self._bad(
                f"{_short(name)} has type {kind}, which the installed gguf does not know:"
                " pip install -U gguf"
            ) from None
        if not prod(shape) or not shape or shape[-1] % elements:
            raise self._bad(f"{_short(name)} has shape {list(shape)} in blocks of {elements}")
        length = prod(shape) // elements * size
        if start + length > len(self._raw):
            raise self._bad(
                f"{_short(name)} ends at byte {start + length:,}, and the file at"
                f" {len(self._raw):,}: was it copied to its end?"
            )
        return Stored(name, found.name, shape, (elements, size), self._raw[start : start + length])

    def _value(self, kind: int, inside: bool = False) -> object:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or inside:
            return self._number(self._type(kind))
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            self._room(8 * count)
            return [self._text() for _ in range(count)]
        dtype = np.dtype(self._type(kind))
        return self._take(count * dtype.itemsize).view(dtype)

    def _type(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._bad(f"a value of type {kind} in its metadata")
        return _NUMBERS[kind]

    def _number(self, dtype: str) -> int:
        raw = self._take(np.dtype(dtype).itemsize)
        found: int = raw.view(dtype)[0].item()
        return found

    def _text(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8).tobytes())
        return self._take(length).tobytes().decode("utf-8", "replace")

    def _take(self, length: int) -> Bytes:
        self._room(length)
        found = self._raw[self._at : self._at + length]
        self._at += length
        return found

    def _room(self, length: int) -> None:
        if length > len(self._raw) - self._at:
            raise self._bad(
                f"{length:,} bytes wanted at byte {self._at:,} of {len(self._raw):,}: was it copied"
                " to its end?"
            )

    def _bad(self, what: str) -> CorruptDumpError:
        return CorruptDumpError(f"{self._name} can't be read as GGUF: {what}")


def _short(name: str) -> str:
    return printable(name[:_NAME])
