"""All measured pairs of a comparison, judged whenever the expectations change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from llmdebug_nb.comparison.calibration import Calibration, says
from llmdebug_nb.comparison.differences import EXPECTED, MISMATCHES, Comparison, Difference
from llmdebug_nb.comparison.epsilons import Epsilons
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, scale_of
from llmdebug_nb.comparison.noise import Level, NoisePropagation
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.comparison.siblings import Siblings
from llmdebug_nb.comparison.tolerance import Grounds, Judge, is_replaced, steps_of
from llmdebug_nb.comparison.untouched import Steps, Untouched, Values
from llmdebug_nb.comparison.used_outputs import Uses
from llmdebug_nb.comparison.weight_noise import Weights
from llmdebug_nb.core import constants
from llmdebug_nb.store.expectation import Expectation, covering


@dataclass(frozen=True)
class Golden:
    """What is known of golden's program.

    ``size``, ``weights``: see `noise.NoisePropagation`. ``steps``: see `Untouched`.
    """

    size: Callable[[str], int] = lambda path: 0
    weights: Weights | None = None
    steps: Steps = field(default_factory=Steps)


class Judging:
    """All measured pairs, in execution order, to be judged whenever the expectations change.

    ``golden``: what is known of golden's program. ``rounding``: what both programs state, see
    `Epsilons`. ``values``: reads values again, see `Untouched`.
    """

    def __init__(
        self,
        measured: Sequence[Measured],
        *,
        golden: Golden | None = None,
        limits: Limits | None = None,
        calibration: Calibration | None = None,
        rounding: tuple[float, float] = (0.0, 0.0),
        values: Values | None = None,
    ) -> None:
        self._golden, self._measured, self._values = golden or Golden(), measured, values
        self._limits, self._calibration = limits, calibration or Calibration()
        self._epsilons = Epsilons(measured, rounding)
        size = self._golden.size
        self._siblings = _siblings(measured, size, self._epsilons)
        for again in self._calibration.rounded:
            self._siblings.calibrate(_siblings(again, size, Epsilons(again)))
        self.comparison = Comparison(self._golden.steps.of)
        self._counts_padding = False

    def says(self) -> str:
        """Return a sentence on the origin of the limits."""
        return says(self._limits, self._calibration, self.plain)

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
            and (mark := covering(expected, d.marked_sites, self.is_large(d.index)))
        }
        if not marks and not excused:
            return self.plain
        known = {*marks, *excused}
        contents: set[object] = set()
        for d in self.plain:
            if d.differs and d.content in contents:
                known.add(d.index)
            if d.index in known:
                contents |= d.contents
        again = self._judged(frozenset(i for i in known if not self.is_large(i)))
        return [
            _excused(plain, other, marks.get(plain.index), plain.index in known)
            for plain, other in zip(self.plain, again, strict=True)
        ]

    def _judged(self, expected: Collection[int]) -> list[Difference]:
        grounds = Grounds(
            self._epsilons, self._siblings, self._limits, self._calibration,
            lambda: self._uses, self._counts_padding, self.comparison,
        )  # fmt: skip
        noise = NoisePropagation(self._golden.size, self._golden.weights)
        judge = Judge(grounds, noise, Untouched(self._golden.steps, self._values), expected)
        return list(map(judge.difference, self._measured))


def _excused(
    plain: Difference, again: Difference, mark: Expectation | None, known: bool
) -> Difference:
    """Return a difference with expectations. ``again``: judged with the errors they pass on."""
    if mark is not None:
        return replace(plain, verdict=EXPECTED, expected=mark, follows=False, rule=Rule.EXPECTED)
    if not plain.differs or (plain.follows and again.differs and not known):
        return plain
    if plain.follows:  # what it follows is expected
        return replace(plain, follows=False, rule=Rule.NOISE)
    if known:
        return _follows(plain)
    if again.verdict in MISMATCHES:
        return again
    return replace(_follows(plain), limit=again.limit)


def _follows(row: Difference) -> Difference:
    return replace(row, verdict=EXPECTED, rule=Rule.FOLLOWS, remark=None)


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
                explained = noise.explain(site, eps, shape, is_replaced(m.pair), m.input_rounding)
                explained.floor = math.hypot(explained.floor, steps_of(m))
            siblings.add(record, m.error, explained, m.carriers)
            error = m.error if m.error < math.inf else 0.0
            level = Level(error=error, scale=scale_of(m.metrics))
        noise.record(site, level, eps, record.summary)
    return siblings
