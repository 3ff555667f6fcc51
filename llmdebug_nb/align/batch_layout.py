"""Find which rows and tokens of golden's batch lie where in mine's batch.

The runs may differ in batch size, in the side of the padding, or in the use of a cache. The answer
comes from the recorded token ids of both models: for each row of golden, the rows of mine are
searched for the longest span of equal tokens. If the two batches are alike, there is no map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from llmdebug_nb.align.fit import Fit, Move, span_text, viewed
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.kernels.raw import array_of
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Record

Load = Callable[[Record], torch.Tensor]
Shape = tuple[int, ...]
Axes = tuple[int, ...]
_TOKEN_DTYPES = ("int64", "int32")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A span of tokens that both batches have: its row and first index on both sides."""

    row: int
    start: int
    my_row: int
    my_start: int
    length: int


@dataclass(frozen=True, slots=True)
class BatchMap:
    """The place of golden's tokens in mine's batch.

    ``golden``, ``mine``: shapes [batch, tokens] of the token ids. ``spans``: the tokens that both
    batches have. ``earlier``: of a later step, the map of the tokens that caches hold from before.
    """

    golden: tuple[int, int]
    mine: tuple[int, int]
    spans: tuple[TokenSpan, ...]
    earlier: BatchMap | None = None

    def fits(self, golden: Shape, mine: Shape) -> Iterable[Fit]:
        """Yield ways to bring tensors of these shapes to the same rows and tokens, likeliest first.

        Axes of other lengths stay as they are.
        """
        shapes, begun = [golden, mine], Fit("", shared=True)
        for side, ids in enumerate((self.golden, self.mine)):
            own = shapes[side]
            if len(own) + 1 == len(shapes[1 - side]) and ids == (1, *own[:1]):
                shapes[side] = (1, *own)
                move: tuple[Move, ...] = (viewed(shapes[side]),)
                begun = Fit("", () if side else move, move if side else (), shared=True)
        if golden and mine:
            for fit in (self._with_earlier(*shapes) or self)._fits(shapes[0], shapes[1]):
                yield begun.then(fit)

    def _fits(self, golden: Shape, mine: Shape) -> Iterable[Fit]:
        lengths = golden[0], mine[0]
        batched = lengths == (self.golden[0], self.mine[0])
        flat = lengths == (self.golden[0] * self.golden[1], self.mine[0] * self.mine[1])
        if flat and not batched and len(golden) == len(mine) < 3:
            yield self._fit(True, ((1,), (1,)), self.golden, self.mine)
            return
        if not batched and lengths != (1, 1):
            return
        other_rows = self.golden[0] != self.mine[0] or any(r.row != r.my_row for r in self.spans)
        for axes in self._axes(golden, mine):
            if any(axes) or (batched and other_rows):
                yield self._fit(batched, axes)

    def later(self) -> BatchMap:
        """Return the map of a later step that feeds one token a row, the same on both sides."""
        spans = tuple(TokenSpan(r.row, 0, r.my_row, 0, 1) for r in self.spans)
        return BatchMap((self.golden[0], 1), (self.mine[0], 1), spans, self)

    def _with_earlier(self, golden: Shape, mine: Shape) -> BatchMap | None:
        """Return the map of all tokens so far, if an axis of other length on each side has these.

        Masks and caches have one. Both sides were fed as many tokens since.
        """
        known = self.earlier
        if known is None or golden == mine or len(golden) != len(mine):
            return None
        begun = known.golden[1], known.mine[1]
        fed = [a - begun[0] for a, b in zip(golden, mine, strict=True) if a != b]
        since = [b - begun[1] for a, b in zip(golden, mine, strict=True) if a != b]
        if fed != since or len(set(fed)) != 1 or fed[0] < 1:
            return None
        spans = []
        for r in known.spans:
            if (r.start + r.length, r.my_start + r.length) == begun:  # no padding follows
                spans.append(replace(r, length=r.length + fed[0]))
            else:
                spans += [r, TokenSpan(r.row, begun[0], r.my_row, begun[1], fed[0])]
        sizes = [(ids[0], ids[1] + fed[0]) for ids in (known.golden, known.mine)]
        return BatchMap(sizes[0], sizes[1], tuple(spans))

    def continued(self, steps: int) -> BatchMap:
        """Return the map of all tokens so far, as caches hold them so many steps later."""
        spans = tuple(replace(span, length=span.length + steps) for span in self.spans)
        golden, mine = ((rows, tokens + steps) for rows, tokens in (self.golden, self.mine))
        return BatchMap(golden, mine, spans)

    def has_all(self, side: int, shape: Shape, places: torch.Tensor) -> bool:
        """Tell whether elements of a tensor are those of all tokens that both batches have.

        ``side``: whose tensor, 0 for golden's; ``shape``: its axes, in any order. ``places``: flat
        indices of the elements, int64[n].
        """
        rows, tokens = (self.golden, self.mine)[side]
        index = torch.unravel_index(places, shape)
        parts = [
            axis
            for axis, size in enumerate(shape)
            if int(index[axis].bincount().count_nonzero()) < size
        ]
        batch = next((axis for axis in parts if shape[axis] == rows), None)
        if batch is None and rows in shape:
            batch = shape.index(rows)
        along = [axis for axis in parts if axis != batch]
        if any(shape[axis] != tokens for axis in along):
            return False
        given = torch.zeros(tuple(shape), dtype=torch.bool)
        for span in self.spans:
            row, start = (span.my_row, span.my_start) if side else (span.row, span.start)
            at: list[int | slice] = [slice(None)] * len(shape)
            for axis in along:
                at[axis] = slice(start, start + span.length)
            if batch is not None:
                at[batch] = row
            given[tuple(at)] = True
        count = int(given.sum())
        return count == len(places) and bool(given.flatten()[places].all())

    def turned(self) -> BatchMap:
        """Return the map of mine's batch to golden's."""
        spans = (TokenSpan(r.my_row, r.my_start, r.row, r.start, r.length) for r in self.spans)
        return BatchMap(self.mine, self.golden, tuple(sorted(spans, key=lambda r: r.start)))

    def _axes(self, golden: Shape, mine: Shape) -> Iterable[tuple[Axes, Axes]]:
        """Yield the axes of golden and of mine that may be the token axes."""
        tokens = self.golden[1], self.mine[1]
        pairs = zip(golden, mine, strict=False)
        found = tuple(a for a, sizes in enumerate(pairs) if a and sizes == tokens)
        if tokens[0] != tokens[1]:
            if not found:  # each program has its own order of axes
                own, other = (
                    [a for a in range(1, len(shape)) if shape[a] == n]
                    for shape, n in zip((golden, mine), tokens, strict=True)
                )
                yield from (((a,), (b,)) for a in own for b in other)
            yield found, found
            return
        if all((r.start, r.my_start, r.length) == (0, 0, tokens[0]) for r in self.spans):
            yield (), ()  # every token is at its place
            return
        scores = ((2, 3), (2,)) if len(golden) == 4 else ((), ())  # of attention: query and key
        for axes in (*scores, (1,), ()):
            if all(a in found for a in axes):
                yield axes, axes

    def _fit(
        self,
        batched: bool,
        axes: tuple[Axes, Axes],
        golden: tuple[int, int] | None = None,
        mine: tuple[int, int] | None = None,
    ) -> Fit:
        """Return the fit that cuts the spans out of both sides.

        ``axes``: the token axes of golden and of mine. ``golden``, ``mine``: [batch, tokens], the
        shapes that a flat first axis is split into.
        """
        spans = self.spans if batched else self.spans[:1]
        lengths = [r.length for r in spans]
        own, other = [(r.row, r.start) for r in spans], [(r.my_row, r.my_start) for r in spans]
        return Fit(
            self._says(batched, any(axes)),
            (partial(_picked, batched, axes[0], own, lengths, golden),),
            (partial(_picked, batched, axes[1], other, lengths, mine),),
            shared=True,
        )

    def _says(self, batched: bool, tokens: bool) -> str:
        """Describe the fit for the report."""
        parts = []
        if batched and self.golden[0] != self.mine[0]:
            for name, size, rows in (
                ("golden", self.golden[0], {r.row for r in self.spans}),
                ("mine", self.mine[0], {r.my_row for r in self.spans}),
            ):
                if size > len(rows):
                    word = "row" if len(rows) == 1 else "rows"
                    numbers = ", ".join(map(str, sorted(rows)))
                    parts.append(f"{word} {numbers} of {size} of {name}'s batch")
        if tokens and any(
            (r.start, r.my_start, r.length, r.length) != (0, 0, self.golden[1], self.mine[1])
            for r in self.spans
        ):
            r = self.spans[0]
            ours, theirs = span_text(r.my_start, r.length), span_text(r.start, r.length)
            more = "" if len(self.spans) == 1 else ", and so on for each row"
            parts.append(f"tokens {theirs} of golden against {ours} of mine{more}")
        return "; ".join(parts) or "the rows in another order"


