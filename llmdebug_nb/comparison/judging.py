"""All measured pairs of a comparison, judged whenever the expectations change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from llmdebug_nb.comparison.calibration import Calibration
from llmdebug_nb.comparison.epsilons import Epsilons
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, scale_of
from llmdebug_nb.comparison.noise import Level, NoisePropagation
from llmdebug_nb.comparison.siblings import Siblings
from llmdebug_nb.comparison.tolerance import FOLLOWS, PASSED_ON, Judge, is_replaced, steps_of
from llmdebug_nb.comparison.untouched import Steps, Untouched, Values
from llmdebug_nb.comparison.uses import Uses
from llmdebug_nb.comparison.weight_noise import Weights
from llmdebug_nb.core import constants
from llmdebug_nb.core.findings import (
    EXPECTED,
    MISMATCHES,
    Comparison,
    Difference,
    Expectation,
    covering,
)


class Judging:
    """All measured pairs, in execution order, to be judged whenever the expectations change.

    ``size``, ``weights``: see `noise.NoisePropagation`. ``rounding``: what both programs state, see
    `Epsilons`. ``steps``: of golden, ``values``: reads them again; see `Untouched`.
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
        steps: Steps | None = None,
        values: Values | None = None,
    ) -> None:
        self._steps, self._values = steps or Steps(), values
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
        noise = NoisePropagation(self._size, self._weights)
        judge = Judge(
            noise, self._epsilons, self._siblings, self._limits, self._calibration, expected,
            self.comparison, lambda: self._uses, self._counts_padding,
            Untouched(self._steps, self._values),
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
                explained = noise.explain(site, eps, shape, is_replaced(m.pair))
                explained.floor = math.hypot(explained.floor, steps_of(m))
            siblings.add(record, m.error, explained, m.carriers)
            error = m.error if m.error < math.inf else 0.0
            level = Level(error=error, scale=scale_of(m.metrics))
        noise.record(site, level, eps, record.summary)
    return siblings
