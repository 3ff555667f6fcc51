"""Copying a dump with figures of each tensor in place of its values.

The old dump is only removed (`replace`) once the new one is complete on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.errors import first_line
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.store import catalog
from llmdebug_nb.store.copying import Copy, copied
from llmdebug_nb.store.process import Process
from llmdebug_nb.store.writer import Writer

if TYPE_CHECKING:
    import torch

Figures = Callable[["torch.Tensor"], "torch.Tensor"]
_OFFSET, _LENGTH, _LOST = AT["offset"], AT["length"], AT["lost"]
_DTYPE, _SHAPE, _KEPT, _KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]


def reduced(
    run: Path,
    folder: str,
    kept: str,
    figures: Figures,
    progress: Callable[[int], None],
    name: str | None = None,
) -> Path:
    """Write a smaller run beside ``run``, with figures of its tensors; return its folder.

    ``folder``: the name of the new folder. ``name``: the new run's name, if it differs from that.
    ``figures(tensor)`` returns float64[n], called ``kept``. Tensors that ``run`` keeps only in
    part are copied as they are. ``progress`` and what is raised: as in `copying.copied`.
    """
    marker = catalog.read_marker(run)
    options = {**(marker.get("options") or {}), "reduce": kept}
    details = {"options": options, "environment": marker.get("environment", {})}
    if marker.get("redacted"):
        details["redacted"] = True
    if name is not None:
        details["name"] = name

    def copy(process: Process, writer: Writer) -> Copy:
        return _Reduced(process, writer, kept, figures)

    return copied(run, (run.parent, folder), details, copy, progress)


def replace(old: Path, new: Path) -> Path:
    """Put a run in the place of another one."""
    shutil.rmtree(old)
    os.rename(new, old)
    return old


class _Reduced(Copy):
    def __init__(self, process: Process, writer: Writer, kept: str, figures: Figures) -> None:
        super().__init__(process, writer)
        self._kept, self._figures = kept, figures
        # offset and length of values -> offset, length and shape of their figures
        self._copied: dict[tuple[int, int], tuple[int, int, str | None]] = {}

    def record(self, row: Row) -> None:
        """Write what is kept of a tensor; values that were met before are written once."""
        offset, length = row[_OFFSET], row[_LENGTH]
        if offset is None:
            return
        whole = row[_KEPT] is None
        if whole:
            row[_KEPT] = self._kept
        if (offset, length) in self._copied:
            new_offset, new_length, row[_KEPT_SHAPE] = self._copied[offset, length]
            self.writer.duplicate(row, new_offset, new_length)
            return
        shape, kept = (row[_SHAPE], None) if whole else (row[_KEPT_SHAPE], row[_KEPT])
        values = self.process.read(offset, length, row[_DTYPE], shape, kept)
        if whole:
            try:
                values = self._figures(values)
            except (RuntimeError, NotImplementedError) as error:
                row[_KEPT], row[_OFFSET], row[_LENGTH] = None, None, None
                row[_LOST] = f"no {self._kept} of {row[_DTYPE]}: {first_line(error)}"
                return
            row[_KEPT_SHAPE] = f"[{', '.join(map(str, values.shape))}]"
        self.writer.payload(row, to_bytes(values))
        self._copied[offset, length] = row[_OFFSET], row[_LENGTH], row[_KEPT_SHAPE]
