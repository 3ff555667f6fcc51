"""What a call was given: which of its inputs are bad, and which constants."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from llmdebug_nb.capture.calls import Leaf
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.errcheck.origins import BadTensors, Origin
from llmdebug_nb.core.kernels.overflow import reach

# Room that a value must leave below the largest number of its dtype: three doublings, as the sum
# of two squares of a complex number, or of eight terms of that size, takes.
ROOM = 8.0


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call that has ended.

    ``leaves``: all of them. ``origins``: of bad values among them. ``nan``: slots of tensors with
    NaN that no call has made, with the tensors. ``infinite``: the same of infinities. ``reaches``:
    of the finite floating-point tensors, each with its tensor.
    """

    leaves: list[Leaf]
    origins: tuple[Origin, ...]
    nan: list[tuple[str, torch.Tensor]]
    infinite: list[tuple[str, torch.Tensor]]
    reaches: list[tuple[float, torch.Tensor]]

    @classmethod
    def of(cls, leaves: Iterable[Leaf], written: Iterable[torch.Tensor], bad: BadTensors) -> Inputs:
        """Look at inputs. ``written``: by the call; what it has overwritten counts as before."""
        leaves = list(leaves)
        overwritten = {pytorch.storage_of(each) for each in written}
        inputs = cls(leaves, (), [], [], [])
        origins: dict[Origin, None] = {}
        for slot, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            known = bad.of(leaf)
            if overwritten and pytorch.storage_of(leaf) in overwritten:
                origins.update(dict.fromkeys(known))
                continue
            largest = reach(pytorch.plain(leaf))
            if largest is None:
                continue
            if math.isfinite(largest):
                inputs.reaches.append((largest, leaf))
            elif known:
                origins.update(dict.fromkeys(known))
            else:
                (inputs.nan if largest != largest else inputs.infinite).append((slot, leaf))
        return cls(leaves, tuple(origins), inputs.nan, inputs.infinite, inputs.reaches)

    @property
    def constants(self) -> list[float]:
        """The numbers among the arguments."""
        return [leaf for _, leaf in self.leaves if type(leaf) in (float, int)]  # type: ignore[misc]

    @property
    def infinite_constant(self) -> bool:
        return any(math.isinf(each) for each in self.constants)

    def near(self, dtype: torch.dtype) -> bool:
        """Whether the call was given numbers near the largest one of a dtype, as finfo.min is.

        ``dtype``: of its result, for the constants.
        """
        return any(is_near(largest, tensor.dtype) for largest, tensor in self.reaches) or any(
            is_near(abs(each), dtype) for each in self.constants
        )

    @property
    def all_nonzero(self) -> bool:
        """Whether there are floating-point inputs, and none is nothing but zeros."""
        return bool(self.reaches) and all(largest for largest, _ in self.reaches)


def limit(dtype: torch.dtype) -> float:
    """Return the largest number of a floating-point or complex dtype."""
    return float(torch.finfo(dtype.to_real() if dtype.is_complex else dtype).max)


def is_near(largest: float, dtype: torch.dtype) -> bool:
    return largest >= limit(dtype) / ROOM
