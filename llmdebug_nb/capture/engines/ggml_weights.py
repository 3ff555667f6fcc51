"""The values of a model's weights, and of what is kept in blocks, as floats.

A type in blocks is dequantised by the package gguf. Weights that llama.cpp has rearranged for the
processor can't be read from memory: they come from the file.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from llmdebug_nb.capture.compat.ggml_tensors import Reading, Tensor, is_plain
from llmdebug_nb.capture.engines import gguf_file, gguf_values
from llmdebug_nb.capture.engines.gguf_file import GGUFFile, Stored
from llmdebug_nb.core.errors import CaptureError, CorruptDumpError, MissingPackageError

# buffers of weights in another order; they have no function to read from
_REARRANGED = ("CPU", "AMX")


class Weights:
    """Reads the weights of a ``Llama``. ``path``: of its file."""

    def __init__(self, library: Reading, path: str) -> None:
        self._library, self._path = library, Path(path)

    def weight(self, name: str, tensor: Tensor) -> torch.Tensor:
        """Return a weight, as floats of its shape. Raises CaptureError, which says what to do."""
        if is_plain(tensor.type) and not self._is_rearranged(tensor):
            return self._library.values(tensor).reshape(_shape(tensor))
        stored = self._stored(name, tensor)
        value = gguf_values.value(stored)
        if value is None:
            raise CaptureError(f"{name}: the installed gguf can't dequantise {stored.kind}")
        return value

    def values(self, tensor: Tensor) -> torch.Tensor:
        """Return the values of any other tensor, ``[ne3, ne2, ne1, ne0]``, as floats.

        Raises CaptureError.
        """
        if is_plain(tensor.type):
            return self._library.values(tensor)
        found = gguf_values.value(self._blocks("a cache", tensor))
        if found is None:
            raise CaptureError("a cache: the installed gguf can't dequantise its type")
        return found

    def _is_rearranged(self, tensor: Tensor) -> bool:
        return self._library.device(tensor).startswith(_REARRANGED)

    def _stored(self, name: str, tensor: Tensor) -> Stored:
        if not self._is_rearranged(tensor):
            stored = self._blocks(name, tensor)
            return Stored(name, stored.kind, _shape(tensor), stored.block, stored.raw)
        found = self._file.tensors.get(name)
        kind = self._library.type_name(tensor.type).upper()
        if found is None or (found.kind, found.shape) != (kind, _shape(tensor)):
            raise CaptureError(
                f"{name} lies in memory in an order of the processor's, and"
                f" {self._path.name} has no such tensor in {kind}: is it the file that was loaded?"
            )
        return found

    def _blocks(self, name: str, tensor: Tensor) -> Stored:
        """Return a tensor in blocks as a file would have it."""
        kind = self._library.type_name(tensor.type).upper()
        try:
            gguf = gguf_file.package(name)
            elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        except MissingPackageError:
            raise CaptureError(_MISSING) from None
        except KeyError:
            raise CaptureError(f"{name}: the installed gguf does not know {kind}") from None
        rows = self._library.rows(tensor, tensor.ne[0] // elements * size)
        shape = tuple(tensor.ne)[::-1]
        return Stored(name, kind, shape, (elements, size), rows.reshape(-1))

    @cached_property
    def _file(self) -> GGUFFile:
        try:
            return gguf_file.read(self._path)
        except MissingPackageError:
            raise CaptureError(_MISSING) from None
        except CorruptDumpError as error:
            raise CaptureError(f"weights are in an order of the processor's: {error}") from None


_MISSING = (
    "quantised weights and caches were not recorded, as the package gguf is not installed:"
    " pip install 'llmdebug-nb[gguf]'"
)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape, slowest axis first, without axes that ggml only fills up."""
    ne = [int(n) for n in tensor.ne]
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return tuple(ne[::-1])
