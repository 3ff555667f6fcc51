"""The error that the rounding of a program explains, tensor by tensor.

Errors are followed in execution order along the tree of calls. The output of a call may differ by
the noise of its inputs, times an *amplification*, and by its own rounding, its *floor*. The two are
independent, so their squares add up:

    limit^2 = (amplification * noise of the inputs)^2 + floor^2

The noise of a tensor is its measured error, as long as it is within the limit. So an error that
does not exist excuses nothing: if two programs agree bit by bit, the limit of a call is its floor.
A tensor that diverged passes on its limit instead of its error, because the consequences of a bug
are inherited errors, not noise. If only a passed-on limit explains an error, we do not amplify it,
and we mark the tensor as *following*: the search for the cause counts it as a difference, here and
wherever the same two tensors are seen again. We do not pass on what chance adds to a limit. A
tensor that is expected to differ passes on its full error, if that is small against the tensor
(`constants.PERTURBED`); it explains its consequences as far as they are small too.

The inputs of a call are its input tensors and weights. Code between modules may use the inputs of
the module around it, and everything recorded inside that module so far. It may also use anything
from earlier steps, because modules keep state such as a cache.

Two figures are followed like this: the error, and the *scale error*. Rounding varies randomly from
element to element; an error that is more even than that is a scale error, a common factor of all
elements. So a common factor is detected even if it is far smaller than the limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from llmdebug_nb.comparison.weight_noise import Still, WeightNoise, Weights
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import SINGLE
from llmdebug_nb.core.paths import ancestors, is_operator, module_of
from llmdebug_nb.core.records import Site, Summary


def floor(eps: float, length: int) -> float:
    """Return the relative L2 error that the rounding of one operator explains.

    One eps for the result (rounding each element gives about 0.2 eps). A sum of ``length`` products
    of random signs gives at most 0.2 sqrt(length) eps, less by blocked summation (Higham, Accuracy
    and Stability, 4.2).
    """
    return eps + constants.SUM_SHARE * math.sqrt(length) * min(eps, SINGLE)


def scale_floor(eps: float, length: int) -> float:
    """Return the scale error that the rounding of one operator explains.

    That is the rounding of a common factor, which is computed in float32 at least.
    """
    of_sum = 1 + constants.SCALE_SUM_SHARE * math.sqrt(length)
    return constants.SCALE_SHARE * eps + of_sum * min(eps, SINGLE)


@dataclass(slots=True)
class Level:
    """An amount of noise.

    ``error``, ``scale``: the largest that was measured. ``cap``, ``scale_cap``: the largest limit
    of tensors that diverged. ``expected``: some of it comes from an expected difference. ``tied``:
    some tokens go on with another choice, see `untouched.py`; what else is here is of the others.
    ``unseen``: the error that statistics may hide, see `tolerance.unseen`, `choices.moved_norm`.
    """

    error: float = 0.0
    cap: float = 0.0
    scale: float = 0.0
    scale_cap: float = 0.0
    expected: bool = False
    tied: bool = False
    unseen: float = 0.0

    def add(self, other: Level) -> None:
        # written out: it is called some twenty times a tensor
        if other.error > self.error:
            self.error = other.error
        if other.cap > self.cap:
            self.cap = other.cap
        if other.scale > self.scale:
            self.scale = other.scale
        if other.scale_cap > self.scale_cap:
            self.scale_cap = other.scale_cap
        if other.expected:
            self.expected = True
        if other.tied:
            self.tied = True
        if other.unseen > self.unseen:
            self.unseen = other.unseen

    @property
    def is_none(self) -> bool:
        """True if there is no noise at all."""
        some = self.error or self.cap or self.scale or self.scale_cap or self.unseen
        return not (some or self.expected or self.tied)

    @property
    def noise(self) -> float:
        """The largest error that was measured, or may be hidden."""
        return max(self.error, self.unseen)

    def limit(self, amplification: float, own: float) -> float:
        return math.hypot(max(amplification * self.noise, self.cap), own)

    def scale_limit(self, amplification: float, own: float) -> float:
        by_chance = constants.EVEN_BY_CHANCE * max(amplification * self.noise, self.cap)
        return math.hypot(max(amplification * self.scale, self.scale_cap), own, by_chance)


@dataclass(slots=True)
class _RunningCall:
    """The current call of a path, or its last one.

    ``inside``: noise of its inputs and of everything recorded inside it; ``before``: the same for
    earlier calls. ``has_outputs``: it gave a tensor that rounds. ``seen``: paths recorded inside
    it. ``eps``, ``length``: the coarsest epsilon and the longest axis of its inputs.
    ``rewritten``: it has an input without a partner, so the other run computes it differently.
    ``given``: the largest gradient that it is given, by the length of each axis: L2 norm and sum.
    """

    key: tuple[int, int, str]
    inside: Level = field(default_factory=Level)
    before: Level = field(default_factory=Level)
    has_inputs: bool = False
    has_outputs: bool = False
    seen: set[str] = field(default_factory=set)
    eps: float = 0.0
    length: int = 1
    rewritten: bool = False
    given: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Explained:
    """The explanation of a tensor's error: the noise of the inputs, and the floors of its call."""

    level: Level
    floor: float
    scale_floor: float


