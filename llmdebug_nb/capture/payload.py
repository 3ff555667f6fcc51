"""The part of each tensor that is kept besides its statistics, and the limits of disk space."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmdebug_nb.core.kernels import partial
from llmdebug_nb.core.options import DumpOptions

LOOK_AGAIN = 1 << 26  # bytes written between two checks of the disk


class NotKept(Exception):
    """A payload is left out; the text says why."""


class Policy:
    """Decides which payloads are kept. Once one does not fit, no later one is kept either.

    ``part_name``: the part of a tensor that is kept, in the dump's words (``slice[0,:]``,
    ``minmax``, ``quantile[101]``); None: all of it. ``written``: bytes of payload so far.
    """

    def __init__(self, options: DumpOptions, shortage: Callable[[int], str | None]) -> None:
        """``shortage(n)``: why the disk should not take n more bytes, or None."""
        self.wanted = not options.stats_only
        self.part_name: str | None = None
        self._take: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._shortage = shortage
        self._budget = options.max_bytes
        self.written = self._unchecked = 0
        self._full: str | None = None  # why no further payload is kept
        if options.slice is not None:
            index = partial.parse_index(options.slice)
            self.part_name = f"slice[{options.slice}]"
            self._take = lambda tensor: partial.cut(tensor, index)
        elif options.reduce == "minmax":
            self.part_name, self._take = "minmax", partial.minmax
        elif options.reduce is not None:
            count = int(options.reduce.partition(":")[2])
            self.part_name = f"quantile[{count}]"
            self._take = lambda tensor: partial.quantiles(tensor, count)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that is kept: all of it if ``part_name`` is None.

        Raises:
            NotKept: there is no such part, or its values can't be read.
        """
        if self._take is None:
            return tensor
        try:
            return self._take(tensor)
        except IndexError as error:
            raise NotKept(f"{self.part_name} {error}") from None
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise NotKept(f"no {self.part_name} of {tensor.dtype}: {reason}") from None

    def admit(self, nbytes: int) -> None:
        """Count a payload that is about to be written.

        Raises:
            NotKept: there is no room for it, or there was none for an earlier one.
        """
        if self._full is None:
            self._full = self._why_full(nbytes)
        if self._full is not None:
            raise NotKept(self._full)
        self.written += nbytes

    def free(self, nbytes: int) -> None:
        """Count payloads that were dropped."""
        self.written -= nbytes

    def _why_full(self, nbytes: int) -> str | None:
        if self._budget is not None and self.written + nbytes > self._budget:
            return f"over the budget of {_size(self._budget)} (max_bytes)"
        self._unchecked += nbytes
        if self._unchecked < LOOK_AGAIN:
            return None
        self._unchecked = 0
        return self._shortage(nbytes)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