def _picked(
    batched: bool,
    axes: Axes,
    picks: list[tuple[int, int]],
    lengths: list[int],
    unflat: tuple[int, int] | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return each pick: its row, and its tokens from the first one on.

    ``axes``: the token axes.
    """
    x = x if unflat is None else x.reshape(*unflat, *x.shape[1:])
    pieces = []
    for (row, start), length in zip(picks, lengths, strict=True):
        piece = x[row if batched else 0]
        for axis in axes:
            piece = piece.narrow(axis - 1, start, length)
        pieces.append(piece)
    if len(axes) == 1 and len(pieces) > 1:
        return torch.cat(pieces, dim=axes[0] - 1)
    if len({piece.shape for piece in pieces}) > 1:
        return torch.cat([piece.reshape(-1) for piece in pieces])
    return torch.stack(pieces)


Masks = tuple["np.ndarray | None", "np.ndarray | None"]


def batch_map(
    golden: np.ndarray,
    mine: np.ndarray,
    masks: Masks = (None, None),
    rows: dict[int, int] | None = None,
) -> BatchMap | None:
    """Map golden's token ids [batch, tokens] to mine's; None if alike, or if mine lacks a row.

    ``masks``: of the same shapes, 0 for padding. ``rows``: golden's row -> mine's, if known.
    """
    alike = golden.shape == mine.shape and np.array_equal(golden, mine) and _same_mask(*masks)
    if alike and all(row == other for row, other in (rows or {}).items()):
        return None
    if rows is None and len(golden) == 1 < len(mine) and golden.shape[1] > mine.shape[1]:
        turned = batch_map(mine, golden, masks[::-1])  # golden's requests are one row
        return None if turned is None else turned.turned()
    flat = len(mine) == 1 < len(golden) and mine.shape[1] > golden.shape[1]  # mine's are
    if flat:
        masks = masks[0], np.ones(mine.shape, bool) if masks[1] is None else masks[1].copy()
    spans: list[TokenSpan] = []
    free = list(range(len(mine)))
    for row, ids in enumerate(golden):
        candidates = [
            (*_longest(ids, mine[other], _row(masks[0], row), _row(masks[1], other)), other)
            for other in free
            if rows is None or rows.get(row) == other
        ]
        if not candidates:
            continue
        length, start, my_start, other = max(candidates, key=lambda c: (c[0], -c[3]))
        if length:
            spans.append(TokenSpan(row, start, other, my_start, length))
            if flat and masks[1] is not None:
                masks[1][other, my_start : my_start + length] = 0
            else:
                free.remove(other)
    if len(spans) < (min(len(golden), len(mine)) if rows is None else len(rows)):
        return None  # a row that only one side has: another input, not another layout
    sizes = (golden.shape[0], golden.shape[1]), (mine.shape[0], mine.shape[1])
    in_place = all((r.row, r.start, r.length) == (r.my_row, r.my_start, sizes[0][1]) for r in spans)
    return None if in_place and sizes[0] == sizes[1] else BatchMap(*sizes, tuple(spans))


def _row(mask: np.ndarray | None, row: int) -> np.ndarray | None:
    return None if mask is None else mask[row]


def _same_mask(golden: np.ndarray | None, mine: np.ndarray | None) -> bool:
    return golden is None or mine is None or np.array_equal(golden, mine)


def _longest(
    golden: np.ndarray, mine: np.ndarray, mask: np.ndarray | None, my_mask: np.ndarray | None
) -> tuple[int, int, int]:
    """Return length and both starts of the longest span of equal tokens, the last of equals.

    The length is 0 if no span is long enough. Where the rows overlap, only padding may surround
    the span: another token is another input, not another layout.
    """
    masks = [
        np.ones(len(ids), bool) if m is None else m != 0
        for ids, m in ((golden, mask), (mine, my_mask))
    ]
    best = (0, 0, 0)
    for shift in range(-len(golden) + 1, len(mine)):
        start, my_start = max(0, -shift), max(0, shift)
        n = min(len(golden) - start, len(mine) - my_start)
        here, there = slice(start, start + n), slice(my_start, my_start + n)
        real = np.flatnonzero(masks[0][here] & masks[1][there])
        if real.size == 0 or real[-1] - real[0] + 1 != real.size:
            continue
        if np.any(golden[here][real] != mine[there][real]):
            continue
        best = max(best, (int(real.size), start + int(real[0]), my_start + int(real[0])))
    return (
        best
        if best[0] >= max(1, constants.MATCHED_SHARE * min(int(m.sum()) for m in masks))
        else (0, 0, 0)
    )


class BatchMaps:
    """The batch maps of two runs, one a step, computed on demand."""

    def __init__(
        self, sides: tuple[list[Record], list[Record]], load: tuple[Load, Load] | None
    ) -> None:
        self._load = load
        # by generation and step
        self._inputs: list[dict[tuple[int, int], list[Record]]] = [{}, {}]
        for inputs, records in zip(self._inputs, sides, strict=True):
            for r in filter(may_be_tokens, records):
                inputs.setdefault((r.site.generation, r.site.step), []).append(r)
        self._maps: dict[tuple[int, int], BatchMap | None] = {}

    def of(self, generation: int, step: int) -> BatchMap | None:
        """Return the map of a step; None if both batches are alike or no map can be found."""
        key = generation, step
        if key not in self._maps:
            self._maps[key] = self._find(key)
        return self._maps[key]

    def rows(self, generation: int, step: int) -> int:
        """Return how many rows the batches of both runs have, if they are alike, else 0."""
        if self.of(generation, step) is not None:
            return 0
        inputs = (side.get((generation, step), []) for side in self._inputs)
        shapes = {None if ids is None else ids.summary.shape for ids in map(token_ids, inputs)}
        shape = shapes.pop()
        return 0 if shapes or shape is None or len(shape) < 2 else shape[0]

    def are_unknown(self, generation: int, step: int) -> bool:
        """Tell whether batches have other shapes, and no values tell which rows are whose."""
        inputs = (side.get((generation, step), []) for side in self._inputs)
        modules = ([r for r in records if not is_operator(r.site.path)] for records in inputs)
        golden, mine = map(token_ids, modules)
        if golden is None or mine is None or golden.summary.numel == mine.summary.numel:
            return False
        return golden.payload is None or mine.payload is None

    def _find(self, key: tuple[int, int]) -> BatchMap | None:
        inputs = [side.get(key, []) for side in self._inputs]
        if self._load is None or not all(inputs):
            return None
        ids = [self._read(token_ids(records), side) for side, records in enumerate(inputs)]
        golden, mine = ids
        if golden is None or mine is None:
            return None
        masks = [
            self._read(mask_of(records, like.shape), side)
            for side, (records, like) in enumerate(zip(inputs, (golden, mine), strict=True))
        ]
        first = self.of(key[0], 0) if key[1] else None
        rows = None if first is None else {r.row: r.my_row for r in first.spans}
        return batch_map(golden, mine, (masks[0], masks[1]), rows)

    def _read(self, record: Record | None, side: int) -> np.ndarray | None:
        if self._load is None or record is None or record.payload is None:
            return None
        if record.kept is not None:
            return None
        try:
            return np.atleast_2d(array_of(self._load[side](record)))
        except (TensorLookupError, TypeError):  # a dump may call anything a mask
            return None


def may_be_tokens(record: Record) -> bool:
    """Tell whether a record is an integer input ``[batch, tokens]`` or ``[tokens]``."""
    site, summary = record.site, record.summary
    given = site.role == "input" and site.phase == "forward"
    return given and len(summary.shape) in (1, 2) and summary.dtype in _TOKEN_DTYPES


def token_ids(inputs: Iterable[Record]) -> Record | None:
    """Return the first integer input that is neither positions nor a mask."""
    names = ("position", "mask")
    return next((r for r in inputs if not any(n in r.site.slot for n in names)), None)


def mask_of(inputs: Iterable[Record], shape: Shape) -> Record | None:
    """Return the mask of token ids of this shape."""
    masks = (r for r in inputs if "attention_mask" in r.site.slot)
    return next((r for r in masks if r.summary.shape[-2:] in (shape, shape[1:])), None)
