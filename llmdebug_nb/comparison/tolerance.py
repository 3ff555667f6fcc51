"""From what was measured to a verdict: match, within_noise, diverged, or unmatched where there is nothing to judge by; expected
where it is known and wanted, or follows from that.

Limits come, in this order, from the user (`limits.py`), from calibration (other recordings of golden: what differs between them
is no bug), and from the noise that rounding explains (`noise.py`).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.noise import (
    EVEN_SHARE,
    EVEN_T,
    Explained,
    Flow,
    Level,
    Siblings,
    eps_of,
    floor,
    kind_of,
)
from llmdebug_nb.core.findings import (
    EXPECTED,
    MISMATCHES,
    Comparison,
    Difference,
    Expectation,
    Pair,
    covering,
)
from llmdebug_nb.core.records import Record, Site

_ROW_SHARE = 4
_CALIBRATED = 3.0  # times what two recordings of golden differ by: two draws of the same noise differ by chance
_THROUGHOUT = (
    0.25  # of the tensors that round are coarser on one side: the program is, not some call in it
)
_TIES = 0.25  # no larger share of choices can be near ties
UNMATCHED = "unmatched"
NEAR_TIE = "another choice at a near tie: what it was made from differs within noise"
AFTER_TIE = "not comparable: it follows a choice that was made differently at a near tie"
COARSER = "mine is of a coarser dtype here, and nowhere else where there is such a call"
TOO_EVEN = "an even factor, which rounding does not make"
FOLLOWS = "no more than follows from what is expected"


SAYS = "Limits: what the rounding of each call and the noise of its inputs explain"


@dataclass(slots=True)
class Measured:
    """A pair with its metrics, None where it could not be measured; ``remark``: how, or why not.

    ``same_bytes``: by fingerprint, None if that can't tell. ``certain``: it is diverged whatever the limits.
    """

    index: int
    pair: Pair
    metrics: Metrics | None = None
    remark: str | None = None
    same_bytes: bool | None = None
    certain: bool = False
    error: float = field(init=False)

    def __post_init__(self) -> None:
        self.error = math.inf if self.certain else error_of(self.metrics or {})


@dataclass
class Calibration:
    """What recordings of golden differ by. ``runs``: their names."""

    runs: list[str] = field(default_factory=list)
    _spread: dict[object, tuple[float, float]] = field(
        default_factory=dict
    )  # by golden's record, and by its place in any step

    def add(self, name: str, measured: Sequence[Measured]) -> None:
        self.runs.append(name)
        for m in measured:
            golden = m.pair.golden
            if golden is None or (m.metrics is None and not m.certain):
                continue
            for key in (golden.id, _place(golden.site)):
                error, scale = self._spread.get(key, (0.0, 0.0))
                self._spread[key] = max(error, m.error), max(scale, scale_of(m.metrics or {}))

    def limits(self, golden: Record) -> tuple[float, float]:
        """Return the limits of error and scale error: those of the record, else of its place in other steps; 0 if not known."""
        error, scale = self._spread.get(golden.id) or self._spread.get(
            _place(golden.site), (0.0, 0.0)
        )
        return _CALIBRATED * error, _CALIBRATED * scale


def _place(site: Site) -> tuple[object, ...]:
    return site.rank, site.path, site.phase, site.role, site.slot


def error_of(metrics: Mapping[str, float | int | None]) -> float:
    """Return the one figure that is judged: relative L2, or inf where NaN or infinities differ.

    An error in a single row (one token, say) drowns in the norm of the whole, so a quarter of the worst row's
    error counts too: rounding spreads evenly, bugs need not. From statistics alone: ``stat_error``.
    """
    if metrics.get("nan_mismatch") or metrics.get("inf_mismatch"):
        return math.inf
    figures = [metrics.get("stat_error"), metrics.get("relative_euclidean_distance")]
    worst = metrics.get("worst_row_error")
    figures.append(None if worst is None else worst / _ROW_SHARE)
    return max((float(value) for value in figures if value is not None), default=0.0)


def scale_of(metrics: Mapping[str, float | int | None]) -> float:
    """Return the scale error's size; 0 where it is not known."""
    scale = metrics.get("scale_error")
    return 0.0 if scale is None or not math.isfinite(scale) else abs(float(scale))


