"""How ggml rounds what it multiplies with a weight, on a CPU.

Before a product it brings its second factor to the type that goes with the first one's
(``vec_dot_type`` in ``ggml-cpu.c``). The integers of a block are x / scale, rounded; the scale is
such that the largest magnitude becomes 127. The arithmetic is float32, as a value near the middle
of two integers goes to one or the other by the last bit. It differs between kernels: so there are
several ways, each right.

Sources: ``quantize_row_q8_0_ref``, ``quantize_row_q8_1_ref`` and ``quantize_row_q8_K_ref`` in
``ggml-quants.c``; ``quantize_row_q8_0`` in ``ggml-cpu/arch/x86/quants.c`` and
``ggml-cpu/arch/arm/quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]

_BLOCK, _SUPER_BLOCK = 32, 256
_MOST = 127.0  # the largest int8 of which the negative exists too: a block's largest value gets it
_OF_8_0 = {"q8_0", "q4_0", "q5_0", "iq4_nl", "mxfp4", "nvfp4", "q1_0", "q2_0"}
_OF_8_1 = {"q4_1", "q5_1"}
_WITH_OFFSETS = {*_OF_8_1, "q2_K", "q4_K", "q5_K"}
_OF_8_K = {
    "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
    "iq1_s", "iq1_m", "iq4_xs", "tq1_0", "tq2_0",
}  # fmt: skip


def roundings_of(kind: str) -> tuple[Rounding, ...]:
    """Return the ways in which the factor of a weight of a type may be rounded; () if unknown.

    Each takes float32 ``[..., n]`` and gives float64.
    """
    if kind == "f32":
        return (_not,)
    if kind == "f16":  # a processor without products of float16 multiplies in float32
        return (_to(torch.float16), _not)
    if kind == "bf16":
        return (_to(torch.bfloat16), _not)
    if kind in _OF_8_0 | _OF_8_1:
        return (_blocks_by_quotient, _blocks_by_inverse, _blocks_half_up)
    return (_super_blocks,) if kind in _OF_8_K else ()


def is_of_blocks(kind: str) -> bool:
    """Tell whether the factor of a weight of a type is rounded to blocks of integers."""
    return kind in _OF_8_0 | _OF_8_1 | _OF_8_K


def sums_in_half(kind: str) -> bool:
    """Tell whether the sum of a block is rounded to float16 on the way, for the offsets."""
    return kind in _OF_8_1


def has_offsets(kind: str) -> bool:
    """Tell whether a weight is scale * code - offset: two sums, each larger than what is left."""
    return kind in _WITH_OFFSETS


def _not(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def _to(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).double()


def _blocks_by_quotient(x: torch.Tensor) -> torch.Tensor:
    """Multiply by 127 / largest, and round to the nearest, as AVX does."""
    return _blocks(x, lambda largest, _: _MOST / largest, torch.round)


def _blocks_by_inverse(x: torch.Tensor) -> torch.Tensor:
    """Multiply by 1 / scale, and round to the nearest, as NEON does."""
    return _blocks(x, lambda _, scale: 1.0 / scale, torch.round)


def _blocks_half_up(x: torch.Tensor) -> torch.Tensor:
    """Multiply by 1 / scale, and round halves away from 0, as the reference does."""
    return _blocks(x, lambda _, scale: 1.0 / scale, lambda x: (x.abs() + 0.5).floor() * x.sign())


def _blocks(
    x: torch.Tensor,
    factor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    to_whole: Rounding,
) -> torch.Tensor:
    """Round to blocks of Q8_0: the scale is kept in float16."""
    blocks = x.float().reshape(*x.shape[:-1], -1, _BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / _MOST
    by = torch.where(largest > 0, factor(largest, scale), 0.0)
    made: torch.Tensor = to_whole(blocks * by).double() * scale.half().double()
    return made.flatten(-2)


def _super_blocks(x: torch.Tensor) -> torch.Tensor:
    """Round to blocks of Q8_K: the scale is kept in float32; the largest magnitude becomes -127."""
    blocks = x.float().reshape(*x.shape[:-1], -1, _SUPER_BLOCK)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    by = torch.where(largest != 0, -_MOST / largest, 0.0)
    whole = torch.round(blocks * by).clamp_max(_MOST)
    scale = torch.where(by != 0, 1.0 / by, 0.0)
    return (whole.double() * scale.double()).flatten(-2)
