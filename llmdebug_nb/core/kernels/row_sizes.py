"""The sizes of a tensor's rows, by torch; the tape has them from C (`summary.c`)."""

from __future__ import annotations

import numpy as np
import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.row_sizes import count

_SIZE = np.dtype("<f4")


def of(tensor: torch.Tensor) -> bytes | None:
    """Return the sizes of the rows of a tensor on the CPU; None if they are not kept."""
    rows = count(tensor.shape) if tensor.is_floating_point() else 0
    if not rows:
        return None
    sizes, flat = np.empty((rows, 2), _SIZE), tensor.detach().reshape(rows, -1)
    step = max(1, constants.CHUNK // flat.shape[1])
    for start in range(0, rows, step):
        wide = flat[start : start + step].double()
        norms, largest = torch.linalg.vector_norm(wide, dim=1), wide.abs().amax(dim=1)
        with np.errstate(over="ignore"):
            sizes[start : start + step] = torch.stack([norms, largest], dim=1).numpy()
    sizes[np.isnan(sizes)] = np.nan  # one of its many bit patterns
    return sizes.tobytes()


def read(sizes: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return norms and largest magnitudes in float64."""
    norms, largest = np.frombuffer(sizes, _SIZE).reshape(-1, 2).T.astype(np.float64)
    return norms, largest
