"""Rows whose statistics still lie on a device: they are read together, and rarely."""

from __future__ import annotations

import torch

from llmdebug_nb.capture import rows
from llmdebug_nb.capture.tape.native import Seen
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.kernels import on_device, raw
from llmdebug_nb.core.kernels.on_device import Measured, Pages


class WaitingRows:
    """Rows that wait for the statistics of their own tensor, or for those of another row."""

    def __init__(self) -> None:
        self._pages = Pages()
        self._measured: list[tuple[Row, Measured]] = []
        self._copies: list[tuple[Row, Row]] = []

    def measure(self, row: Row, tensor: torch.Tensor) -> None:
        """Measure a tensor on its device; it may change afterwards.

        Raises RuntimeError or NotImplementedError if its values can't be read.
        """
        measured = self._pages.measure(tensor)
        if measured is not None:
            self._measured.append((row, measured))

    def add(self, row: Row, seen: Seen) -> None:
        """Let a row wait for what the tape has measured."""
        self._measured.append((row, Measured(*seen.measured())))

    def repeat(self, row: Row, known: Row) -> None:
        """Let a row wait for the statistics of another one."""
        self._copies.append((row, known))

    def fill(self) -> list[Row]:
        """Write the statistics into all rows that wait for them. Waits for the devices.

        Return the rows that have to do without, as a CUDA graph is captured now.
        """
        measured, copies = self._measured, self._copies
        self._measured, self._copies = [], []
        without = [row for row, _ in measured] if measured and raw.captures_graph() else []
        if measured and not without:
            figures = on_device.figures([each for _, each in measured])
            for (row, _), row_figures in zip(measured, figures, strict=True):
                row[rows.STATISTICS] = row_figures
        numbers = {id(row) for row in without}
        for row, known in copies:
            row[rows.STATISTICS] = known[rows.STATISTICS]
            if id(known) in numbers:
                numbers.add(id(row))
                without.append(row)
        return without
