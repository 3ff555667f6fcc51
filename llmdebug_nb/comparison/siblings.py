"""How calls of one kind amplify noise, learnt from all layers of a run."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, field

from llmdebug_nb.comparison.noise import Explained
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import any_layer
from llmdebug_nb.core.records import Record

Kind = tuple[str, ...]


def kind_of(record: Record) -> Kind:
    """Return the key that siblings share: op, path without numbers, phase, role and slot."""
    s = record.site
    return record.op, any_layer(s.path), s.phase, s.role, s.slot


def _rms(record: Record) -> float:
    """Return the root mean square of a tensor."""
    return (record.summary.l2norm or 0.0) / math.sqrt(record.summary.numel or 1)


@dataclass(eq=False)
class _Sizes:
    """Root mean squares of tensors, and their carriers."""

    found: list[tuple[float, float]] = field(default_factory=list)

    @functools.cached_property
    def usual(self) -> tuple[float, float]:
        """The medians; asked once all are known."""
        rms, carriers = zip(*(self.found or [(0.0, math.inf)]), strict=True)
        return statistics.median(rms), statistics.median(carriers)


@dataclass(eq=False)
class _Family(_Sizes):
    """The tensors of one kind, by their paths."""

    members: dict[str, Member] = field(default_factory=dict)


@dataclass(eq=False)
class Member(_Sizes):
    """The tensors of one kind at one path: what they show, and what others of their kind do.

    ``ratios``: of their errors to what the noise of their inputs explains. ``measured``: the
    amplification that was measured on golden's own model, None if it was not.
    """

    family: _Family = field(default_factory=_Family)
    ratios: list[float] = field(default_factory=list)
    measured: float | None = None

    def chance(self, carriers: float) -> float:
        """Return how many times more than that it may show: the norm of a few may be off.

        This is the chance of one tensor. What is made from it has its own, so the noise that is
        passed on stays below the limit without it.
        """
        usual = self.usual[1]
        return 1 + constants.CARRIER_ERRORS / math.sqrt(max(min(carriers, usual), 1.0))

    def smallness(self, record: Record, carriers: float) -> float:
        """Return how many times smaller than usual a tensor with few carriers is.

        Its terms may cancel by chance. Their rounding does not. A tensor that usually has few
        carriers has more where these happen to be small.
        """
        usual, few = self.usual
        if carriers <= constants.FEW_CARRIERS:
            usual = self.family.usual[0]
        elif few > constants.FEW_CARRIERS:
            return 1.0
        rms = _rms(record)
        return max(1.0, usual / rms) if rms > 0.0 else 1.0

    @property
    def amplification(self) -> float:
        """How many times the noise of the inputs a tensor may show: what siblings show.

        What was measured on golden's own model counts in place of that, and has no upper bound.
        """
        return self._learnt if self.measured is None else self.measured

    @functools.cached_property
    def _learnt(self) -> float:
        members = self.family.members.values()
        others = [statistics.median(m.ratios) for m in members if m is not self and m.ratios]
        learnt = constants.AMPLIFICATION
        if len(others) > 1:
            learnt = constants.SIBLING_SPREAD * statistics.median(others)
        learnt = max(learnt, constants.LEAST_AMPLIFICATION)
        return min(learnt, constants.MOST_AMPLIFICATION)


class Siblings:
    """How calls of one kind amplify the noise of their inputs, learnt from the same run.

    Siblings are the tensors of one op at the same place of their module, in every layer. A path is
    compared with the other paths only, so that a bug does not excuse itself. Their median counts,
    so that the bug does not excuse the others either.

    The *carriers* of a tensor are the elements that carry its norm (`metrics.FIELDS`). Where a few
    channels are far larger than all others, they alone do.
    """

    def __init__(self) -> None:
        self._families: dict[Kind, _Family] = {}
        # by op, path, phase, role and slot
        self._members: dict[Kind, Member] = {}

    def member(self, record: Record) -> Member:
        """Return what is known of the tensors at a record's place, in all steps."""
        s = record.site
        return self._at((record.op, s.path, s.phase, s.role, s.slot))

    def _at(self, place: Kind) -> Member:
        found = self._members.get(place)
        if found is None:
            op, path, *more = place
            family = self._families.setdefault((op, any_layer(path), *more), _Family())
            found = self._members[place] = family.members[path] = Member(family=family)
        return found

    def add(
        self, record: Record, error: float, explained: Explained | None, carriers: float
    ) -> None:
        """Learn from a tensor that both runs have. ``explained``: of an error, if it has one."""
        member = self.member(record)
        size = _rms(record), carriers
        member.found.append(size)
        member.family.found.append(size)
        if explained is None:
            return
        expected = math.hypot(explained.level.error, explained.floor)
        if 0.0 < error < math.inf and explained.level.error > 0.0 and 0.0 < expected < math.inf:
            member.ratios.append(error / expected)

    def calibrate(self, measured: Siblings) -> None:
        """Take the amplifications of calls that were measured on golden's own model."""
        for place, other in measured._members.items():
            if other.ratios:
                member, own = self._at(place), constants.SIBLING_SPREAD * max(other.ratios)
                member.measured = max(member.measured or constants.LEAST_AMPLIFICATION, own)
