"""Which rows of a tensor that diverged differ: its tokens, where their axis is known.

A row differs if its own error is beyond the limit of the tensor; a token, or another index of an
axis, if any of its rows does. Numbers count from 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from llmdebug_nb.align.fit import Fit, Move
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import rows
from llmdebug_nb.comparison.rows import RowErrors
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants, spans
from llmdebug_nb.core.kernels.row_sizes import read
from llmdebug_nb.core.records import Summary
from llmdebug_nb.core.spans import Span

# their figure is one of the tensor, not of its rows
_OF_WHOLE = (Rule.TOO_EVEN, Rule.CHANNEL_OFF, Rule.CLIPPED, Rule.OTHER_SHAPE)


class Batch(Protocol):
    """The batch of a step: its rows, how many tokens each is fed, and how many it has then."""

    @property
    def rows(self) -> int: ...
    @property
    def fed(self) -> int: ...
    @property
    def total(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """The tokens, or other rows, of a tensor that differ, of ``total``.

    ``noun``: ``token`` or ``row``. ``spans``: their numbers; None if it is unknown which these are.
    ``share``: the part of those compared that differ; None if none is known to by itself.
    ``axis``: "" or which axis they lie along. ``batch``: "" or which rows of a batch these tokens
    are of. ``at_least``: their sizes tell, or a part of each, so that others may differ, too.
    ``at_most``: the spans are of blocks, of which some differ.
    """

    noun: str
    total: int
    spans: tuple[Span, ...] | None = None
    share: float | None = None
    axis: str = ""
    batch: str = ""
    at_most: bool = False
    at_least: bool = False

    @property
    def numbers(self) -> str:
        """``12-39``."""
        if not self.spans:
            return "unknown" if self.spans is None else "none alone"
        if self._are_all:
            return "all"
        more = ", …" if self.at_least else ""
        return f"{'in ' if self.at_most else ''}{spans.text(self.spans)}{more}"

    @property
    def where(self) -> str:
        """``tokens 12-39 of 40``."""
        if self.spans is None:
            return f"unknown {self.noun}s"
        if not self.spans:
            return f"no {self.noun} by itself"
        if self._are_all:
            return f"all {self.total:,} {self.noun}s{self.axis}{self.batch}"
        noun = self.noun if self._count == 1 else f"{self.noun}s"
        some = "some of " if self.at_most else "at least " if self.at_least else ""
        numbers = f"{some}{noun} {spans.text(self.spans)} of {self.total:,}"
        return f"{numbers}{self.axis}{self.batch}"

    @property
    def says(self) -> str:
        """``tokens 12-39 of 40 differ``."""
        if self.spans is None:
            return f"which {self.noun}s differ is not known"
        if not self.spans:
            return f"no {self.noun} by itself is beyond the limit"
        return f"{self.where} {'differs' if self._count == 1 else 'differ'}"

    @property
    def _count(self) -> int:
        return sum(last - first + 1 for first, last in self.spans or ())

    @property
    def _are_all(self) -> bool:
        return self._count == self.total and not self.at_most


class _Axis(NamedTuple):
    """An axis of rows. ``numbers``: what its indices are called, of ``total``; ``says``: which."""

    at: int
    noun: str
    numbers: np.ndarray
    total: int
    says: str = ""


def of(
    pair: Pair,
    rule: Rule,
    limit: float | None,
    metrics: Mapping[str, object],
    errors: RowErrors | None,
    batch: Batch | None,
) -> DifferingRows | None:
    """Return which rows of a pair that diverged differ; None if it has but one.

    ``errors``: of its rows, None if its values were not read. ``batch``: that of its step.
    """
    golden, mine = pair.golden, pair.mine
    if golden is None or mine is None or rule in _OF_WHOLE:
        return None
    by_size = errors is None and "whole_stat_error" in metrics
    if by_size:
        errors = _by_size(golden.summary, mine.summary)
    elif golden.kept and errors is not None and errors.axes != golden.summary.shape[:-1]:
        errors = None  # they are those of a few rows
    axes = golden.summary.shape[:-1] if errors is None else errors.axes
    if math.prod(axes) < 2:
        return None
    if batch is None or golden.site.role in ("weight", "grad"):
        tokens = None  # their rows are channels
    else:
        tokens = _tokens(golden.summary.shape, pair.fit, axes, batch)
    if errors is not None and limit is not None and rule is not Rule.USER_LIMIT:
        found = _found(errors, limit, tokens or _telling(errors, limit))
        if tokens is not None and batch is not None:
            found = replace(found, batch=_batch_rows(errors, limit, tokens, batch))
        is_part = by_size or golden.kept is not None
        if found.spans or not is_part:
            return replace(found, at_least=is_part)
    if tokens is None:
        return DifferingRows("row", math.prod(axes))
    return DifferingRows(tokens.noun, tokens.total)


def _by_size(golden: Summary, mine: Summary) -> RowErrors | None:
    """Return what the kept sizes of rows tell of their errors; None without them."""
    if golden.row_sizes is None or mine.row_sizes is None:
        return None
    sizes = read(golden.row_sizes), read(mine.row_sizes)
    return rows.errors_by_size(*sizes, golden.shape[:-1])


def _found(errors: RowErrors, limit: float, axis: _Axis) -> DifferingRows:
    """Return which indices of an axis differ."""
    differs, block = errors.along(axis.at) > limit, errors.block(axis.at)
    at = np.flatnonzero(differs)
    if block == 1:
        found = spans.of(sorted(axis.numbers[at].tolist()))
    else:
        last = axis.total - 1
        blocks = spans.of(at.tolist())
        found = [(a * block, min(b * block + block - 1, last)) for a, b in blocks]
    share = float(differs.mean()) if len(at) else None
    return DifferingRows(axis.noun, axis.total, tuple(found), share, axis.says, at_most=block > 1)


def _telling(errors: RowErrors, limit: float) -> _Axis:
    """Return the axis of which the smallest part differs."""
    long = [axis for axis, size in enumerate(errors.axes) if size > 1]
    at = min(long, key=lambda axis: float((errors.along(axis) > limit).mean()))
    size, says = errors.axes[at], f" along axis {at}" if len(long) > 1 else ""
    return _Axis(at, "row", np.arange(size), size, says)


def _tokens(
    shape: tuple[int, ...], fit: Fit | None, axes: tuple[int, ...], batch: Batch
) -> _Axis | None:
    """Return the axis of tokens among those of rows; None if it is not known.

    ``shape``: golden's. ``axes``: those of the rows that were compared.
    """
    if fit is not None and fit.golden:
        own = _axis_of(shape[:-1], batch)
        own = _axis_of(shape, batch) if own is None else own
        found = None if own is None else _moved(_Moves(fit.key, fit.golden), shape, own, axes)
        return None if found is None or own is None else _Axis(*found, shape[own])
    at = _axis_of(axes, batch)
    if at is not None:
        return _Axis(at, "token", np.arange(axes[at]), axes[at])
    flat = batch.rows * batch.fed
    if batch.rows > 1 and batch.fed > 1 and axes[0] == flat <= constants.TOLD_ROWS:
        return _Axis(0, "token", np.arange(axes[0]) % batch.fed, batch.fed)
    return None


def _axis_of(sizes: Sequence[int], batch: Batch) -> int | None:
    """Return the axis that has the tokens of a step, or all so far; None for none or several."""
    for tokens in (batch.fed, batch.total):
        found = [axis for axis, size in enumerate(sizes) if size == tokens > 1]
        if len(found) == 2 and found[0] == 0 and sizes[0] == batch.rows:
            found = found[1:]
        if found:
            return found[0] if len(found) == 1 else None
    return None


@dataclass(frozen=True, slots=True)
class _Moves:
    """Golden's part of a fit, known by its key: the layers of a model have equal ones."""

    key: Hashable
    each: tuple[Move, ...] = field(compare=False)


