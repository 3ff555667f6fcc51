"""The orders of a port's rows: what a weight holds in another order, all that follows holds too.

A port that rotates neighbouring channels permutes the rows of the query and key weights; one whose
key heads take turns permutes the query heads. What is computed from their outputs has that order
until it is undone: the order of a weight is a layout of the tensors behind it. No other order is
one, as heads in another order may be the bug itself. Without weights, the first output of a kind of
module shows the order of the channels of its heads, and the other layers have to have it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from llmdebug_nb.align import fit as moves
from llmdebug_nb.align.fit import Move

SAYS = "golden's rows in another order, as in the weight"


class Orders:
    """The orders that weights have, and those of their heads and of the channels of a head."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def learn(self, order: torch.Tensor) -> None:
        """Add an order: which of golden's rows each row of mine is, int64[rows]."""
        for each in (order, *in_heads(order)):
            back = each.argsort()
            self._found.setdefault(tuple(back.tolist()), back)

    def moves(self, shape: tuple[int, ...]) -> Iterator[Move]:
        """Yield what may put a tensor of mine into golden's order, along one axis or two."""
        for back in self._found.values():
            for axis, size in enumerate(shape):
                if size == len(back):
                    yield moves.taken(axis, back)
            for one, other in itertools.permutations(range(len(shape)), 2):
                if shape[one] * shape[other] == len(back) and 1 not in (shape[one], shape[other]):
                    yield partial(_taken_along, (one, other), back)


def in_heads(order: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the orders that an order of rows is made of, if it keeps the heads together.

    They are that of the channels of a head, that of the heads, and that of the rows if only the
    heads are in another order. Heads are the smallest blocks that keep their rows together.
    """
    for of_heads, of_channels in _blocks(order):
        size = len(of_channels)
        if not _is_sorted(of_channels):
            yield of_channels
        if not _is_sorted(of_heads):
            yield of_heads
            yield (of_heads[:, None] * size + torch.arange(size)).flatten()
        if not _is_sorted(of_channels):
            return  # smaller blocks would do for heads alone


def is_within_heads(order: torch.Tensor) -> bool:
    """Tell whether an order puts the channels of each head into one other order, no more."""
    of_heads, of_channels = next(_blocks(order), (order, order))
    return _is_sorted(of_heads) and not _is_sorted(of_channels)


def _blocks(order: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the orders of blocks and of the rows in each, for sizes that keep these together."""
    rows = len(order)
    for size in (n for n in range(2, rows // 2 + 1) if rows % n == 0):
        heads, channels = order.view(-1, size) // size, order.view(-1, size) % size
        if bool((heads == heads[:, :1]).all() and (channels == channels[:1]).all()):
            yield heads[:, 0], channels[0]


def _is_sorted(order: torch.Tensor) -> bool:
    return bool((order == torch.arange(len(order))).all())


def _taken_along(axes: tuple[int, int], index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with two axes, read as one, in another order."""
    last = x.movedim(axes, (-2, -1))
    return last.flatten(-2)[..., index].view(last.shape).movedim((-2, -1), axes)
