"""The verdicts: match, within_noise, diverged, expected, or unmatched if nothing can be judged.

The limit of a row comes from the first of these that has one: the user (`limits.py`), calibration
(differences between recordings of golden are not bugs), the noise that rounding explains
(`noise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.align.reasons import Reason
from llmdebug_nb.comparison import choices, products
from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.differences import MISMATCHES, Comparison, Difference, RowVerdict
from llmdebug_nb.comparison.epsilons import Epsilons
from llmdebug_nb.comparison.input_rounding import INPUT_ROUNDING
from llmdebug_nb.comparison.limits import Judged, Limits
from llmdebug_nb.comparison.measured import Measured, is_even, scale_of
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.noise import Explained, Level, NoiseLimits, NoisePropagation, floor
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.siblings import Siblings
from llmdebug_nb.comparison.unknown import Unknown
from llmdebug_nb.comparison.untouched import Untouched
from llmdebug_nb.comparison.used_outputs import Uses
from llmdebug_nb.comparison.weight_noise import TURNED, turned_by
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import Site

UNMATCHED: Final = "unmatched"


def steps_of(m: Measured) -> float:
    """Return the error that rounding to the steps of a quantised tensor explains, relative L2."""
    return float((m.metrics or {}).get("grain_share") or 0.0)


def of_product(m: Measured, explained: Explained) -> tuple[float, float]:
    """Return by how much an output is no product of its factors, and how much rounding explains.

    See `products.py`. inf if that is not known.
    """
    metrics = m.metrics or {}
    error = metrics.get(products.ERROR)
    noise = constants.CALIBRATED * float(metrics.get(products.NOISE) or 0.0)
    return math.inf if error is None else float(error), math.hypot(explained.floor, noise)


def unseen(m: Measured, eps: float, before: Level) -> float:
    """Return the error that statistics may hide: that of rounding, here or on the way.

    Elements that are rounded up and down hardly move a norm. What is made of a few of them shows.
    """
    if not m.by_statistics or m.same_bytes:
        return 0.0
    return max(constants.BOTH_ROUND * eps, before.unseen)


def is_replaced(pair: Pair) -> bool:
    """Tell whether the two runs compute a tensor otherwise. A weight is stored, not computed."""
    if pair.either.site.role == "weight":
        return pair.fit is not None and pair.fit.computes
    return pair.golden is not None and pair.mine is not None and pair.golden.op != pair.mine.op


@dataclass(frozen=True)
class Grounds:
    """What the verdicts of a comparison rest on, the same for all rows."""

    epsilons: Epsilons
    siblings: Siblings
    limits: Limits | None
    calibration: Calibration
    uses: Callable[[], Uses]
    counts_padding: bool
    comparison: Comparison


class Judge:
    """Judges the pairs of a comparison in execution order."""

    def __init__(
        self,
        grounds: Grounds,
        noise: NoisePropagation,
        untouched: Untouched,
        expected: Collection[int],
    ) -> None:
        self._noise, self._untouched, self._expected = noise, untouched, expected
        self._epsilons, self._siblings = grounds.epsilons, grounds.siblings
        self._limits, self._calibration = grounds.limits, grounds.calibration
        self._comparison, self._uses = grounds.comparison, grounds.uses
        self._outputs: dict[int, Level] = {}  # golden's outputs by id -> noise that they pass on
        # of the last call of a module in a pass: its number, and the noise of its inputs
        self._given: dict[tuple[object, ...], tuple[int, Level]] = {}
        # rank and generation whose logits came to prefer another token, within noise
        self._flips: set[tuple[int, int]] = set()
        self._follows: set[object] = set()  # contents of pairs that only a passed-on limit excuses
        self._unknown = Unknown(grounds.counts_padding)

    def difference(self, m: Measured) -> Difference:
        """Return the verdict on a pair, and pass its noise on."""
        record, eps = m.pair.either, self._epsilons.of(m)
        site, shape = record.site, record.summary.shape
        if m.metrics is None and not m.certain:
            if m.rule is not Rule.MASK_ALONE:
                self._unknown.unmeasured(m.pair)
            rule = Rule.UNMEASURED if m.rule is Rule.NOISE else m.rule
            return self._unmatched(m, eps, rule, m.remark)
        is_order = self._unknown.is_order(m.pair)
        explained = self._noise.explain(site, eps, shape, is_replaced(m.pair), m.input_rounding)
        tied = explained.level.tied
        if m.error and tied and self._given_limit(m) is None:
            row, level = self._behind_tie(m, explained, eps, is_order)
        else:
            row, level = self._read(m, explained, eps, self._unknown.readings(m))
        if why := self._unknown.why(m, row, is_order, tied):
            return self._unmatched(m, eps, why)
        self._unknown.judged(m, row, is_order, tied)
        if not m.pair.at_its_place and row.verdict == "diverged":
            if m.is_at_its_place:
                self._noise.add_unpaired(site, eps, shape)
            return _alone(row)
        if row.follows and m.pair.content is not None:
            self._follows |= row.contents
        if m.is_at_its_place:
            if row.verdict == "diverged" and m.pair.reason is Reason.SEQUENCE:
                # only their order says that they are partners
                self._noise.add_unpaired(site, eps, shape)
            self._noise.record(site, level, eps, record.summary)
            if site.role == "input" and not is_operator(site.path):
                call, given = self._given.get(_module(site), (site.call, Level()))
                self._given[_module(site)] = site.call, given if call == site.call else Level()
                self._given[_module(site)][1].add(level)
            if m.pair.golden is not None and site.role == "output":
                self._outputs[m.pair.golden.id] = level
        if site.role == "grad" and row.verdict == "within_noise" and not row.follows:
            turned = row.metrics.get(TURNED, self._turned_by_statistics(m, eps))
            self._noise.of_weights.add(site, turned or 0.0)
        if row.metrics.get("top1_flips") and row.verdict == "within_noise" and not row.follows:
            self._flips.add((site.rank, site.generation))
        return row

    def _unmatched(
        self, m: Measured, eps: float, rule: Rule, remark: str | None = None
    ) -> Difference:
        """Return the row of a pair that nothing can be said of. Its noise is unknown, too."""
        self._noise.add_unpaired(m.pair.either.site, eps, m.pair.either.summary.shape)
        return self._row(m, UNMATCHED, None, None, {}, rule, remark)

    def _read(
        self,
        m: Measured,
        explained: Explained,
        eps: float,
        readings: Iterator[tuple[Measured, Rule]],
    ) -> tuple[Difference, Level]:
        """Return the verdict on a pair, or on the first reading of it that agrees."""
        row, level = self._judged(m, explained, eps)
        for reading, rule in readings if row.verdict in MISMATCHES else ():
            other, its_level = self._judged(reading, explained, eps)
            if other.verdict in ("match", "within_noise"):
                return _ruled(other, "within_noise", rule), its_level
        return row, level

    def _behind_tie(
        self, m: Measured, explained: Explained, eps: float, is_order: bool
    ) -> tuple[Difference, Level]:
        """Return the verdict on what is behind a near tie, of the tokens that it left alone.

        Statistics are of all tokens: how far the others may move them, the near tie told.
        """
        tells = constants.AMPLIFICATION * explained.level.unseen < constants.PERTURBED
        if m.by_statistics and tells:
            row, level = self._judged(m.of_whole, explained, eps)
            if row.rule is Rule.NEAR_TIE or (eps and len(m.pair.either.summary.shape) > 1):
                return row, replace(level, tied=True)
        unread = is_order or self._unknown.sorts(m.pair)
        reading = None if unread else self._untouched.reading(m)
        if reading is not None:
            row, level = self._read(reading, explained, eps, _in_other_orders(reading))
            if row.rule is Rule.NEAR_TIE:
                return row, level
            # who is whose partner is less sure here
            if row.rule not in (Rule.COARSER, Rule.SORTED):
                verdict: RowVerdict = "within_noise" if row.verdict == "match" else row.verdict
                if not row.reason:
                    row = _ruled(row, verdict, Rule.UNTOUCHED)
                row = replace(row, verdict=verdict)
                return row, replace(level, tied=True)
            if row.rule is Rule.SORTED:
                self._unknown.judged(m, row, is_order, tied=True)
        level = replace(explained.level, error=math.hypot(explained.level.noise, explained.floor))
        return self._row(m, UNMATCHED, m.error, None, m.metrics or {}, Rule.AFTER_TIE), level

    def _given_limit(self, m: Measured) -> Judged | None:
        """Return how the user's limits judge a pair, if there are some for it."""
        return None if self._limits is None else self._limits.of(m.pair, m.metrics or {})

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
        if m.input_rounding:
            metrics = metrics | {INPUT_ROUNDING: m.input_rounding}
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
        product, most = of_product(m, explained)
        if product <= most:  # what its weight and input are off by makes all the rest
            limit, usual = max(limit, m.error), max(usual, m.error)
            _, given = self._given.get(_module(m.pair.either.site), (None, explained.level))
            noise = noise if given.cap else limit
        error = m.error if any_noise else min(m.error, usual)
        capped = Level(cap=error if m.error <= limit else usual, scale_cap=scale_limit)
        is_noise = m.error <= limit and (any_noise or not explained.level.cap or m.error <= noise)
        is_noise = is_noise and (any_noise or not self._is_followed(m.pair))
        passes = is_noise or expected
        level = Level(error=error, scale=scale, expected=any_noise) if passes else capped
        level.unseen = unseen(m, eps, explained.level)

        def row(
            verdict: RowVerdict, error: float, limit: float, rule: Rule, remark: str | None = None
        ) -> Difference:
            return self._row(m, verdict, error, limit, metrics, rule, remark)

        fixed = self._given_limit(m)
        if fixed is not None:
            beyond = fixed.error > fixed.limit and not (inherited and m.error <= limit)
            verdict: RowVerdict = "diverged" if beyond else "within_noise" if m.error else "match"
            return row(verdict, fixed.error, fixed.limit, Rule.USER_LIMIT, fixed.says), level
        channel = metrics.get("worst_channel")
        if channel is not None and not channel <= constants.CHANNEL_GRAINS:
            return row(
                "diverged", channel, constants.CHANNEL_GRAINS, Rule.CHANNEL_OFF, m.remark
            ), capped
        if math.inf > product > most:
            return row("diverged", product, most, Rule.PRODUCT_OFF, m.remark), capped
        clipped = float(metrics.get("clipped") or 0.0)
        if clipped > constants.EVEN_ERRORS:
            return row("diverged", clipped, constants.EVEN_ERRORS, Rule.CLIPPED, m.remark), capped
        if m.error and (behind := self._tie(m, explained, limit)):
            decides = not self._uses().ignores(m.pair)
            if decides:
                self._untouched.add_tie(m)
            return row(UNMATCHED, m.error, limit, Rule.NEAR_TIE), behind if decides else Level()
        if m.error <= limit and scale > scale_limit and is_even(metrics, m.error):
            diverged = row("diverged", scale, scale_limit, Rule.TOO_EVEN)
            return diverged, level if expected else capped
        if 0.0 < m.error <= limit and self._epsilons.is_odd(m):
            length = max(m.pair.either.summary.shape, default=1)
            finer = floor(min(self._epsilons.both(m)), length)
            return row("diverged", m.error, finer, Rule.COARSER), level
        verdict, remark = _by_noise(m, limit)
        if m.error <= limit and not is_noise:
            follows = row(verdict, m.error, limit, Rule.PASSED_ON, remark)
            return replace(follows, follows=True), level
        rule = Rule.OTHER_SHAPE if m.certain and m.rule is Rule.OTHER_SHAPE else Rule.NOISE
        if verdict == "within_noise" and m.input_rounding:
            before = math.sqrt(max(explained.level.error**2 - m.input_rounding**2, 0.0))
            exact = replace(explained, level=replace(explained.level, error=before))
            if m.error > self._noise_limits(m, exact, eps).error:
                rule = Rule.FACTOR_ROUNDED
        return row(verdict, m.error, limit, rule, remark), level

    def _row(
        self,
        m: Measured,
        verdict: RowVerdict,
        error: float | None,
        limit: float | None,
        metrics: Metrics,
        rule: Rule,
        remark: str | None = None,
    ) -> Difference:
        return Difference(
            m.index, m.pair, verdict, error, limit, metrics, remark, comparison=self._comparison,
            rule=rule, rows=m.rows,
        )  # fmt: skip

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
        steps = steps_of(m)
        if not eps:  # a dtype that does not round has no noise of its own
            return NoiseLimits(error, scale, error, error)
        level, kin = explained.level, self._siblings.member(record)
        amplification = kin.amplification
        usual = level.limit(amplification, explained.floor)
        noise = amplification * level.noise
        if level.cap:  # what chance may be is asked where the inputs agree
            by_chance, smallness = 1.0, 1.0
        else:
            # which elements have the noise of weights, statistics can't tell: one, say
            unsure = m.by_statistics and self._noise.of_weights.any_in(record.site)
            by_chance = kin.chance(1.0 if unsure else m.draws)
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

    def _tie(self, m: Measured, explained: Explained, limit: float) -> Level | None:
        """Return what follows if noise decided an index or a token."""
        record, level = m.pair.either, explained.level
        if self._epsilons.of(m) or not m.metrics or m.error <= limit:
            return None
        site = record.site
        if site.role == "input":
            flipped = (site.rank, site.generation) in self._flips
            return Level(tied=True) if flipped and self._noise.is_outermost(site) else None
        if level.cap or (site.role == "output" and not self._noise.may_choose(site)):
            return None
        # noise moves both scores, at most as far as the worst row
        gap = 2 * constants.WORST_ROW * level.limit(constants.AMPLIFICATION, explained.floor)
        behind, golden, mine = Level(tied=True), m.pair.golden, m.pair.mine
        if m.gap is not None:
            near = m.gap <= gap
        elif m.by_statistics and golden and mine and golden.summary.numel > 0:
            most = choices.near_ties(golden.summary, gap)
            near = choices.moved(golden.summary, mine.summary) <= most
            behind.unseen = choices.moved_norm(golden.summary, most)
        else:
            most = max(1.0, constants.NEAR_TIES * record.summary.numel)
            near = (m.metrics.get("mismatched") or math.inf) <= most
        return behind if level.noise and near else None


