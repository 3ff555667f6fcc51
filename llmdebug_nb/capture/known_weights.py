"""Large weights, which operators receive in every step, and the rows that describe them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.geometry import Key, identity, on_host
from llmdebug_nb.capture.tape.native import Eye
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.kernels.raw import memory_at

SMALL = 64 << 10  # bytes: a weight of no more is read each time


class KnownWeights:
    """The weights of a recording by storage number, and their rows by identity. Not thread-safe.

    ``storages``: handles that reserve the numbers.
    """

    def __init__(self) -> None:
        self.storages: dict[int, object] = {}
        self._last: list[int] | None = None  # storages of the weights that were added last
        self._measured: dict[bytes, bytes] = {}  # what C keeps of them
        self._rows: dict[Key, tuple[bytes, Row]] = {}  # with a sample of the weight

    def share(self, eye: Eye) -> None:
        """Let what looks at tensors recognise these weights, together with others that do."""
        eye.weigh(self.storages, self._measured)

    def add(
        self, weights: list[torch.Tensor], local: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Add weights. Costs little if they are those of the last time, where they were.

        ``local``: returns this rank's part of one.
        """
        parts = [local(weight) for weight in weights]
        now = pytorch.storage_numbers(parts)
        if now is None or now != self._last:
            for part in parts:
                self._add(part)
            self._last = now

    def _add(self, weight: torch.Tensor) -> None:
        """Add a weight, unless it lies on a device."""
        try:
            if not on_host(weight):
                return
            number = pytorch.storage_number(weight.untyped_storage())
        except (RuntimeError, NotImplementedError, AttributeError):  # it has none: it is sparse
            return
        if number not in self.storages:
            self.storages[number] = pytorch.storage_of(weight)

    def has(self, place: int | None, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor in the storage of that number is large, and a part of a weight."""
        return place in self.storages and tensor.nbytes > SMALL

    def row_of(self, tensor: torch.Tensor, row: Row) -> Row | None:
        """Return the row of a weight, or of a view of one, if its version and a sample agree.

        Otherwise ``row`` describes it from now on, and is returned. None: it can't be recognised.
        """
        key = identity(tensor)
        sample = _sample(tensor) if key is not None else None
        if key is None or sample is None:
            return None
        known = self._rows.get(key)
        if known is None or known[0] != sample:
            self._rows[key] = known = sample, row
        return known[1]

    def forget_rows(self) -> None:
        """Let each weight be described again."""
        self._rows.clear()


def _sample(tensor: torch.Tensor) -> bytes | None:
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
