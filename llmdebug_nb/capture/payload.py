"""What is kept of each tensor besides its figures: which part of it, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmdebug_nb.core.kernels import partial
from llmdebug_nb.core.options import DumpOptions

LOOK_AGAIN = 1 << 26  # bytes written between two looks at the disk


class NotKept(Exception):
    """A payload is left out; the text says why."""


class Policy:
    """Decides over payloads. Once there is no room for one there is none for any: what is kept is a beginning of the run.

    ``kept``: what a payload is of its tensor, as the dump says it (``slice[0,:]``, ``minmax``, ``quantile[101]``);
    None: all of it. ``written``: bytes of payload so far.
    """

    def __init__(self, options: DumpOptions, shortage: Callable[[int], str | None]) -> None:
        """``shortage(n)``: why the disk should not take n more bytes, or None."""
        self.wanted = not options.stats_only
        self.kept: str | None = None
        self._take: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._shortage = shortage
        self._budget = options.max_bytes
        self.written = self._unseen = 0
        self._over: str | None = None
        if options.slice is not None:
            index = partial.parse_index(options.slice)
            self.kept, self._take = (
                f"slice[{options.slice}]",
                lambda tensor: partial.cut(tensor, index),
            )
        elif options.reduce == "minmax":
            self.kept, self._take = "minmax", partial.minmax
        elif options.reduce is not None:
            count = int(options.reduce.partition(":")[2])
            self.kept, self._take = (
                f"quantile[{count}]",
                lambda tensor: partial.quantiles(tensor, count),
            )

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is to be kept of a tensor: itself where ``kept`` is None.

        Raises:
            NotKept: there is no such part, or its values can't be read.
        """
        if self._take is None:
            return tensor
        try:
            return self._take(tensor)
        except IndexError as error:
            raise NotKept(f"{self.kept} {error}") from None
        except (RuntimeError, NotImplementedError) as error:
            raise NotKept(
                f"no {self.kept} of {tensor.dtype}: {str(error).partition(chr(10))[0]}"
            ) from None

    def admit(self, nbytes: int) -> None:
        """Count a payload that is about to be written.

        Raises:
            NotKept: there is no room for it, or there was none for an earlier one.
        """
        if self._over is None:
            self._over = self._why_not(nbytes)
        if self._over is not None:
            raise NotKept(self._over)
        self.written += nbytes

    def _why_not(self, nbytes: int) -> str | None:
        if self._budget is not None and self.written + nbytes > self._budget:
            return f"over the budget of {_size(self._budget)} (max_bytes)"
        self._unseen += nbytes
        if self._unseen < LOOK_AGAIN:
            return None
        self._unseen = 0
        return self._shortage(nbytes)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
