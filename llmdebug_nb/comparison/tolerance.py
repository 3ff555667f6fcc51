"""How much difference is still noise. Limits are data.

This version scales a fixed limit with the coarser dtype of the two: what rounding alone piles up
over the depth of a transformer. It knows nothing of the model's own sensitivity yet, and says so
(`SAYS`): a calibrated limit will replace it.
"""

from __future__ import annotations

import math

import torch

from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.kernels.raw import DTYPES

SAYS = "Limits are scaled with the dtype (64 x eps in float32 and wider, 8 x eps below), not calibrated to this model"
_WIDE, _NARROW = 64, 8  # multiples of machine epsilon; half types round so coarsely that 8 are plenty
_ROW_SHARE = 4


def limit(dtype: str) -> float:
    """Return the largest relative L2 error that counts as noise in a dtype; 0 if it does not round."""
    kind = DTYPES.get(dtype)
    if kind is not None and kind.is_complex:
        kind = kind.to_real()
    if kind is None or not kind.is_floating_point:
        return 0.0
    eps = torch.finfo(kind).eps
    return eps * (_WIDE if eps < 1e-6 else _NARROW)


class Rounding:
    """The limit along a run: a float32 tensor in a bfloat16 model carries the rounding of what it was made from."""

    def __init__(self) -> None:
        self._coarsest = 0.0

    def limit(self, golden_dtype: str, my_dtype: str) -> float:
        """Return the limit for the next pair in execution order: that of the coarsest floating dtype so far."""
        own = max(limit(golden_dtype), limit(my_dtype))
        self._coarsest = max(self._coarsest, own)
        return self._coarsest if own else 0.0


def error_of(metrics: Metrics) -> float:
    """Return the one figure that is judged: relative L2, or inf where NaN or infinities differ.

    An error in a single row (one token, say) drowns in the norm of the whole, so a quarter of the worst row's
    error counts too: rounding spreads evenly, bugs need not. From statistics alone: ``stat_error``.
    """
    if metrics.get("nan_mismatch") or metrics.get("inf_mismatch"):
        return math.inf
    figures = [metrics.get("stat_error"), metrics.get("relative_euclidean_distance")]
    worst = metrics.get("worst_row_error")
    figures.append(None if worst is None else worst / _ROW_SHARE)
    return max((float(value) for value in figures if value is not None), default=0.0)


def verdict(error: float, allowed: float) -> str:
    """Return match (no difference), within_noise or diverged."""
    if error == 0.0:
        return "match"
    return "within_noise" if error <= allowed else "diverged"
