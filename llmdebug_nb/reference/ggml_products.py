"""Formulas of ggml's products and attention, with the second factor rounded as ggml does it.

Sources of the formulas: ``ggml_mul_mat``, ``ggml_mul_mat_id``, ``ggml_soft_max_ext`` and
``ggml_flash_attn_ext`` in ``ggml/src/ggml.c``, and what computes them in ``ggml-cpu``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.ggml_blocks import Rounding, roundings_of
from llmdebug_nb.reference.ggml_given import Given
from llmdebug_nb.replay.checks import UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay


def roundings(op: str, given: Given) -> tuple[Rounding, ...]:
    """Return the ways in which the second factor of a product may be rounded.

    Raises CannotReplay: none is known.
    """
    kind = given.types[1 if op == "FLASH_ATTN_EXT" else 0]
    found = roundings_of(kind)
    if not found:
        raise CannotReplay(f"how ggml rounds what it multiplies with {kind} is not known", UNKNOWN)
    return found


def mul_mat(given: Given, rounded: Rounding) -> torch.Tensor:
    """Return the products of the rows of both; the first is repeated along its last axes."""
    table, x = given.own(0), given.wide(rounded(given.own(1)))
    groups = [n // own for n, own in zip(x.shape[:2], table.shape[:2], strict=True)]
    parts = []
    for rows in _in_parts(table):
        part = given.wide(rows)
        for axis, count in enumerate(groups):
            part = part.repeat_interleave(count, axis)
        parts.append(x @ part.transpose(-1, -2))
    return torch.cat(parts, -1)


def mul_mat_id(given: Given, rounded: Rounding) -> torch.Tensor:
    """Return each token's products with the experts that are chosen for it."""
    experts, ids = given.own(0)[0], given.whole(2)[0, 0]
    x = given.wide(rounded(given.own(1)))[0]
    x = x.repeat(1, ids.shape[1] // max(x.shape[1], 1), 1)  # its rows are taken in turn
    made = torch.zeros(*ids.shape, experts.shape[1], dtype=torch.float64)
    for expert in sorted(set(ids.flatten().tolist())):
        if not 0 <= expert < len(experts):
            raise CannotReplay("it chooses experts that there are not")
        mine = ids == expert
        made[mine] = x[mine] @ given.wide(experts[expert]).T
    return made[None]


def _in_parts(table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a table by parts of its rows, which in float64 have a size that memory holds."""
    width = table.shape[-1] * table.shape[0] * table.shape[1]
    count = max(1, constants.REPLAY_ROWS // max(width, 1))
    for start in range(0, table.shape[-2], count):
        yield table[..., start : start + count, :]


# -- attention -------------------------------------------------------------------------------------


def soft_max(given: Given) -> torch.Tensor:
    """Return the softmax of scaled rows, with a mask and the bias of positions (ALiBi)."""
    x = given.x() * given.number("scale")
    if given.has(1):
        x = x + _mask(given, 1, x.shape)
    return _weights(x, given, 2)


def flash_attention(given: Given, rounded: Rounding) -> torch.Tensor:
    """Return the attention of queries, ``[batch, tokens, heads, channels]``."""
    q = given.wide(rounded(given.own(0)))
    groups = q.shape[1] // max(given.own(1).shape[1], 1)
    k, v = (given.x(slot).repeat_interleave(groups, 1) for slot in (1, 2))
    scores = q @ k.transpose(-1, -2) * given.number("scale")
    if cap := given.number("logit_softcap"):
        scores = cap * (scores / cap).tanh()
    if given.has(3):
        scores = scores + _mask(given, 3, scores.shape)
    return (_weights(scores, given, 4) @ v).transpose(1, 2)


def _mask(given: Given, slot: int, shape: torch.Size) -> torch.Tensor:
    """Return a mask for scores ``[batch, heads, tokens, keys]``, in the slope of each head."""
    mask = given.own(slot).double()[..., : shape[2], :]
    batch, heads = (n // own for n, own in zip(shape[:2], mask.shape[:2], strict=True))
    mask = mask.repeat(batch, heads, 1, 1)
    most = given.number("max_bias")
    if not most:
        return mask
    # slopes 2^(-most/n), 2^(-2 most/n) …; n is the largest power of 2 that there are heads for
    power = 1 << int(math.log2(shape[1]))
    slopes = [
        2.0 ** (-most / power * (head + 1))
        if head < power
        else 2.0 ** (-most / 2 / power * (2 * (head - power) + 1))
        for head in range(shape[1])
    ]
    hidden = mask == -torch.inf
    return (mask * torch.tensor(slopes).double()[:, None, None]).masked_fill(hidden, -torch.inf)


def _weights(x: torch.Tensor, given: Given, sinks: int) -> torch.Tensor:
    """Return the softmax; a sink takes a share of each row of its head, and gives nothing."""
    if not given.has(sinks):
        return x.softmax(-1)
    sink = given.x(sinks).flatten()[:, None, None].expand(*x.shape[:-1], 1)
    return torch.cat([x, sink], -1).softmax(-1)[..., :-1]
