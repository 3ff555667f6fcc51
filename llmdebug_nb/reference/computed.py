"""A recorded call that can be computed again: on its own inputs, in float64 or in its own dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llmdebug_nb.core.errors import first_line
from llmdebug_nb.replay.arguments import widened
from llmdebug_nb.replay.execution import quiet
from llmdebug_nb.replay.operators import CannotReplay

Tensors = dict[str, torch.Tensor]  # by slot
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Where:
    """Where a reference is computed, and in which floating dtype; None: in the call's own."""

    device: str = "cpu"
    dtype: torch.dtype | None = torch.float64

    @property
    def wide(self) -> bool:
        return self.dtype == torch.float64


class Computed:
    """A call and its reference, in float64 unless `Where` says otherwise.

    ``recorded``: its outputs as recorded. ``length``: the longest axis of its tensors, over which
    it may sum. ``rounds_to``: the coarsest dtype that it may round to on the way, None: that of its
    output. ``operands``: its inputs. ``is_one``: one operator computes it, not several.
    """

    is_one = False
    rounds_to: torch.dtype | None = None
    recorded: Tensors
    length: int
    _inputs: Tensors

    @property
    def operands(self) -> list[torch.Tensor]:
        return list(self._inputs.values())

    def exact(self, change: Change | None = None) -> Tensors:
        """Return the outputs of the reference, on inputs that ``change`` changes.

        Raises CannotReplay.
        """
        raise NotImplementedError

    def again(self, device: str = "cpu") -> Tensors:
        """Return the outputs in the call's own dtype, computed here. Raises CannotReplay."""
        raise NotImplementedError


class Rounded(Computed):
    """A call whose recorded floating tensors are rounded to one dtype first, inputs and outputs."""

    def __init__(self, call: Computed, dtype: torch.dtype) -> None:
        self._call, self._dtype = call, dtype
        self.recorded = self._rounded(call.recorded)
        self.length, self.rounds_to = call.length, call.rounds_to

    def _rounded(self, tensors: Tensors) -> Tensors:
        return {s: x.to(self._dtype) if x.is_floating_point() else x for s, x in tensors.items()}

    @property
    def operands(self) -> list[torch.Tensor]:
        named = {str(at): x for at, x in enumerate(self._call.operands)}
        return list(self._rounded(named).values())

    def exact(self, change: Change | None = None) -> Tensors:
        def rounded(x: torch.Tensor) -> torch.Tensor:
            x = x.to(self._dtype).double()
            return x if change is None else change(x)

        return self._call.exact(rounded)

    def again(self, device: str = "cpu") -> Tensors:
        return self._rounded(self._call.again(device))


@contextlib.contextmanager
def formula() -> Iterator[None]:
    """Compute a formula, quietly. Raises CannotReplay: it fails on what was recorded."""
    try:
        with quiet():
            yield
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise CannotReplay(f"its formula fails: {first_line(error)}") from None


def longest(*tensors: torch.Tensor) -> int:
    """Return the longest axis of several tensors, at least 1."""
    return max((size for tensor in tensors for size in tensor.shape), default=1) or 1


def changed(
    load: Callable[[str], torch.Tensor], change: Change | None
) -> Callable[[str], torch.Tensor]:
    """Return a function that loads a tensor and changes it, if it is floating-point or complex."""
    if change is None:
        return load

    def load_changed(slot: str) -> torch.Tensor:
        tensor = load(slot)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return change(widened(tensor, torch.float64))

    return load_changed
