"""Rows of tensors on devices: which are of one tensor, and which wait for their statistics.

Statistics lie on the device until they are read together, and rarely.
"""

from __future__ import annotations

import numpy as np
import torch

from llmdebug_nb.capture import geometry, rows
from llmdebug_nb.capture.geometry import Key
from llmdebug_nb.capture.rows import Hand
from llmdebug_nb.capture.tape.native import Eye, Seen
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.kernels import on_device, raw
from llmdebug_nb.core.kernels.on_device import Doubles, Measured, Pages

CAPTURED = "its statistics could not be read back: a CUDA graph was captured then"


class WaitingRows:
    """Rows that wait for the statistics of their own tensor, or for those of another row.

    ``recognizes``: a tensor is recognised by its place and version, within one root call.
    """

    def __init__(self, eye: Eye) -> None:
        """``eye``: looks at tensors. What is forgotten here, it forgets, too."""
        self.recognizes, self.eye = True, eye
        self._pages = Pages()
        self._by_place: dict[Key, Row] = {}
        self._measured: list[tuple[Row, Measured]] = []
        self._copies: list[tuple[Row, Row]] = []

    def known(self, row: Row, tensor: torch.Tensor, changed: bool) -> Row:
        """Return the first row of a tensor as it is now: ``row`` itself if there is none.

        ``changed``: it may have changed without a new version.
        """
        key = geometry.identity(tensor) if self.recognizes and not changed else None
        return row if key is None else self._by_place.setdefault(key, row)

    def forget(self) -> None:
        """Recognise no tensor any more: a root call ends, or versions do not tell of a change."""
        self._by_place.clear()
        self.eye.forget()

    def measure(self, row: Row, tensor: torch.Tensor) -> None:
        """Measure a tensor on its device; it may change afterwards.

        Raises RuntimeError (NotImplementedError: its values can't be read).
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

    def has_work(self, hand: Hand) -> bool:
        """Tell whether rows wait, those that are packed in ``hand`` included."""
        return bool(self._measured or self._copies or hand.measured)

    def fill(self, hand: Hand) -> tuple[list[Row], str]:
        """Write the statistics into all rows that wait for them. Waits for the devices.

        ``hand``: packed rows may wait, too; if they have to do without, they become its records.
        Return the rows that have to do without, and why: nothing can be read while a CUDA graph is
        captured, or after the program has done something illegal on the device.
        """
        measured, copies = self._measured.copy(), self._copies.copy()
        why = self._read(measured, hand)
        without = hand.unpack() + [row for row, _ in measured] if why else []
        del self._measured[: len(measured)], self._copies[: len(copies)]
        numbers = {id(row) for row in without}
        for row, known in copies:
            row[rows.STATISTICS] = known[rows.STATISTICS]
            if id(known) in numbers:
                numbers.add(id(row))
                without.append(row)
        return without, why

    def _read(self, measured: list[tuple[Row, Measured]], hand: Hand) -> str:
        """Read the statistics of rows back; return why that failed, or ""."""
        if not measured and not hand.measured:
            return ""
        if raw.captures_graph():
            return CAPTURED
        try:
            figures = on_device.figures([each for _, each in measured])
            _fill_packed(hand)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            return f"its statistics could not be read back: {type(error).__name__}: {first_line}"
        for (row, _), row_figures in zip(measured, figures, strict=True):
            row[rows.STATISTICS] = row_figures
        return ""


def _fill_packed(hand: Hand) -> None:
    """Write the figures into packed rows where C has left room. Raises RuntimeError.

    Code of the program may run meanwhile, as a finalizer, and add rows: these are left as they are.
    """
    packed = hand.packed
    for page, noted in list(hand.measured.items()):
        taken = np.frombuffer(bytes(noted), np.int64).reshape(-1, 4)
        if len(taken):
            figures = _as_messagepack(on_device.figures_of(page, taken[:, 1:]))
            for place, row in zip(taken[:, 0].tolist(), figures, strict=True):
                packed[place : place + len(row)] = row
        del noted[: taken.nbytes]
        if not noted:
            hand.measured.pop(page, None)


def _as_messagepack(figures: Doubles) -> list[bytes]:
    """Return ``[n, 7]`` figures as 63 bytes each: four float64 and three int64."""
    packed = np.empty((len(figures), 7, 9), np.uint8)
    packed[:, :4, 0], packed[:, 4:, 0] = 0xCB, 0xD3
    packed[:, :4, 1:] = figures[:, :4].astype(">f8").view(np.uint8).reshape(-1, 4, 8)
    packed[:, 4:, 1:] = figures[:, 4:].astype(">i8").view(np.uint8).reshape(-1, 3, 8)
    return [row.tobytes() for row in packed]
