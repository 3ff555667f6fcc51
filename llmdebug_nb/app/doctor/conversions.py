"""What was done to a weight on its way into another file, told by its values.

A form is one way to change a tensor. Each is tried until one gives what the file holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llmdebug_nb.core import constants

_SAMPLE = 256  # elements that tell in most cases that a form does not fit
_AXIS = 64  # elements of each row that rows are matched by


@dataclass(frozen=True, slots=True)
class Held:
    """What a file holds of a weight. ``low``, ``high``: what its quantisation explains."""

    value: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    weighted: bool = False

    def beyond(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return which elements of an original can't have become what is held."""
        return ~((self.low <= wanted) & (wanted <= self.high))  # NaN is beyond

    def fits(self, wanted: torch.Tensor) -> bool:
        """Tell whether an original explains all that is held."""
        if wanted.shape != self.value.shape:
            return False
        if not self.weighted and wanted.numel() > 4 * _SAMPLE:
            at = torch.linspace(0, wanted.numel() - 1, _SAMPLE).long()
            some = wanted.reshape(-1)[at]
            low, high = (each.reshape(-1)[at] for each in (self.low, self.high))
            if not bool(((low <= some) & (some <= high)).all()):
                return False
        allowed = int(constants.GGUF_WEIGHTED_SHARE * wanted.numel()) if self.weighted else 0
        return int(self.beyond(wanted).sum()) <= allowed


def paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows whose halves of each head are interleaved, as llama.cpp's `llama` wants them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo `paired`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def divides(heads: int, rows: torch.Tensor) -> bool:
    """Tell whether heads of an even number of rows make up a tensor."""
    return heads > 0 and len(rows) % (2 * heads) == 0


def orders(plain: torch.Tensor, heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rows of q or k in the orders that conversions give them."""
    yield "its rows are in the order of the checkpoint", plain
    if divides(heads, plain):
        once = paired(plain, heads)
        yield "its rows are reordered into pairs for rotary embedding", once
        yield "its rows are reordered twice", paired(once, heads)
        yield "its rows are reordered the other way round", halved(plain, heads)
    for other in range(1, len(plain) // 2 + 1):
        if other != heads and divides(other, plain):
            yield f"its rows are reordered for {other} heads, not {heads}", paired(plain, other)


def changes(plain: torch.Tensor, held: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor changed in the ways that any weight may be; only shapes that fit."""
    shape = held.value.shape
    if plain.ndim > 1:
        turned = plain.transpose(-1, -2)
        yield "transposed", turned
        if plain.shape != shape and plain.numel() == held.value.numel():
            yield "read in another shape, not transposed", plain.reshape(shape)
        if turned.shape == shape:
            yield "its shape is swapped, its data is not", turned.reshape(-1).reshape(shape)
            yield "its data is transposed, its shape is not", turned.contiguous().view(shape)
    if plain.shape != shape:
        return
    for step in (1, -1, 2):
        yield f"{abs(step)} is {'added to' if step > 0 else 'taken from'} it", plain + step
    yield "all zeros", torch.zeros_like(plain)
    yield "all ones", torch.ones_like(plain)
    yield "its sign is turned", -plain
    if factor := _factor(plain, held.value):
        yield f"multiplied by {factor:.4g}", plain * factor
    yield "its rows are in reverse order", plain.flip(0)
    for axis, what in ((0, "rows"), (1, "columns")):
        if axis < plain.ndim and (order := _order(plain, held.value, axis)) is not None:
            yield _moved(order, what), plain.index_select(axis, order)


def _factor(plain: torch.Tensor, value: torch.Tensor) -> float:
    """Return the factor that explains most of the values; 0 if there is none."""
    g, v = plain.double().flatten(), value.double().flatten()
    size = float(g @ g)
    found = float(g @ v) / size if size else 0.0
    if not math.isfinite(found):
        return 0.0
    near = round(found * 64) / 64  # 1 / sqrt(head size) and its like are seldom others
    return near if near and abs(near - found) < 1e-2 * abs(found) else found


def _order(plain: torch.Tensor, value: torch.Tensor, axis: int) -> torch.Tensor | None:
    """Return where each row (or column) that is held was; None if it is no order of them."""
    g, v = (each.movedim(axis, 0).reshape(each.shape[axis], -1).float() for each in (plain, value))
    if not 1 < len(g) <= constants.ROWS_MATCHED or len(g) != len(v):
        return None
    if not (bool(torch.isfinite(g).all()) and bool(torch.isfinite(v).all())):
        return None
    at = torch.linspace(0, g.shape[1] - 1, min(_AXIS, g.shape[1])).long()
    order = torch.cdist(v[:, at], g[:, at]).argmin(1)
    return order if len(set(order.tolist())) == len(g) else None


def _moved(order: torch.Tensor, what: str) -> str:
    """Return in words how rows moved."""
    count = len(order)
    shift = int(order[0])
    if torch.equal(order, (torch.arange(count) + shift) % count):
        return f"its {what} are shifted by {shift:,} of {count:,}"
    moved = int((order != torch.arange(count)).sum())
    for size in (size for size in range(count // 2, 1, -1) if count % size == 0):
        blocks = order.reshape(-1, size)
        if bool((blocks - blocks[:, :1] == torch.arange(size)).all()) and bool(
            (blocks[:, 0] % size == 0).all()
        ):
            places = ", ".join(str(int(each) // size) for each in blocks[:8, 0])
            more = " …" if len(blocks) > 8 else ""
            return f"its blocks of {size:,} {what} (heads?) are in another order: {places}{more}"
    return f"{moved:,} of its {count:,} {what} are in another order"


def cause(
    held: Held,
    plain: torch.Tensor,
    ordered: Iterator[tuple[str, torch.Tensor]],
    others: Callable[[], Iterator[tuple[str, torch.Tensor]]],
) -> str:
    """Return in words what was done to a weight; "" if that is unknown.

    ``ordered``: the rows in other orders. ``others``: what else the file may hold here.
    """
    for forms in (ordered, changes(plain, held), others()):
        for words, form in forms:
            if held.fits(form):
                return words
    return ""


def amount(held: Held, wanted: torch.Tensor) -> str:
    """Return in words how far a weight is from what it should be."""
    value, golden = held.value.double(), wanted.double()
    bad = int((~torch.isfinite(value) & torch.isfinite(golden)).sum())
    if bad:
        return f"{bad:,} of {value.numel():,} elements are not finite"
    beyond = held.beyond(wanted)
    size = float(golden.norm())
    apart = float((value - golden).norm()) / size if size else float("inf")
    return (
        f"{int(beyond.sum()):,} of {value.numel():,} elements differ by more than its type"
        f" explains{_rows(beyond)}, relative L2 {apart:.3g}"
    )


def _rows(beyond: torch.Tensor) -> str:
    """Return in which rows they are, if these are few."""
    if beyond.ndim < 2:
        return ""
    rows = beyond.flatten(1).any(1).nonzero().flatten()
    if len(rows) > beyond.shape[0] // 2 or not len(rows):
        return ""
    first, last = int(rows[0]), int(rows[-1])
    return f", in row {first:,}" if first == last else f", in rows {first:,} to {last:,}"
