"""The weights of a GGUF file, for a run of llama.cpp that has none of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from llmdebug_nb.capture.engines import gguf_file, gguf_values
from llmdebug_nb.replay.checks import DTYPE, GAP
from llmdebug_nb.replay.operators import CannotReplay


class FileWeights:
    """Reads weights when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises MissingPackageError; CorruptDumpError: the file can't be read."""
        self._file = gguf_file.read(path)

    def of(self, name: str, kind: str, prefix: str) -> torch.Tensor:
        """Return a weight by its name. Raises CannotReplay: the file is not the run's, or gguf
        can't dequantise it.
        """
        stored = self._file.tensors.get(name)
        if stored is None or stored.kind != kind.upper():
            has = "none" if stored is None else f"it in {stored.kind}"
            raise CannotReplay(
                f"the run has weights in {kind}, and {self._file.name} has"
                f" {has}: give the file that ran",
                GAP,
            )
        value = gguf_values.value(stored)
        if value is None:
            raise CannotReplay(f"the installed gguf can't dequantise {kind}", DTYPE)
        return value
