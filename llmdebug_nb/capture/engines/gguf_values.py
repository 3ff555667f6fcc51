"""Values of tensors in GGUF files, and which originals their quantisation explains.

A block holds codes and a scale. With all its codes at their least and at their most, gguf's own
dequantisation gives the ends of its range; between them lie equal steps. Rounding to the nearest
moves a value by half a step at most. At the ends it is clipped, and may move further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmdebug_nb.capture.engines.gguf_file import Bytes, Stored, package
from llmdebug_nb.core import constants

_PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Codes:
    """Where a block has its codes. ``low``, ``high``: bytes of the least and the most of them.

    ``scales``: steps of the scales of parts of the block, which have a common scale; 0: no parts.
    """

    start: int
    stop: int
    levels: int
    low: int = 0x00
    high: int = 0xFF
    scales: int = 0


# the blocks of ggml-common.h; levels are equally far apart in all of these
_CODES = {
    "Q8_0": _Codes(2, 34, 256, 0x80, 0x7F), "Q4_0": _Codes(2, 18, 16), "Q4_1": _Codes(4, 20, 16),
    "Q5_0": _Codes(2, 22, 32), "Q5_1": _Codes(4, 24, 32), "Q2_K": _Codes(16, 80, 4, scales=15),
    "Q3_K": _Codes(0, 96, 8, scales=31), "Q4_K": _Codes(16, 144, 16, scales=63),
    "Q5_K": _Codes(16, 176, 32, scales=63), "Q6_K": _Codes(0, 192, 64, scales=127),
}  # fmt: skip
DTYPES = {kind: str(dtype).removeprefix("torch.") for kind, dtype in _PLAIN.items()}


def value(stored: Stored) -> torch.Tensor | None:
    """Return the values, as float32 where they are quantised; None if gguf can't dequantise it."""
    if stored.kind in _PLAIN:
        return torch.from_numpy(stored.raw.copy()).view(_PLAIN[stored.kind]).reshape(stored.shape)
    return _dequantised(stored, stored.raw)


def span(stored: Stored, weighted: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the least and the most that each original may have been; None if that is unknown.

    ``weighted``: scales were chosen by the importance of columns (imatrix). Then unimportant values
    are clipped anywhere, and codes are not always the nearest to what the last scale gives.
    """
    found = value(stored)
    if found is None:
        return None
    if stored.kind in _PLAIN:
        return _rounded(found)
    codes = _CODES.get(stored.kind)
    if codes is None:
        return None
    ends = [_filled(stored, codes, byte) for byte in (codes.low, codes.high)]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    step = (high - low) / (codes.levels - 1)
    most = torch.maximum(low.abs(), high.abs())
    common, parts = step, 1
    if codes.scales:
        parts = codes.scales
        common = _of_blocks(torch.maximum(high - low, most), stored.block[0]) / parts
    # below float16's least normal number, its scale is rounded to a multiple of 2**-24
    lost = torch.where(common < codes.levels * 2.0**-14, codes.levels * parts * 2.0**-25, 0.0)
    half = (
        step * (1.0 if weighted else 0.5)
        + constants.GGUF_SCALE_ROUNDING * (most + high - low)
        + lost
    )
    clipped = half + constants.GGUF_CLIPPED_STEPS * step + (common / 2 if codes.scales else 0.0)
    if weighted:
        clipped = torch.full_like(clipped, torch.inf)
    near = step / 4
    return (
        found - torch.where(found <= low + near, clipped, half),
        found + torch.where(found >= high - near, clipped, half),
    )


def _rounded(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the neighbours of values that were rounded to the nearest, or cut off."""
    wide = found.double()
    info = torch.finfo(found.dtype)
    ulp = torch.clamp(wide.abs(), min=info.tiny) * info.eps
    return wide - ulp, wide + ulp


def _of_blocks(wide: torch.Tensor, size: int) -> torch.Tensor:
    """Return the most of each block, for each of its elements."""
    return wide.reshape(-1, size).amax(1, keepdim=True).expand(-1, size).reshape(wide.shape)


def _filled(stored: Stored, codes: _Codes, byte: int) -> torch.Tensor:
    """Return the values that the blocks would have with this byte in place of all codes."""
    raw = stored.raw.reshape(-1, stored.block[1]).copy()
    raw[:, codes.start : codes.stop] = byte
    found = _dequantised(stored, raw)
    assert found is not None  # its kind is one of ours
    return found


def _dequantised(stored: Stored, raw: Bytes) -> torch.Tensor | None:
    gguf = package(stored.name)
    kind = gguf.GGMLQuantizationType[stored.kind]
    rows = raw.reshape(-1, stored.shape[-1] // stored.block[0] * stored.block[1])
    with np.errstate(all="ignore"):  # scales may be infinite
        try:
            found = gguf.quants.dequantize(np.ascontiguousarray(rows), kind)
        except NotImplementedError:
            return None
    return torch.from_numpy(np.ascontiguousarray(found, np.float32)).reshape(stored.shape)
