"""The verdicts: match, within_noise, diverged, expected, or unmatched if nothing can be judged.

The limit of a row comes from the first of these that has one: the user (`limits.py`), calibration
(differences between recordings of golden are not bugs), the noise that rounding explains
(`noise.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.epsilons import Epsilons
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, is_even, scale_of
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.noise import (
    Explained,
    Level,
    NoiseLimits,
    NoisePropagation,
    floor,
)
from llmdebug_nb.comparison.other_batch import OfAllBatch
from llmdebug_nb.comparison.padding import MIXED, NO_TOKEN, Unasked
from llmdebug_nb.comparison.siblings import Siblings
from llmdebug_nb.comparison.sorted_tokens import SORTED, Sorted
from llmdebug_nb.comparison.uses import Uses
from llmdebug_nb.comparison.weight_noise import TURNED, Weights, turned_by
from llmdebug_nb.core import constants
from llmdebug_nb.core.findings import (
    EXPECTED,
    MISMATCHES,
    Comparison,
    Difference,
    Expectation,
    Pair,
    RowVerdict,
    covering,
)
from llmdebug_nb.core.reasons import AFTER_TIE, CLOSE, OTHER_BATCH

UNMATCHED: Final = "unmatched"
NEAR_TIE = "another choice at a near tie: its inputs differ within noise"
COARSER = "mine has a coarser dtype here than in the other calls of this kind"
TOO_EVEN = "all elements are off by one factor, which rounding does not cause"
FOLLOWS = "explained by what is expected"
PASSED_ON = "within its limit only because earlier tensors differ"


class Judging:
    """All measured pairs, in execution order, to be judged whenever the expectations change.

    ``size``, ``weights``: see `noise.NoisePropagation`. ``rounding``: what both programs state, see
    `Epsilons`.
    """

    def __init__(
        self,
        measured: Sequence[Measured],
        *,
        size: Callable[[str], int] = lambda path: 0,
        weights: Weights | None = None,
        limits: Limits | None = None,
        calibration: Calibration | None = None,
        rounding: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._measured, self._size, self._weights = measured, size, weights
        self._limits, self._calibration = limits, calibration or Calibration()
        self._epsilons = Epsilons(measured, rounding)
        self._siblings = _siblings(measured, size, self._epsilons)
        for again in self._calibration.rounded:
            self._siblings.calibrate(_siblings(again, size, Epsilons(again)))
        self.comparison = Comparison()
        self._counts_padding = False

    def count_padding(self) -> None:
        """From now on, what differs at places without a token alone has diverged, too."""
        self._counts_padding = True
        self.__dict__.pop("plain", None)

    @functools.cached_property
    def _uses(self) -> Uses:
        return Uses(m.pair for m in self._measured)

    @functools.cached_property
    def plain(self) -> list[Difference]:
        """The differences without any expectation."""
        return self._judged(frozenset())

    def is_large(self, index: int) -> bool:
        """Tell whether a difference is no perturbation: its size explains nothing behind it.

        One of integers, such as positions or token ids, is none, however small.
        """
        m = self._measured[index]
        if m.metrics is None and not m.certain:
            return False  # only one run has it
        return not self._epsilons.of(m) or not m.error < constants.PERTURBED

    def differences(
        self, expected: Sequence[Expectation] = (), excused: Collection[int] = ()
    ) -> list[Difference]:
        """Return a Difference for each measured pair.

        A mismatch gets the verdict `expected` if it is marked, is the tensor of a marked row once
        more, is ``excused`` (an index), or if the size of such differences before it explains it.
        """
        marks = {
            d.index: mark
            for d in self.plain
            if (d.verdict in MISMATCHES or d.follows)
            and (mark := covering(expected, d, self.is_large(d.index)))
        }
        if not marks and not excused:
            return self.plain
        known = {*marks, *excused}
        contents: set[object] = set()
        for d in self.plain:
            if d.index in known:
                contents.add(d.content)
            elif d.differs and d.content in contents:
                known.add(d.index)
        again = self._judged(frozenset(i for i in known if not self.is_large(i)))
        return [
            _excused(plain, other, marks.get(plain.index), plain.index in known)
            for plain, other in zip(self.plain, again, strict=True)
        ]

    def _judged(self, expected: Collection[int]) -> list[Difference]:
        noise = NoisePropagation(self._size, self._weights)
        judge = _Judge(
            noise, self._epsilons, self._siblings, self._limits, self._calibration, expected,
            self.comparison, lambda: self._uses, self._counts_padding,
        )  # fmt: skip
        return list(map(judge.difference, self._measured))


def _excused(
    plain: Difference, again: Difference, mark: Expectation | None, known: bool
) -> Difference:
    """Return a difference with expectations. ``again``: judged with the errors they pass on."""
    if mark is not None:
        return replace(plain, verdict=EXPECTED, expected=mark, follows=False)
    if not plain.differs or (plain.follows and again.differs and not known):
        return plain
    if plain.follows:  # what it follows is expected
        return replace(
            plain, follows=False, reason=None if plain.reason == PASSED_ON else plain.reason
        )
    if known:
        return replace(plain, verdict=EXPECTED, reason=FOLLOWS)
    if again.verdict in MISMATCHES:
        return again
    return replace(plain, verdict=EXPECTED, limit=again.limit, reason=FOLLOWS)


def _siblings(
    measured: Sequence[Measured], size: Callable[[str], int], epsilons: Epsilons
) -> Siblings:
    """Learn from the measured errors, before any is judged."""
    noise, siblings = NoisePropagation(size), Siblings()
    for m in (each.at_tokens for each in measured):
        if not m.is_at_its_place:
            continue
        record, eps = m.pair.either, epsilons.of(m)
        site, shape = record.site, record.summary.shape
        if m.metrics is None:
            noise.add_unpaired(site, eps, shape)
            continue
        explained, level = None, Level()
        if eps:
            if 0.0 < m.error < math.inf:
                explained = noise.explain(site, eps, shape, _replaced(m.pair))
                explained.floor = math.hypot(explained.floor, _steps(m))
            siblings.add(record, m.error, explained, m.carriers)
            error = m.error if m.error < math.inf else 0.0
            level = Level(error=error, scale=scale_of(m.metrics))
        noise.record(site, level, eps, record.summary)
    return siblings


def _steps(m: Measured) -> float:
    """Return the error that rounding to the steps of a quantised tensor explains, relative L2."""
    return float((m.metrics or {}).get("grain_share") or 0.0)


def _replaced(pair: Pair) -> bool:
    return pair.golden is not None and pair.mine is not None and pair.golden.op != pair.mine.op


class _Judge:
    """Judges the pairs of a comparison in execution order."""

    def __init__(
        self,
        noise: NoisePropagation,
        epsilons: Epsilons,
        siblings: Siblings,
        limits: Limits | None,
        calibration: Calibration,
        expected: Collection[int],
        comparison: Comparison,
        uses: Callable[[], Uses],
        counts_padding: bool,
    ) -> None:
        self._noise, self._epsilons, self._siblings = noise, epsilons, siblings
        self._comparison, self._uses = comparison, uses
        self._limits, self._calibration, self._expected = limits, calibration, expected
        self._outputs: dict[int, Level] = {}  # golden's outputs by id -> noise that they pass on
        # rank and generation whose logits came to prefer another token, within noise
        self._flips: set[tuple[int, int]] = set()
        self._follows: set[object] = set()  # contents of pairs that only a passed-on limit excuses
        self._unasked, self._unknown = Unasked(counts_padding), OfAllBatch()
        self._sorted = Sorted(counts_padding)

    def difference(self, m: Measured) -> Difference:
        """Return the verdict on a pair, and pass its noise on."""
        record, eps = m.pair.either, self._epsilons.of(m)
        site, shape = record.site, record.summary.shape
        if m.metrics is None and not m.certain:
            self._unknown.add(m.pair)
            self._noise.add_unpaired(site, eps, shape)
            return self._row(m, UNMATCHED, None, None, {}, m.remark)
        is_order = self._sorted.is_order(m.pair)
        explained = self._noise.explain(site, eps, shape, _replaced(m.pair))
        row, level = self._judged(m, explained, eps)
        for reading, why in self._readings(m) if row.verdict in MISMATCHES else ():
            other, its_level = self._judged(reading, explained, eps)
            if other.verdict in ("match", "within_noise"):
                row, level = replace(other, verdict="within_noise", reason=why), its_level
                break
        if row.reason == SORTED:
            self._sorted.add(m.pair)
        elif row.verdict not in MISMATCHES:
            self._unasked.agrees(m)
        elif self._unasked.is_mixed(m, is_order):
            self._noise.add_unpaired(site, eps, shape)
            return self._row(m, UNMATCHED, None, None, {}, MIXED)
        differs = row.verdict == "diverged" or row.reason == NEAR_TIE
        if differs and self._unknown.holds(m.pair, is_order):
            self._noise.add_unpaired(site, eps, shape)
            return self._row(m, UNMATCHED, None, None, {}, OTHER_BATCH)
        if row.verdict == "diverged":
            self._unknown.differ(m.pair)
            self._sorted.differ(m.pair)
        elif m.pair.fit is not None:
            self._unknown.agree(m.pair)
        if not m.pair.at_its_place and row.verdict == "diverged":
            if m.is_at_its_place:
                self._noise.add_unpaired(site, eps, shape)
            return _alone(row)
        if row.follows and m.pair.content is not None:
            self._follows.add(m.pair.content)
        if m.is_at_its_place:
            self._noise.record(site, level, eps, record.summary)
            if m.pair.golden is not None and site.role == "output":
                self._outputs[m.pair.golden.id] = level
        if site.role == "grad" and row.verdict == "within_noise" and not row.follows:
            turned = row.metrics.get(TURNED, self._turned_by_statistics(m, eps))
            self._noise.of_weights.add(site, turned or 0.0)
        if row.metrics.get("top1_flips") and row.verdict == "within_noise":
            self._flips.add((site.rank, site.generation))
        return row

    def _readings(self, m: Measured) -> Iterator[tuple[Measured, str]]:
        """Yield a pair as it may be measured otherwise, and why."""
        yield from ((reading, NO_TOKEN) for reading in self._unasked.readings(m))
        yield from ((reading, SORTED) for reading in self._sorted.readings(m))

    def _turned_by_statistics(self, m: Measured, eps: float) -> float:
        """Return what an optimizer may make of the error of a gradient whose values are unknown."""
        if not m.error and m.same_bytes is not False:
            return 0.0
        # statistics show less of it than elements are off by, and at least it is one rounding
        error = (1 + constants.CARRIER_ERRORS) * max(m.error, eps)
        return turned_by(error, m.pair.either.summary)

    def _judged(self, m: Measured, explained: Explained, eps: float) -> tuple[Difference, Level]:
        """Return the verdict, and the noise that follows from it."""
        metrics, scale = m.metrics or {}, scale_of(m.metrics or {})
        source = self._of_producer(m.pair)
        if source is not None and explained.level.expected and not source.expected:
            # what is expected beside it in the module has no part in it
            explained = replace(explained, level=source)
        limit, scale_limit, usual, noise = self._noise_limits(m, explained, eps)
        expected = m.index in self._expected
        inherited = explained.level.expected
        any_noise = expected or inherited
        if inherited:
            limit = min(limit, constants.PERTURBED)
        error = m.error if any_noise else min(m.error, usual)
        capped = Level(cap=error if m.error <= limit else usual, scale_cap=scale_limit)
        is_noise = m.error <= limit and (any_noise or not explained.level.cap or m.error <= noise)
        is_noise = is_noise and (any_noise or not self._is_followed(m.pair))
        passes = is_noise or expected
        level = Level(error=error, scale=scale, expected=any_noise) if passes else capped

        def row(verdict: RowVerdict, error: float, limit: float, reason: str | None) -> Difference:
            return self._row(m, verdict, error, limit, metrics, reason)

        fixed = self._limits.of(m.pair, metrics) if self._limits is not None else None
        if fixed is not None:
            beyond = fixed.error > fixed.limit and not (inherited and m.error <= limit)
            verdict: RowVerdict = "diverged" if beyond else "within_noise" if m.error else "match"
            return row(verdict, fixed.error, fixed.limit, fixed.says), level
        channel = metrics.get("worst_channel")
        if channel is not None and not channel <= constants.CHANNEL_GRAINS:
            return row("diverged", channel, constants.CHANNEL_GRAINS, m.remark), capped
        clipped = float(metrics.get("clipped") or 0.0)
        if clipped > constants.EVEN_ERRORS:
            return row("diverged", clipped, constants.EVEN_ERRORS, m.remark), capped
        if m.error and (why := self._tie(m, explained, limit)):
            decides = why == AFTER_TIE or not self._uses().ignores(m.pair)
            return row(UNMATCHED, m.error, limit, why), Level(error=math.inf if decides else 0.0)
        if m.error <= limit and scale > scale_limit and is_even(metrics, m.error):
            diverged = row("diverged", scale, scale_limit, TOO_EVEN)
            return diverged, level if expected else capped
        if 0.0 < m.error <= limit and self._epsilons.is_odd(m):
            length = max(m.pair.either.summary.shape, default=1)
            finer = floor(min(self._epsilons.both(m)), length)
            return row("diverged", m.error, finer, COARSER), level
        verdict, remark = _by_noise(m, limit)
        if m.error <= limit and not is_noise:
            follows = row(verdict, m.error, limit, remark or PASSED_ON)
            return replace(follows, follows=True), level
        return row(verdict, m.error, limit, remark), level

    def _row(
        self,
        m: Measured,
        verdict: RowVerdict,
        error: float | None,
        limit: float | None,
        metrics: Metrics,
        reason: str | None,
    ) -> Difference:
        return Difference(
            m.index, m.pair, verdict, error, limit, metrics, reason, comparison=self._comparison
        )

    def _is_followed(self, pair: Pair) -> bool:
        return bool(self._follows) and pair.content in self._follows

    def _of_producer(self, pair: Pair) -> Level | None:
        """Return the noise that an input has from its producer, None if that is unknown."""
        if pair.golden is None or pair.golden.producer is None:
            return None
        return self._outputs.get(pair.golden.producer)

    def _noise_limits(self, m: Measured, explained: Explained, eps: float) -> NoiseLimits:
        pair, record = m.pair, m.pair.either
        error, scale = (0.0, 0.0) if pair.golden is None else self._calibration.limits(pair.golden)
        steps = _steps(m)
        if not eps:  # a dtype that does not round has no noise of its own
            return NoiseLimits(error, scale, error, error)
        level, kin = explained.level, self._siblings.member(record)
        amplification = kin.amplification
        usual = level.limit(amplification, explained.floor)
        noise = amplification * level.error
        if level.cap:  # what chance may be is asked where the inputs agree
            by_chance, smallness = 1.0, 1.0
        else:
            # which elements have the noise of weights, statistics can't tell: one, say
            unsure = m.by_statistics and self._noise.of_weights.any_in(record.site)
            by_chance = kin.chance(1.0 if unsure else m.carriers)
            smallness = max(
                self._noise.cancelled(record.site, record.summary, eps),
                kin.smallness(record, m.carriers),
            )
        amplification *= by_chance
        golden, mine = self._epsilons.both(m)
        cast = 0.0 if golden == mine else constants.CAST_SHARE * eps
        own = math.hypot(level.scale_limit(amplification, explained.scale_floor), cast)
        limit = level.limit(amplification, explained.floor) * smallness
        return NoiseLimits(
            max(error, math.hypot(limit, steps)),
            max(scale, own),
            max(error, math.hypot(usual, steps)),
            max(error, math.hypot(noise, explained.floor, steps)),
        )

    def _tie(self, m: Measured, explained: Explained, limit: float) -> str | None:
        """Return a reason if noise decided an index or a token, here or before it."""
        record, level = m.pair.either, explained.level
        if level.error == math.inf:
            return AFTER_TIE
        if self._epsilons.of(m) or not m.metrics or m.error <= limit or level.cap:
            return None
        site = record.site
        if site.role == "output" and not self._noise.may_choose(site):
            return None
        if site.role == "input":
            flipped = (site.rank, site.generation) in self._flips
            return NEAR_TIE if flipped and self._noise.is_outermost(site) else None
        if m.gap is not None:  # noise moves both scores, at most as far as the worst row
            noise = level.limit(constants.AMPLIFICATION, explained.floor)
            near = m.gap <= 2 * constants.WORST_ROW * noise
        else:
            most = max(1.0, constants.NEAR_TIES * record.summary.numel)
            near = (m.metrics.get("mismatched") or math.inf) <= most
        return NEAR_TIE if level.error and near else None


def _alone(row: Difference) -> Difference:
    """Return the row of a tensor whose values another place holds, but not within noise."""
    own = Pair(row.pair.own(0), row.pair.own(1), row.pair.alone)
    if (own.golden and own.mine) or not own.why:
        return replace(row, verdict=UNMATCHED, reason=CLOSE)
    reason = f"only in {'golden' if own.golden else 'mine'}: {own.why}"
    return Difference(row.index, own, UNMATCHED, reason=reason, comparison=row.comparison)


def _by_noise(m: Measured, limit: float) -> tuple[RowVerdict, str | None]:
    """Return the verdict by the limit of noise alone, and a remark on it."""
    verdict: RowVerdict = "within_noise" if m.error <= limit else "diverged"
    if m.error == 0.0:
        verdict = "match"
    remark = m.remark
    if verdict != "diverged" and m.same_bytes is False and remark:
        verdict, remark = "within_noise", f"{remark}; they agree, though the bytes do not"
    return verdict, remark
