"""Align two sequences of calls, even if calls were inserted, removed or replaced in one of them.

This is a weighted longest common subsequence: of all ways to go through both sequences in order,
take the one whose paired calls are the most alike. Equal beginnings and ends cost one pass. For
the rest, the time grows with the product of the two lengths, and the memory with their sum.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import SINGLE, epsilon, is_floating
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.quick import quick
from llmdebug_nb.core.records import Summary


@quick
@dataclass(frozen=True, slots=True)
class CallFeatures:
    """The features by which a call is recognised.

    ``op``: the operator, or class of the module. ``shape``: the shapes of inputs and outputs.
    ``name``: the module's name in its parent, "" if it is only a number. ``value``: the statistics
    of the output. ``anchor``: the number of a pair that is already known, the same on both sides,
    else 0. ``shape_identifies``: the shape (of parameters) is enough to recognise the call,
    whatever its op.
    """

    op: str
    shape: Hashable = ()
    name: str = ""
    value: Summary | None = None
    anchor: int = 0
    shape_identifies: bool = False

    @property
    def fingerprint(self) -> str | None:
        return self.value.fingerprint if self.value else None


_label = operator.attrgetter("anchor", "op", "shape")
_shapeless = operator.attrgetter("anchor", "op")


@dataclass(frozen=True, slots=True)
class MatchTolerance:
    """How far apart calls that match may be.

    ``any_shape``: shapes may differ (another batch, say), so they can't tell calls apart.
    ``sure_digits``: decimal digits of agreement that identify a tensor. ``close``: the largest
    relative L2 error between two tensors that hold the same values.
    """

    any_shape: bool = False
    sure_digits: float = field(default_factory=lambda: constants.REPLACED_DIGITS)
    close: float = field(default_factory=lambda: constants.SAME_VALUES)

    @classmethod
    def of(cls, *sides: Sequence[str], stated: float = 0.0) -> MatchTolerance:
        """Return the tolerance for runs with tensors of these dtypes; the coarser run decides.

        ``stated``: the coarsest epsilon that a run states of its values, see `Run.rounding`.
        """
        coarsest = max(stated, *map(_run_epsilon, sides))
        digits = -constants.MANTISSA_SHARE * math.log10(coarsest)
        close = max(constants.SAME_VALUES, constants.SAME_VALUES_EPSILONS * coarsest)
        return cls(sure_digits=min(constants.REPLACED_DIGITS, digits), close=close)


def _run_epsilon(dtypes: Sequence[str]) -> float:
    """Return the machine epsilon of a run: a quarter of its tensors are at least as coarse."""
    floating = {name: n for name, n in Counter(dtypes).items() if is_floating(name)}
    left = sum(floating.values()) // 4
    for name in sorted(floating, key=epsilon, reverse=True):
        left -= floating[name]
        if left < 0:
            return epsilon(name)
    return SINGLE


def align(
    golden: Sequence[CallFeatures],
    mine: Sequence[CallFeatures],
    tolerance: MatchTolerance | None = None,
    forbidden: Collection[tuple[int, int]] = (),
    parallel: bool | None = None,
) -> list[tuple[int, int]]:
    """Return the indices of the calls that match, rising on both sides.

    ``forbidden``: index pairs that must not match. ``parallel``: what `is_parallel` says, if known.
    """
    tolerance = tolerance or MatchTolerance()
    if parallel is None and not forbidden:
        parallel = is_parallel(golden, mine, tolerance)
    if parallel and not forbidden:
        return [(i, i) for i in range(len(golden))]
    start, end = 0, 0
    shorter = min(len(golden), len(mine))
    while start < shorter and _equal(golden[start], mine[start]):
        start += 1
    while end < shorter - start and _equal(golden[-1 - end], mine[-1 - end]):
        end += 1
    table = _Table(golden[start : len(golden) - end], mine[start : len(mine) - end], tolerance)
    table.forbidden = [(i - start, j - start) for i, j in forbidden]
    middle = [(start + i, start + j) for i, j in table.path(0, table.n, 0, table.m)]
    tail = [(len(golden) - k, len(mine) - k) for k in range(end, 0, -1)]
    return [(i, i) for i in range(start)] + middle + tail


def agreement(golden: Summary, mine: Summary) -> float:
    """Return to how many decimal digits (0 to 6) the statistics agree; 0 if they can't tell.

    It is `digits` of one pair, in a tenth of the time.
    """
    if golden.numel != mine.numel or not (identifies_itself(golden) and identifies_itself(mine)):
        return 0.0
    figures = [
        math.nan if figure is None else figure
        for s in (golden, mine)
        for figure in (s.min, s.max, s.mean, s.l2norm)
    ]
    low, high, _, norm = own = figures[:4]
    reach = max(abs(low), abs(high))
    scales = reach, reach, norm / math.sqrt(golden.numel), norm
    if not all(map(math.isfinite, figures)) or not all(scales):
        return float(digits([golden], [mine])[0, 0])
    gaps = zip(own, figures[4:], scales, strict=True)
    worst = max(abs(a - b) / scale for a, b, scale in gaps)
    return min(max(-float(np.log10(worst + 1e-12)), 0.0), constants.MOST_DIGITS)


def digits(golden: Sequence[Summary], mine: Sequence[Summary]) -> np.ndarray:
    """Return float64[n, m]: the decimal digits to which the statistics of each pair agree."""
    return _digits(_figures(golden), _figures(mine))


def is_parallel(
    golden: Sequence[CallFeatures], mine: Sequence[CallFeatures], tolerance: MatchTolerance
) -> bool:
    """Tell whether both sequences make the same calls in the same order."""
    label = _shapeless if tolerance.any_shape else _label
    same_labels = list(map(label, golden)) == list(map(label, mine))
    return same_labels and not _moved(golden, mine, tolerance.sure_digits)


def _equal(golden: CallFeatures, mine: CallFeatures) -> bool:
    same_bytes = golden.fingerprint is not None and golden.fingerprint == mine.fingerprint
    return same_bytes and _label(golden) == _label(mine)


def _moved(
    golden: Sequence[CallFeatures], mine: Sequence[CallFeatures], sure_digits: float
) -> bool:
    """Tell whether values that differ index by index reappear at other indices."""
    changed = [
        (g.value, m.value)
        for g, m in zip(golden, mine, strict=True)
        if g.fingerprint != m.fingerprint
    ]
    if len(changed) < 2:  # a value has to move to the place of another one
        return False
    prints = {g.fingerprint for g, _ in changed if g}, {m.fingerprint for _, m in changed if m}
    if prints[0] & prints[1] - {None}:
        return True
    if len(changed) ** 2 > constants.SCORE_ENTRIES:
        return False
    figures = _figures([g for g, _ in changed]), _figures([m for _, m in changed])
    far = _paired_digits(*figures) < min(constants.TELLING_DIGITS, sure_digits)
    if np.count_nonzero(far) < 2:
        return False
    return bool((_digits(figures[0][far], figures[1][far]) >= sure_digits).any())


def _figures(values: Sequence[Summary | None]) -> np.ndarray:
    """Return float64[n, 5]: numel, min, max, mean and l2norm.

    NaN for a tensor that is missing, or does not identify itself.
    """
    rows = [
        (s.numel, s.min, s.max, s.mean, s.l2norm)
        if s is not None and identifies_itself(s)
        else (math.nan,) * 5
        for s in values
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _digits(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return float64[n, m]: the decimal digits to which the statistics of each pair agree."""
    return _paired_digits(golden[:, None], mine[None])


