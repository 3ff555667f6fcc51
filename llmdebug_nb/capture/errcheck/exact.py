"""The result of a dispatcher operator in float64: does the dtype fail, or is it the mathematics?"""

from __future__ import annotations

import torch

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.operators.modes import Args, Kwargs
from llmdebug_nb.capture.walk import leaves
from llmdebug_nb.core.kernels.overflow import reach
from llmdebug_nb.core.nested import mapped

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
