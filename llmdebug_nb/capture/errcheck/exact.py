"""What an operator gives of other numbers: does the dtype fail, or is it the mathematics?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.operators.modes import Args, Kwargs
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.kernels.overflow import reach
from llmdebug_nb.core.nested import mapped

Bad: TypeAlias = Callable[[torch.Tensor], object]  # tells whether a tensor may hold bad values

_LARGEST = 1 << 26  # elements of one input: its copy in float64 takes half a gigabyte


def writes(op: str) -> bool:
    """Return whether a dispatcher operator (``Aten.add_.Tensor``) writes to its inputs."""
    return op.split(".")[1].endswith("_") or op.endswith(".out")


def reach_in_float64(op: str, args: Args, kwargs: Kwargs) -> float | None:
    """Return the largest magnitude of the operator's results, computed in float64 on its inputs.

    None if that is impossible: it has overwritten them, draws random numbers, or knows no float64.
    """
    operator = torch_modes.overload(op.removeprefix("Aten.")) if op.startswith("Aten.") else None
    if operator is None or writes(op) or torch_modes.draws(operator, args, kwargs):
        return None
    try:
        with torch.no_grad():
            result = operator(*mapped(args, _wide), **mapped(kwargs, _wide))
        reaches = [reach(leaf) for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError):
        return None
    known = [each for each in reaches if each is not None]
    return next((each for each in known if each != each), max(known, default=None))


def uses_infinity(
    op: str, args: Args, kwargs: Kwargs, outputs: Sequence[torch.Tensor], bad: Bad
) -> bool:
    """Tell whether an operator's finite result would be another one without its infinite inputs.

    It runs with the largest finite number in place of each infinity of ``bad`` tensors: a softmax
    gives the same, 1 / x does not. Only floating-point results count: who asks whether a number is
    finite knows that it may not be. False if the operator can't run again.
    """
    operator = torch_modes.overload(op.removeprefix("Aten.")) if op.startswith("Aten.") else None
    if operator is None or writes(op) or torch_modes.draws(operator, args, kwargs):
        return False

    def finite(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and bad(value):
            return value.detach().nan_to_num(nan=torch.nan)
        return value

    try:
        with torch.no_grad():
            result = operator(*mapped(args, finite), **mapped(kwargs, finite))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError):
        return False
    others = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    pairs = [(a, b) for a, b in zip(outputs, others, strict=False) if a.is_floating_point()]
    return any(not torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def _wide(value: object) -> object:
    """Return a tensor in float64, and that for every floating dtype."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        if value.numel() > _LARGEST:
            raise MemoryError
        return value.detach().to(torch.float64)
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value
