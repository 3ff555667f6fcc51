"""The placements of tensors over ranks: each one is written once, and rows have its number."""

from __future__ import annotations

import torch

from llmdebug_nb.capture.compat import torch_distributed
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.core.columns import PLACEMENTS
from llmdebug_nb.core.placement import Placement


class Placements:
    """The placements in one dump. Not thread-safe."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._numbers: dict[Placement, int] = {}

    def local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Return this rank's part of a tensor, and the number of its placement if it has one.

        Raises StoreError.
        """
        tensor, placement = torch_distributed.local(tensor)
        if placement is None:
            return tensor, None
        number = self._numbers.get(placement)
        if number is None:
            number = self._numbers[placement] = len(self._numbers)
            self._sink.table(PLACEMENTS.name, [(number, placement.as_json())])
        return tensor, number