@functools.lru_cache(maxsize=64)
def _moved(
    moves: _Moves, shape: tuple[int, ...], tokens: int, axes: tuple[int, ...]
) -> tuple[int, str, np.ndarray] | None:
    """Return the axis that has golden's tokens behind its part of a fit, and their numbers."""
    if not 0 < math.prod(shape) <= constants.RELATED_ELEMENTS:
        return None
    view = [-1 if axis == tokens else 1 for axis in range(len(shape))]
    x = torch.arange(shape[tokens]).view(view).expand(shape)
    try:
        for move in moves.each:
            x = move(x)
    except (RuntimeError, IndexError):
        return None
    if x.is_floating_point() or tuple(x.shape[:-1]) != axes or not x.numel():
        return None
    for axis in (axis for axis, size in enumerate(axes) if 1 < size <= constants.TOLD_ROWS):
        lines = x.movedim(axis, 0).flatten(1)
        if bool((lines == lines[:, :1]).all()):
            return axis, "token", lines[:, 0].numpy()
    return None


def _batch_rows(errors: RowErrors, limit: float, axis: _Axis, batch: Batch) -> str:
    """Return which rows of the batch have tokens that differ; "" if all have, or none shows."""
    if batch.rows < 2 or errors.block(axis.at) > 1:
        return ""
    if axis.at != 0 and errors.axes[0] == batch.rows:
        at = np.flatnonzero(errors.along(0) > limit)
    elif axis.at == 0 and errors.axes[0] == batch.rows * axis.total:
        at = np.unique(np.flatnonzero(errors.along(0) > limit) // axis.total)
    else:
        return ""
    if len(at) in (0, batch.rows):
        return ""
    noun = "row" if len(at) == 1 else "rows"
    return f" in {noun} {spans.text_of(at.tolist())} of the batch's {batch.rows}"