def _module(site: Site) -> tuple[object, ...]:
    """Return what tells the module around an operator, or a module itself, in a pass."""
    return *site.key[:4], module_of(site.path)


def _in_other_orders(m: Measured) -> Iterator[tuple[Measured, Rule]]:
    """Yield a pair as it may be measured in other orders, and why."""
    if m.in_one_order is not None:
        yield replace(m, metrics=m.in_one_order), Rule.SAME_PLACES
    if m.in_any_order is not None:
        yield replace(m, metrics=m.in_any_order), Rule.SORTED


def _alone(row: Difference) -> Difference:
    """Return the row of a tensor whose values another place holds, but not within noise."""
    alone, golden, mine = row.pair.alone, row.pair.own(0), row.pair.own(1)
    if (golden and mine) or alone is None:
        return _ruled(row, UNMATCHED, Rule.CLOSE)
    own = Pair(golden, mine, alone.text, reason=alone)
    where = f"only in {'golden' if golden else 'mine'}: {own.why}"
    return Difference(
        row.index, own, UNMATCHED, remark=where, comparison=row.comparison, rule=Rule.ALONE
    )


def _ruled(row: Difference, verdict: RowVerdict, rule: Rule) -> Difference:
    """Return a row that a rule decides."""
    return replace(row, verdict=verdict, rule=rule, remark=None)


def _by_noise(m: Measured, limit: float) -> tuple[RowVerdict, str | None]:
    """Return the verdict by the limit of noise alone, and a remark on it."""
    verdict: RowVerdict = "within_noise" if m.error <= limit else "diverged"
    if m.error == 0.0:
        verdict = "match"
    remark = m.remark
    if verdict != "diverged" and m.same_bytes is False and remark:
        verdict, remark = "within_noise", f"{remark}; they agree, though the bytes do not"
    return verdict, remark
