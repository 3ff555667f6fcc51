"""The values that an operator computes on the way to its result.

One program calls ``softmax`` where another writes it in five lines. To tell which of the five is
wrong, golden's operator is replayed by the formula that torch itself has for it, and each step's
result is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import hidden
from llmdebug_nb.core.torch_internals import decompositions
from llmdebug_nb.explain import arguments
from llmdebug_nb.explain.replay import FAILURES, Replayed, quiet
from llmdebug_nb.explain.runs import CannotReplay


class _Steps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators by their formulas and keeps every tensor that they compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[torch.Tensor] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        formula = decompositions().get(func)
        if formula is not None:
            with self:
                result = formula(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if result is not NotImplemented:
            self.values += [tensor for _, tensor in arguments.results(result)]
            return result
        return func(*args, **(kwargs or {}))


def steps(call: Replayed) -> list[torch.Tensor]:
    """Return what a recorded operator computes on its own tensors: each step, and its result.

    Empty if it can't be replayed.
    """
    try:
        load = arguments.loader(call.side, call.records)
        args, kwargs = arguments.filled(call.arguments, load)
        kept = _Steps()
        with quiet(), kept:
            call.function(*args, **kwargs)
    except (CannotReplay, *FAILURES):
        return []
    return [x for x in kept.values if x.is_floating_point() and x.numel() > 1]


class Values:
    """Tensors that others are compared with: up to the order of their axes, but for masked entries.

    The error of a tensor is relative to its spread, so that constants answer to nothing.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_size: dict[int, list[tuple[float, torch.Tensor]]] = {}
        for tensor in tensors:
            shown = _shown(tensor)
            known = self._by_size.setdefault(shown.numel(), [])
            norm = float(shown.norm())
            # a formula passes most tensors on from step to step
            if not any(
                norm == other and torch.equal(shown, x)
                for other, x in known
                if shown.shape == x.shape
            ):
                known.append((norm, shown))

    def have(self, tensor: torch.Tensor, limit: float) -> bool:
        """Tell whether one of the tensors holds the same values, within a relative L2 error."""
        candidates = self._by_size.get(tensor.numel())
        if not candidates:
            return False
        shown = _shown(tensor)
        norm, spread = float(shown.norm()), float((shown - shown.mean()).norm())
        return any(
            abs(other - norm) <= limit * norm
            and any(float((g - m).norm()) <= limit * spread for g, m in _layouts(known, shown))
            for other, known in candidates
        )


def _shown(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.float64)
    places = hidden(x)
    return x if places is None else x.masked_fill(places, 0.0)


def _layouts(
    golden: torch.Tensor, mine: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield golden.flatten(), mine.flatten()
    golden, mine = golden.squeeze(), mine.squeeze()
    if sorted(golden.shape) != sorted(mine.shape) or golden.dim() > constants.PERMUTED_AXES:
        return
    for order in itertools.permutations(range(golden.dim())):
        turned = golden.permute(order)
        if turned.shape == mine.shape:
            yield turned, mine
