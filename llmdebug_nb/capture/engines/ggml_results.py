"""The results of the nodes of a pass, each kept until the last node that reads it is computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from llmdebug_nb.capture.recorder import Recorder


class Results:
    """By the address of their tensor. A long prompt computes more than memory holds at once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._values: dict[int, torch.Tensor | None] = {}
        self._readers: dict[int, int] = {}  # that have not begun
        self._read: list[int] = []  # whose last reader has begun

    def add(self, address: int, values: torch.Tensor, readers: int | None) -> None:
        """Add a result that ``readers`` nodes will read; None: nobody knows."""
        self._recorder.settle(values)
        self._values[address] = values
        if readers:
            self._readers[address] = readers

    def read(self, addresses: Iterable[int]) -> None:
        """A node that reads these is about to be computed, and those before it are computed."""
        for address in self._read:
            values, self._values[address] = self._values[address], None
            if values is not None:
                self._recorder.unsettle(values)
        self._read = []
        for address in addresses:
            if address in self._readers:
                self._readers[address] -= 1
                if not self._readers[address]:
                    self._read.append(address)

    def __contains__(self, address: int) -> bool:
        return address in self._values

    def __getitem__(self, address: int) -> torch.Tensor | None:
        """Return a result; None: it was let go."""
        return self._values[address]
