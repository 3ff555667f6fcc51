"""Aligning two sequences of calls: what is the same call in both, though others were inserted, removed or replaced.

It is a weighted longest common subsequence: of all ways to go through both sequences in order, the one whose calls
are the most alike. Equal sequences cost one pass, and so does what is equal at both ends of others; what is left
takes time with the product of its lengths, and memory with their sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.records import Summary

_CELLS = 1 << 20  # of a table that is kept whole
# how alike two calls are; only their order and rough proportion matter
_SAME_OP, _SAME_SHAPE, _OTHER_SHAPE, _SAME_NAME, _SAME_OUTPUT, _SAME_BYTES, _DIGIT = (
    15,
    25,
    5,
    15,
    5,
    75,
    10,
)
_CERTAIN = 10_000  # more than any number of calls that have only their operators in common
_ANCHOR = 1_000 * _CERTAIN
TELLING = 2.0  # digits of agreement that two unrelated tensors don't have by chance
REPLACED = 3.0  # the same, between calls of different operators
_MOST = 6.0
_FINE = 2.0**-23  # machine epsilon of float32


@dataclass(frozen=True, slots=True)
class Token:
    """A call, as it is recognised.

    ``op``: what is called. ``shape``: of what goes in and out. ``name``: in the module that holds it, "" if that says
    nothing. ``value``: of what comes out. ``anchor``: calls that are paired already have the same number, all others 0.
    ``telling``: the shape alone tells what it is, whatever the op (parameters).
    """

    op: str
    shape: Hashable = ()
    name: str = ""
    value: Summary | None = None
    anchor: int = 0
    telling: bool = False

    @property
    def label(self) -> Hashable:
        return self.anchor, self.op, self.shape

    @property
    def print(self) -> str | None:
        return self.value.fingerprint if self.value else None


@dataclass(frozen=True, slots=True)
class Leeway:
    """How far runs as a whole may be apart.

    ``loose``: shapes may differ (another batch, say), so a different one is not another call. ``sure``: digits of agreement that tell a tensor from others.
    """

    loose: bool = False
    sure: float = REPLACED

    @classmethod
    def of(cls, *sides: Sequence[str]) -> Leeway:
        """Return that of two runs with tensors of these dtypes: three quarters of the digits that the coarser one computes with."""
        return cls(sure=min(REPLACED, -0.75 * math.log10(max(map(_eps, sides)))))


def _eps(dtypes: Sequence[str]) -> float:
    """Return the machine epsilon of a run: as coarse as a quarter of its tensors."""
    import torch

    kinds = [DTYPES[name] for name in dtypes if name in DTYPES]
    found = sorted(
        (torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), reverse=True
    )
    return found[len(found) // 4] if found else _FINE


def align(
    golden: Sequence[Token],
    mine: Sequence[Token],
    leeway: Leeway = Leeway(),
    apart: Collection[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Return the places of the calls that answer to each other, rising on both sides.

    ``apart``: places that do not answer to each other.
    """
    same = (
        not apart
        and len(golden) == len(mine)
        and all(g.label == m.label for g, m in zip(golden, mine, strict=True))
    )
    if same and not _moved(golden, mine, leeway.sure):
        return [(i, i) for i in range(len(golden))]
    start, end = 0, 0
    shorter = min(len(golden), len(mine))
    while start < shorter and _equal(golden[start], mine[start]):
        start += 1
    while end < shorter - start and _equal(golden[-1 - end], mine[-1 - end]):
        end += 1
    table = _Table(golden[start : len(golden) - end], mine[start : len(mine) - end], leeway)
    table.apart = [(i - start, j - start) for i, j in apart]
    middle = [(start + i, start + j) for i, j in table.path(0, table.n, 0, table.m)]
    tail = [(len(golden) - k, len(mine) - k) for k in range(end, 0, -1)]
    return [(i, i) for i in range(start)] + middle + tail


def agreement(golden: Summary, mine: Summary) -> float:
    """Return to how many decimal digits the statistics of two tensors agree, 0 to 6; 0 where they can't tell."""
    return float(_digits(_figures([golden]), _figures([mine]))[0, 0])


