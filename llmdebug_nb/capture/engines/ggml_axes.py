"""Which axis of a ggml tensor holds the tokens.

ggml drops no axis of length 1, and a decode has one token, so shapes don't tell. It is followed
through the graph from the lookup of the tokens on. Axes count from the fastest, as in ggml.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_OF_SECOND = ("MUL_MAT", "MUL_MAT_ID")  # the first source is what is multiplied with
_RESHAPING = ("RESHAPE", "CONT")


class Shape(NamedTuple):
    """``ne``, ``nb``: elements and bytes, fastest axis first. ``tokens``: the axis, or None."""

    ne: tuple[int, ...]
    nb: tuple[int, ...]
    tokens: int | None = None


def tokens_of(
    op: str, ne: Sequence[int], nb: Sequence[int], params: Sequence[int],
    sources: Sequence[Shape | None],
) -> int | None:  # fmt: skip
    """Return the axis of the tokens of a node's result; None if it has none.

    ``params``: of the operation. ``sources``: in their order; None: no result of this graph.
    """
    if op in _OF_SECOND:
        sources = sources[1:2]
    source = next((each for each in sources if each and each.tokens is not None), None)
    if source is None or source.tokens is None:
        return None
    axis = source.tokens
    if op == "PERMUTE":
        return params[axis] if 0 <= params[axis] < len(ne) else None
    if op == "TRANSPOSE":
        return (1, 0, 2, 3)[axis]
    if op == "FLASH_ATTN_EXT":  # queries come with heads and tokens exchanged
        return 2 if axis == 1 else None
    if op == "VIEW":
        same = (source.ne[axis], source.nb[axis])
        return next((a for a, each in enumerate(zip(ne, nb, strict=True)) if each == same), None)
    if op in _RESHAPING and tuple(ne) != source.ne:
        before = math.prod(source.ne[:axis])
        return next(
            (a for a in range(len(ne)) if math.prod(ne[:a]) == before and ne[a] == source.ne[axis]),
            None,
        )
    return axis


def tokens_first(values: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return values with the axis of the tokens first, without axes that ggml only fills up.

    ``values``: as ggml has them, the slowest axis first. Without tokens: ``[1, ...]``.
    """
    ne = tuple(values.shape)[::-1]
    last = len(ne) - 1
    if axis is None:
        while last > 0 and ne[last] == 1:
            last -= 1
        return values.reshape(1, *ne[last::-1])
    rest = [a for a in range(last, -1, -1) if a != axis and not (a > max(1, axis) and ne[a] == 1)]
    return values.permute([last - a for a in (axis, *rest, *_dropped(ne, axis, rest))]).reshape(
        ne[axis], *(ne[a] for a in rest)
    )


def _dropped(ne: Sequence[int], axis: int, rest: Sequence[int]) -> list[int]:
    return [a for a in range(len(ne)) if a != axis and a not in rest]