def _paired_digits(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return the decimal digits to which figures [..., 5] agree, float64[...]."""
    with np.errstate(all="ignore"):
        count, low, high, _, norm = (golden[..., column] for column in range(5))
        reach = np.maximum(np.abs(low), np.abs(high))
        worst = np.where(count == mine[..., 0], 0.0, np.nan)
        for column, scale in ((1, reach), (2, reach), (3, norm / np.sqrt(count)), (4, norm)):
            gap = np.abs(golden[..., column] - mine[..., column]) / scale
            worst = np.maximum(worst, gap)  # NaN stays
        digits = np.clip(-np.log10(worst + 1e-12), 0.0, constants.MOST_DIGITS)
        return np.asarray(np.where(np.isnan(digits), 0.0, digits))


@dataclass(frozen=True, slots=True)
class _FeatureArrays:
    """The features of a sequence as arrays of codes: equal features have equal codes, 0 is none."""

    op: np.ndarray
    shape: np.ndarray
    name: np.ndarray
    fingerprint: np.ndarray
    output: np.ndarray
    anchor: np.ndarray
    shape_identifies: np.ndarray
    figures: np.ndarray  # [n, 5]

    @classmethod
    def of(cls, calls: Sequence[CallFeatures], codes: dict[Hashable, int]) -> _FeatureArrays:
        def coded(what: str, values: Iterable[Hashable]) -> np.ndarray:
            numbers = [codes.setdefault((what, v), len(codes) + 1) if v else 0 for v in values]
            return np.array(numbers, dtype=np.int64)

        figures = _figures([c.value for c in calls])
        known = figures[:, 0] > 0  # the bytes of a constant say nothing
        return cls(
            coded("op", (c.op for c in calls)),
            coded("shape", (c.shape for c in calls)),
            coded("name", (c.name for c in calls)),
            coded("fingerprint", (c.fingerprint for c in calls)) * known,
            coded("output", (c.value and c.value.shape for c in calls)),
            np.array([c.anchor for c in calls], dtype=np.int64),
            np.array([c.shape_identifies for c in calls], dtype=bool),
            figures,
        )

    def rows(self, where: slice) -> _FeatureArrays:
        """Return a part with shape [n, 1], to be compared with all columns."""
        return _FeatureArrays(*(getattr(self, name)[where, None] for name in self.__slots__))

    def columns(self, where: slice) -> _FeatureArrays:
        """Return a part with shape [1, m], to be compared with all rows."""
        return _FeatureArrays(*(getattr(self, name)[None, where] for name in self.__slots__))


class _Table:
    """The scores of all pairs of calls of two sequences, and the best way through them."""

    def __init__(
        self,
        golden: Sequence[CallFeatures],
        mine: Sequence[CallFeatures],
        tolerance: MatchTolerance,
    ) -> None:
        self.n, self.m, self._tolerance = len(golden), len(mine), tolerance
        self.forbidden: list[tuple[int, int]] = []
        codes: dict[Hashable, int] = {}
        self._golden = _FeatureArrays.of(golden, codes)
        self._mine = _FeatureArrays.of(mine, codes)

    def _scores(self, rows: slice, columns: slice) -> np.ndarray:
        """Return float64[rows, columns]; 0 where two calls have nothing in common."""
        g, m = self._golden.rows(rows), self._mine.columns(columns)
        sure = self._tolerance.sure_digits
        op, shape = g.op == m.op, g.shape == m.shape
        same_bytes = (g.fingerprint == m.fingerprint) & (g.fingerprint > 0)
        digits = _digits(self._golden.figures[rows], self._mine.figures[columns])
        # if rounding is coarse, which pair agrees to more digits than that is chance
        certain = same_bytes | (np.minimum(digits, sure) >= constants.REPLACED_DIGITS)
        numel = g.figures[..., 0] == m.figures[..., 0]
        # a coarse dtype has fewer digits: scale them up to those of other dtypes
        digits = np.minimum(digits * (constants.REPLACED_DIGITS / sure), constants.REPLACED_DIGITS)
        # each thing in common counts one, and so does each digit
        score = certain * constants.CERTAIN_SCORE + digits * (digits >= constants.TELLING_DIGITS)
        for same in (op, shape, (g.name == m.name) & (g.name > 0), g.output == m.output):
            score = score + same
        by_op = op & (shape | numel | self._tolerance.any_shape)
        by_shape = shape & g.shape_identifies & m.shape_identifies
        allowed = by_op | by_shape | (digits >= constants.REPLACED_DIGITS) | same_bytes
        allowed &= g.shape_identifies == m.shape_identifies  # one with parameters, one without
        anchored = (g.anchor > 0) | (m.anchor > 0)
        score = np.where(
            anchored, (g.anchor == m.anchor) * constants.ANCHOR_SCORE, np.where(allowed, score, 0.0)
        )
        for i, j in self.forbidden:
            if rows.start <= i < rows.stop and columns.start <= j < columns.stop:
                score[i - rows.start, j - columns.start] = 0.0
        return score.astype(np.int64)

    def path(self, top: int, bottom: int, left: int, right: int) -> list[tuple[int, int]]:
        """Return the best way through a part of the table."""
        if top == bottom or left == right:
            return []
        if (bottom - top) * (right - left) <= constants.SCORE_ENTRIES or bottom - top == 1:
            return self._walk(top, bottom, left, right)
        middle = (top + bottom) // 2
        down = self._sweep(range(top, middle), left, right, 1)
        up = self._sweep(range(bottom - 1, middle - 1, -1), left, right, -1)
        split = left + int(np.argmax(down + up[::-1]))
        return self.path(top, middle, left, split) + self.path(middle, bottom, split, right)

    def _sweep(self, rows: range, left: int, right: int, direction: int) -> np.ndarray:
        """Return the best total score of these rows with the first 0, 1, 2 ... columns.

        With ``direction`` -1: with the last 0, 1, 2 ... columns.
        """
        best = np.zeros(right - left + 1, dtype=np.int64)
        for row in rows:
            scores = self._scores(slice(row, row + 1), slice(left, right))[0]
            best = _next(best, scores[::direction])
        return best

    def _walk(self, top: int, bottom: int, left: int, right: int) -> list[tuple[int, int]]:
        """Return the best way through a part that fits in memory, by going back from its end."""
        scores = self._scores(slice(top, bottom), slice(left, right))
        best = [np.zeros(right - left + 1, dtype=np.int64)]
        for row in scores:
            best.append(_next(best[-1], row))
        i, j, way = bottom - top, right - left, []
        while i and j:
            score = scores[i - 1, j - 1]
            if score > 0 and best[i][j] == best[i - 1][j - 1] + score:
                i, j = i - 1, j - 1
                way.append((top + i, left + j))
            elif best[i][j] == best[i - 1][j]:
                i -= 1
            else:
                j -= 1
        return way[::-1]


def _next(best: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the next row of best totals: each column is paired with this row, or left out."""
    row = best.copy()
    np.maximum(row[1:], best[:-1] + scores, out=row[1:])
    return np.maximum.accumulate(row)