def _equal(golden: Token, mine: Token) -> bool:
    return golden.label == mine.label and golden.print is not None and golden.print == mine.print


def _moved(golden: Sequence[Token], mine: Sequence[Token], sure: float) -> bool:
    """Tell whether values that differ place by place are there at other places: the same bytes, or but for rounding."""
    apart = [(g.value, m.value) for g, m in zip(golden, mine, strict=True) if g.print != m.print]
    if {g.fingerprint for g, _ in apart if g} & {m.fingerprint for _, m in apart if m} - {None}:
        return True
    if not apart or len(apart) ** 2 > _CELLS:
        return False
    digits = _digits(_figures([g for g, _ in apart]), _figures([m for _, m in apart]))
    far = np.diagonal(digits) < min(TELLING, sure)
    return bool((digits[far][:, far] >= sure).any())


def _figures(values: Sequence[Summary | None]) -> np.ndarray:
    """Return [n, 5]: elements, min, max, mean and l2norm; NaN where there are none, or none that tell anything."""
    rows = [
        (s.numel, s.min, s.max, s.mean, s.l2norm)
        if s is not None and s.min is not None and s.min != s.max and s.numel > 3
        else (math.nan,) * 5
        for s in values
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _digits(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return [n, m]: digits to which the statistics agree."""
    with np.errstate(all="ignore"):
        count, low, high, _, norm = golden.T
        reach = np.maximum(np.abs(low), np.abs(high))
        apart = np.where(count[:, None] == mine[None, :, 0], 0.0, np.nan)
        for column, scale in ((1, reach), (2, reach), (3, norm / np.sqrt(count)), (4, norm)):
            gap = np.abs(golden[:, None, column] - mine[None, :, column]) / scale[:, None]
            apart = np.maximum(apart, gap)  # NaN stays
        return np.asarray(np.nan_to_num(np.clip(-np.log10(apart + 1e-12), 0.0, _MOST), nan=0.0))


@dataclass(frozen=True, slots=True)
class _Side:
    """The calls of one sequence as numbers, equal where they are; 0 where there is nothing to compare."""

    op: np.ndarray
    shape: np.ndarray
    name: np.ndarray
    print: np.ndarray
    output: np.ndarray
    anchor: np.ndarray
    telling: np.ndarray
    figures: np.ndarray  # [n, 5]

    @classmethod
    def of(cls, tokens: Sequence[Token], codes: dict[Hashable, int]) -> _Side:
        def coded(what: str, values: Iterable[Hashable]) -> np.ndarray:
            return np.array(
                [codes.setdefault((what, v), len(codes) + 1) if v else 0 for v in values],
                dtype=np.int64,
            )

        figures = _figures([t.value for t in tokens])
        known = figures[:, 0] > 3  # a constant's bytes say nothing
        return cls(
            coded("op", (t.op for t in tokens)),
            coded("shape", (t.shape for t in tokens)),
            coded("name", (t.name for t in tokens)),
            coded("print", (t.print for t in tokens)) * known,
            coded("output", (t.value and t.value.shape for t in tokens)),
            np.array([t.anchor for t in tokens], dtype=np.int64),
            np.array([t.telling for t in tokens], dtype=bool),
            figures,
        )

    def rows(self, where: slice) -> _Side:
        """Return a part, to be held against all of another: [n, 1]."""
        return _Side(*(getattr(self, name)[where, None] for name in self.__slots__))

    def columns(self, where: slice) -> _Side:
        """Return a part, to be held against all of another: [1, m]."""
        return _Side(*(getattr(self, name)[None, where] for name in self.__slots__))


class _Table:
    """How alike the calls of two sequences are, and the best way through."""

    def __init__(self, golden: Sequence[Token], mine: Sequence[Token], leeway: Leeway) -> None:
        self.n, self.m, self._leeway = len(golden), len(mine), leeway
        self.apart: list[tuple[int, int]] = []
        codes: dict[Hashable, int] = {}
        self._golden, self._mine = _Side.of(golden, codes), _Side.of(mine, codes)

    def _scores(self, rows: slice, columns: slice) -> np.ndarray:
        """Return int64[rows, columns]; 0 where two calls have nothing in common."""
        g, m = self._golden.rows(rows), self._mine.columns(columns)
        op, shape = g.op == m.op, g.shape == m.shape
        same_bytes = (g.print == m.print) & (g.print > 0)
        digits = _digits(self._golden.figures[rows], self._mine.figures[columns])
        # where rounding is coarse, which pair agrees to more digits than that is chance
        certain = same_bytes | ((digits >= REPLACED) & (self._leeway.sure >= REPLACED))
        elements = g.figures[..., 0] == m.figures[..., 0]
        digits = np.minimum(
            digits * (REPLACED / self._leeway.sure), REPLACED
        )  # as if coarser dtypes had as many as others
        score = (
            op * np.where(shape, _SAME_OP + _SAME_SHAPE, _SAME_OP + _OTHER_SHAPE)
            + (~op & shape) * _SAME_SHAPE
            + ((g.name == m.name) & (g.name > 0)) * _SAME_NAME
            + (g.output == m.output) * _SAME_OUTPUT
            + certain * _CERTAIN
            + np.where(same_bytes, _SAME_BYTES, np.where(digits >= TELLING, digits * _DIGIT, 0.0))
        )
        by_op = op & (shape | elements | self._leeway.loose)
        allowed = by_op | (shape & g.telling & m.telling) | (digits >= REPLACED) | same_bytes
        allowed &= g.telling == m.telling  # what has parameters is nothing that has none
        anchored = (g.anchor > 0) | (m.anchor > 0)
        score = np.where(anchored, (g.anchor == m.anchor) * _ANCHOR, np.where(allowed, score, 0.0))
        for i, j in self.apart:
            if rows.start <= i < rows.stop and columns.start <= j < columns.stop:
                score[i - rows.start, j - columns.start] = 0.0
        return score.astype(np.int64)

    def path(self, top: int, bottom: int, left: int, right: int) -> list[tuple[int, int]]:
        """Return the best way through a part of the table."""
        if top == bottom or left == right:
            return []
        if (bottom - top) * (right - left) <= _CELLS or bottom - top == 1:
            return self._walk(top, bottom, left, right)
        middle = (top + bottom) // 2
        down = self._sweep(range(top, middle), left, right, 1)
        up = self._sweep(range(bottom - 1, middle - 1, -1), left, right, -1)
        split = left + int(np.argmax(down + up[::-1]))
        return self.path(top, middle, left, split) + self.path(middle, bottom, split, right)

    def _sweep(self, rows: range, left: int, right: int, sense: int) -> np.ndarray:
        """Return the worth of the best way through these rows and the first 0, 1, 2 ... columns (the last ones if ``sense`` is -1)."""
        best = np.zeros(right - left + 1, dtype=np.int64)
        for row in rows:
            best = _next(best, self._scores(slice(row, row + 1), slice(left, right))[0][::sense])
        return best

    def _walk(self, top: int, bottom: int, left: int, right: int) -> list[tuple[int, int]]:
        scores = self._scores(slice(top, bottom), slice(left, right))
        best = [np.zeros(right - left + 1, dtype=np.int64)]
        for row in scores:
            best.append(_next(best[-1], row))
        i, j, found = bottom - top, right - left, []
        while i and j:
            worth = scores[i - 1, j - 1]
            if worth > 0 and best[i][j] == best[i - 1][j - 1] + worth:
                i, j = i - 1, j - 1
                found.append((top + i, left + j))
            elif best[i][j] == best[i - 1][j]:
                i -= 1
            else:
                j -= 1
        return found[::-1]


def _next(best: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the next row of a table: a call is paired with the one of this row, or left out."""
    row = best.copy()
    np.maximum(row[1:], best[:-1] + scores, out=row[1:])
    return np.maximum.accumulate(row)