def _is_even(metrics: Mapping[str, float | int | None], error: float) -> bool:
    return (metrics.get("scale_t") or 0.0) >= EVEN_T and scale_of(metrics) >= EVEN_SHARE * error


def says(limits: Limits | None, calibration: Calibration, differences: Iterable[Difference]) -> str:
    """Return a sentence on where the limits of differences come from."""
    text = SAYS
    if calibration.runs:
        text += f"; calibrated with {', '.join(calibration.runs)} ({_CALIBRATED:g} times what golden and it differ by, where that is more)"
    else:
        text += ", not calibrated to this model: calibrate= takes another recording of golden"
    if limits is None:
        return text
    fixed = sum(limits.fixes(d.pair, d.metrics) for d in differences)
    return f"{text}; fixed by {limits.says} for {fixed:,} rows"


class Judging:
    """Everything measured, which must be in execution order, to be judged as often as what is expected of it changes.

    ``size``: see `noise.Flow`.
    """

    def __init__(
        self, measured: Sequence[Measured], *, size: Callable[[str], int] = lambda path: 0,
        limits: Limits | None = None, calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        self._measured, self._size = measured, size
        self._limits, self._calibration = limits, calibration or Calibration()
        self._unit = _Unit(measured)
        self._siblings = _siblings(measured, size, self._unit)
        self.comparison = Comparison()

    @functools.cached_property
    def plain(self) -> list[Difference]:
        """A Difference for everything measured, were nothing expected."""
        return self._judged(frozenset())

    def differences(self, expected: Sequence[Expectation] = ()) -> list[Difference]:
        """Return a Difference for everything measured.

        A mismatch that is expected says so, and so does one that is no larger than what follows from those.
        """
        marks = {
            d.index: mark
            for d in self.plain
            if d.verdict in MISMATCHES and (mark := covering(expected, d))
        }
        if not marks:
            return self.plain
        follows = _made_from(self.plain, marks.keys())
        again = self._judged(frozenset(marks.keys() | follows))
        return [
            _excused(plain, other, marks.get(plain.index), plain.index in follows)
            for plain, other in zip(self.plain, again, strict=True)
        ]

    def _judged(self, expected: Collection[int]) -> list[Difference]:
        judge = _Judge(
            self._size, self._unit, self._siblings, self._limits, self._calibration, expected
        )
        return [replace(judge.difference(m), comparison=self.comparison) for m in self._measured]


def _excused(
    plain: Difference, again: Difference, mark: Expectation | None, follows: bool
) -> Difference:
    """Return a difference as it is with expectations: ``again``, where what is expected passes its error on."""
    if mark is not None:
        return replace(plain, verdict=EXPECTED, expected=mark)
    if follows:
        return replace(plain, verdict=EXPECTED, reason=FOLLOWS)
    if plain.verdict != "diverged":
        return plain
    return (
        again
        if again.verdict == "diverged"
        else replace(plain, verdict=EXPECTED, limit=again.limit, reason=FOLLOWS)
    )


def _made_from(differences: Sequence[Difference], marked: Collection[int]) -> set[int]:
    """Return the mismatches that are made from what is expected of one run alone, up to where both runs can be held against each other.

    What only one run has tells no error that it could pass on.
    """
    found: set[int] = set()
    made: set[tuple[bool, int]] = set()  # side and record
    calls: set[tuple[object, ...]] = set()  # of one side alone, that were given such
    for d in differences:
        sides = [
            (record is d.pair.mine, record)
            for record in (d.pair.golden, d.pair.mine)
            if record is not None
        ]
        alone = len(sides) == 1
        for side, record in sides:
            s = record.site
            call = (side, s.rank, s.generation, s.step, s.phase, s.path, s.call)
            from_it = (side, record.producer) in made or (
                alone and s.role != "input" and call in calls
            )
            if from_it and d.verdict in MISMATCHES and d.index not in marked:
                found.add(d.index)
            if alone and (d.index in found or d.index in marked):
                made.add((side, record.id))
                calls.add(call)
    return found


class _Unit:
    """The machine epsilon of a pair: that of the coarser side.

    A program that is coarser than golden throughout may round so. Where only some of its tensors are, it is that very rounding which
    differs, and golden's epsilon counts.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        units = [
            self.both(m.pair)
            for m in measured
            if m.pair.golden is not None and m.pair.mine is not None
        ]
        units = [unit for unit in units if all(unit)]
        self._throughout = sum(mine > golden for golden, mine in units) >= _THROUGHOUT * len(units)
        self._kinds: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
        for m in measured:
            if m.pair.golden is not None and m.pair.mine is not None:
                site = m.pair.golden.site
                self._kinds[_call_kind(m.pair.golden)][site.path] = self.both(m.pair)[1]

    def of(self, pair: Pair) -> float:
        """Return it; 0 where neither side rounds."""
        golden, mine = self.both(pair)
        return golden if golden and not self._throughout else max(golden, mine)

    def is_odd(self, pair: Pair) -> bool:
        """Tell whether mine is coarser than golden here, and nowhere else where golden has a call of the kind."""
        golden, mine = self.both(pair)
        if pair.golden is None or not golden or mine <= golden:
            return False
        others = [
            eps
            for path, eps in self._kinds[_call_kind(pair.golden)].items()
            if path != pair.golden.site.path
        ]
        return len(others) > 1 and mine > max(others)

    @staticmethod
    def both(pair: Pair) -> tuple[float, float]:
        """Return golden's and mine's."""
        golden, mine = (
            0.0 if record is None else eps_of(record.summary.dtype)
            for record in (pair.golden, pair.mine)
        )
        return golden, mine


def _call_kind(record: Record) -> tuple[object, ...]:
    return *kind_of(record), record.site.call


def _siblings(measured: Sequence[Measured], size: Callable[[str], int], unit: _Unit) -> Siblings:
    """Learn from the errors as they are, before any is judged."""
    flow, siblings = Flow(size), Siblings()
    for m in measured:
        record, eps = m.pair.either, unit.of(m.pair)
        if m.metrics is None:
            flow.pass_by(record.site, eps, record.summary.shape)
            continue
        explained = flow.explain(record.site, eps, record.summary.shape, _replaced(m.pair))
        if eps:
            siblings.see(record, m.error, explained)
            scale = scale_of(m.metrics)
            flow.note(
                record.site,
                Level(error=m.error if m.error < math.inf else 0.0, scale=scale),
                eps,
                record.summary.shape,
            )
        else:
            flow.note(record.site, Level(), 0.0, record.summary.shape)
    return siblings


def _replaced(pair: Pair) -> bool:
    return pair.golden is not None and pair.mine is not None and pair.golden.op != pair.mine.op


class _Judge:
    """Goes through a run in execution order."""

    def __init__(
        self,
        size: Callable[[str], int],
        unit: _Unit,
        siblings: Siblings,
        limits: Limits | None,
        calibration: Calibration,
        expected: Collection[int],
    ) -> None:
        self._flow, self._unit, self._siblings = Flow(size), unit, siblings
        self._limits, self._calibration, self._expected = limits, calibration, expected
        # rank and generation of which the logits came to prefer another token, within noise
        self._flips: set[tuple[int, int]] = set()

    def difference(self, m: Measured) -> Difference:
        if m.metrics is None and not m.certain:
            alone = m.pair.either
            self._flow.pass_by(alone.site, self._unit.of(m.pair), alone.summary.shape)
            return Difference(m.index, m.pair, UNMATCHED, reason=m.remark)
        record, metrics, eps = m.pair.either, m.metrics or {}, self._unit.of(m.pair)
        explained = self._flow.explain(record.site, eps, record.summary.shape, _replaced(m.pair))
        limit, scale_limit = self._noise(m.pair, explained, eps)
        known = m.index in self._expected
        level = (
            Level(
                error=m.error, scale=scale_of(metrics), expected=known or explained.level.expected
            )
            if m.error <= limit or known
            else Level(cap=limit, scale_cap=scale_limit)
        )
        fixed = self._limits.of(m.pair, metrics) if self._limits is not None else None
        if fixed is not None:
            follows = explained.level.expected and m.error <= limit
            beyond = fixed.error > fixed.limit and not follows
            verdict = "diverged" if beyond else "within_noise" if m.error else "match"
            found = Difference(
                m.index, m.pair, verdict, fixed.error, fixed.limit, metrics, fixed.says
            )
        elif m.error and (why := self._tie(m, explained, limit)):
            level = Level(error=math.inf)
            found = Difference(m.index, m.pair, UNMATCHED, m.error, limit, metrics, why)
        elif m.error <= limit and scale_of(metrics) > scale_limit and _is_even(metrics, m.error):
            if not known:
                level = Level(cap=limit, scale_cap=scale_limit)
            found = Difference(
                m.index, m.pair, "diverged", scale_of(metrics), scale_limit, metrics, TOO_EVEN
            )
        elif 0.0 < m.error <= limit and self._unit.is_odd(m.pair):
            finer = floor(min(self._unit.both(m.pair)), max(record.summary.shape, default=1))
            found = Difference(m.index, m.pair, "diverged", m.error, finer, metrics, COARSER)
        else:
            found = _by_noise(m, limit)
        self._flow.note(record.site, level, eps, record.summary.shape)
        if metrics.get("top1_flips") and found.verdict == "within_noise":
            self._flips.add((record.site.rank, record.site.generation))
        return found

    def _noise(self, pair: Pair, explained: Explained, eps: float) -> tuple[float, float]:
        """Return the limits of the error and of the scale error."""
        error, scale = (0.0, 0.0) if pair.golden is None else self._calibration.limits(pair.golden)
        if not eps:  # what does not round has no noise of its own
            return error, scale
        level, amplification = explained.level, self._siblings.amplification(pair.either)
        error = max(
            error,
            level.limit(amplification, explained.floor) * self._siblings.smallness(pair.either),
        )
        golden, mine = self._unit.both(pair)
        cast = (
            0.0 if golden == mine else eps / 5
        )  # where only one side rounds, regular values may all round one way
        return error, max(
            scale, math.hypot(level.scale_limit(amplification, explained.scale_floor), cast)
        )

    def _tie(self, m: Measured, explained: Explained, limit: float) -> str | None:
        """Say so where an index or a token differs because noise decided between two that were as good, or follows such a one."""
        record, level = m.pair.either, explained.level
        if level.error == math.inf:
            return AFTER_TIE
        if self._unit.of(m.pair) or not m.metrics or m.error <= limit or level.cap:
            return None
        if record.site.role == "input":
            given = (
                self._flow.is_outermost(record.site)
                and (record.site.rank, record.site.generation) in self._flips
            )
            return NEAR_TIE if given else None
        # values that are as good as golden's, or a few others among many
        few = (m.metrics.get("mismatched") or math.inf) <= max(1.0, _TIES * record.summary.numel)
        return NEAR_TIE if level.error and (few or self._flow.has_outputs(record.site)) else None


def _by_noise(m: Measured, limit: float) -> Difference:
    verdict, remark = (
        "match" if m.error == 0.0 else "within_noise" if m.error <= limit else "diverged",
        m.remark,
    )
    if verdict != "diverged" and m.same_bytes is False and remark:
        verdict, remark = "within_noise", f"{remark}; they agree, though the bytes do not"
    return Difference(m.index, m.pair, verdict, m.error, limit, m.metrics or {}, remark)