class NoiseLimits(NamedTuple):
    """The limits of a tensor's error and scale error.

    ``usual``: without what chance adds. ``noise``: that, without the limits of what diverged.
    """

    error: float
    scale: float
    usual: float
    noise: float


class NoisePropagation:
    """Follows noise through a run: `explain` each tensor in execution order, then `record` it.

    ``size``: number of modules inside a path, without itself. ``weights``: golden's.
    """

    def __init__(self, size: Callable[[str], int], weights: Weights | None = None) -> None:
        self._size = size
        self.of_weights = WeightNoise(weights or Still())
        # by rank and generation, then by path
        self._calls: dict[tuple[int, int], dict[str, _RunningCall]] = defaultdict(dict)
        self._so_far: dict[tuple[int, int], Level] = defaultdict(Level)
        self._weights: dict[tuple[int, str], Level] = defaultdict(Level)
        # of all modules inside a path: what made an input that was not recorded is not known
        self._weights_inside: dict[tuple[int, str], Level] = defaultdict(Level)
        self._sees_inputs = False  # those of operators were recorded
        # by epsilon and length: the floors of error and scale error
        self._floors: dict[tuple[float, int], tuple[float, float]] = {}

    def explain(
        self,
        site: Site,
        eps: float,
        shape: tuple[int, ...],
        replaced: bool = False,
        rounding: float = 0.0,
    ) -> Explained:
        """Return what explains an error of the tensor at a site.

        ``eps``: of the coarser side. ``replaced``: the two runs compute it by other operators.
        ``rounding``: the error that its call makes of the inputs, see `input_rounding.py`.
        """
        length = max(shape, default=1)
        if site.role == "weight":
            # with factors, it was multiplied, and its factors were, in both programs
            floors = 2 * constants.GLUE_FLOORS if replaced else 1.0
            return self._explained(Level(), eps, 1, floors)
        if site.role == "input":
            found = self._enclosing(site)
            if found is None:  # from outside the model: made from what ran before, if at all
                return self._explained(self._so_far[site.rank, site.generation], eps, 1, 1.0)
            path, around = found
            level = _sum(around.inside, around.before, self._weights.get((site.rank, path)))
            self._add_changed(level, site, path)
            return self._explained(level, eps, length, constants.GLUE_FLOORS)
        call, module = self._call(site), module_of(site.path)
        level = _sum(call.inside, call.before, self._weights.get((site.rank, site.path)))
        self._add_changed(level, site, module)
        level.error = math.hypot(level.error, rounding)
        if not call.has_inputs or call.rewritten:
            found = self._enclosing(site)
            if found is not None:
                level.add(found[1].inside)
                level.add(found[1].before)
                level.add(self._weights_inside.get((site.rank, found[0]), Level()))
            elif call.rewritten:  # no module around it was recorded
                level.add(self._so_far[site.rank, site.generation])
            level.add(self._weights.get((site.rank, module), Level()))
        hidden = max(0, self._size(site.path) - len(call.seen))
        several = hidden or call.seen or replaced or call.rewritten
        floors = constants.GLUE_FLOORS * math.sqrt(1 + hidden) if several else 1.0
        length = call.length if call.has_inputs else max(length, call.length)
        return self._explained(level, max(eps, call.eps), length, floors)

    def _explained(self, level: Level, eps: float, length: int, floors: float) -> Explained:
        if (eps, length) not in self._floors:
            self._floors[eps, length] = floor(eps, length), scale_floor(eps, length)
        of_error, of_scale = self._floors[eps, length]
        return Explained(level, floors * of_error, floors * of_scale)

    def _add_changed(self, level: Level, site: Site, path: str) -> None:
        """Add the noise that the weights of a module have since the program changed them."""
        error = self.of_weights.of(site.rank, path, (site.generation, site.step))
        level.error = max(level.error, error)

    def add_unpaired(self, site: Site, eps: float, shape: tuple[int, ...]) -> None:
        """Take in an input without a partner: its dtype and shape count, its noise is unknown."""
        if site.role == "input" and eps:
            self._sees_inputs = self._sees_inputs or is_operator(site.path)
            call = self._call(site)
            call.eps, call.length = max(call.eps, eps), max(call.length, *shape, 1)
            call.rewritten = True

    def record(self, site: Site, level: Level, eps: float, summary: Summary) -> None:
        """Take in the noise of the tensor that was explained last."""
        if site.role == "weight":
            self._weights[site.rank, site.path].add(level)
            for path in ancestors(site.path):
                self._weights_inside[site.rank, path].add(level)
            return
        call = self._call(site)
        if site.role == "input":
            call.has_inputs = True
            self._sees_inputs = self._sees_inputs or is_operator(site.path)
            if eps:
                call.eps = max(call.eps, eps)
                call.length = max(call.length, *summary.shape, 1)
                if site.phase == "backward":
                    for length in summary.shape:
                        call.given[length] = max(_sums(summary), call.given.get(length, (0.0, 0.0)))
        elif eps:
            call.has_outputs = True
        calls, is_none = self._calls[site.rank, site.generation], level.is_none
        if not is_none:
            call.inside.add(level)
            self._so_far[site.rank, site.generation].add(level)
        for path in ancestors(site.path):
            around = calls.get(path)
            if around is not None:
                around.seen.add(site.path)
                if not is_none:
                    around.inside.add(level)

    def cancelled(self, site: Site, summary: Summary, eps: float) -> float:
        """Return how many times smaller than its terms the gradient of a bias is.

        It is the sum over all axes but one of the gradient that a call is given, which shows in the
        sum of all elements. Where the terms cancel, as for the bias of keys, which softmax does not
        see, their rounding does not. If none cancel by more than chance has it, the gradient is as
        large as all terms in L2 norm.
        """
        call = self._calls[site.rank, site.generation].get(site.path)
        if site.role != "grad" or len(summary.shape) != 1 or call is None:
            return 1.0
        (size, total), (n,) = _sums(summary), summary.shape
        terms, sum_of_terms = call.given.get(n, (0.0, 0.0))
        # each element may be off by what an operator may be, times the norm of its own terms
        rounding = constants.OPERATOR_EPSILONS * eps / 2 * math.sqrt(n) * terms
        is_sum = abs(total - sum_of_terms) <= rounding
        return max(1.0, terms / size) if size and is_sum else 1.0

    def may_choose(self, site: Site) -> bool:
        """Tell whether rounding may decide what a call gives: it takes numbers that round.

        An operator that counts, or computes with whole numbers, chooses nothing.
        """
        takes = self._call(site).eps or not self._sees_inputs
        return bool(takes) or not is_operator(site.path)

    def has_outputs(self, site: Site) -> bool:
        """Tell whether the call of a site has an output that rounds, so far."""
        return self._call(site).has_outputs

    def is_outermost(self, site: Site) -> bool:
        """Tell whether no recorded module is around the call of a site."""
        calls = self._calls[site.rank, site.generation]
        return not any(path in calls for path in ancestors(site.path))

    def _call(self, site: Site) -> _RunningCall:
        calls, key = self._calls[site.rank, site.generation], (site.step, site.call, site.phase)
        call = calls.get(site.path)
        if call is None or call.key != key:
            before = Level() if call is None else _sum(call.inside, call.before)
            call = calls[site.path] = _RunningCall(key, before=before)
        return call

    def _enclosing(self, site: Site) -> tuple[str, _RunningCall] | None:
        """Return the nearest module around a call, and its call.

        A gradient reaches an inner module before the module around it, if both give one tensor. So
        a module whose backward pass has not begun tells nothing of it; the one around it does.
        """
        calls = self._calls[site.rank, site.generation]
        for path in ancestors(site.path):
            call = calls.get(path)
            if call is None:
                continue
            if site.phase == "forward" or (call.key[0], call.key[2]) == (site.step, site.phase):
                return path, call
        return None


def _sums(summary: Summary) -> tuple[float, float]:
    """Return the L2 norm of a tensor, and the sum of its elements."""
    return summary.l2norm or 0.0, (summary.mean or 0.0) * summary.numel


def _sum(inside: Level, before: Level, weights: Level | None = None) -> Level:
    total = Level(
        inside.error, inside.cap, inside.scale, inside.scale_cap, inside.expected, inside.tied,
        inside.unseen,
    )  # fmt: skip
    total.add(before)
    if weights is not None:
        total.add(weights)
    return total
