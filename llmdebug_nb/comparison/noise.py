"""How much error the rounding of a program explains, site by site.

Errors are followed in execution order along the tree of calls. What a call puts out may differ by what it was given, times an
*amplification*, and by its own rounding, its *floor*; the two are independent, so their squares add up:

    limit^2 = (amplification * noise of what it was given)^2 + floor^2

The noise of a tensor is its error as measured, as long as that is within its limit. So nothing is excused by an
error that isn't there: in a program that is otherwise the same bit by bit, the limit of a call is its floor. Beyond a
tensor that diverged, its limit is passed on in place of its error: what follows a bug inherits it, and is no noise. What is expected to
differ passes on its error as it is, like noise: it explains what follows from it, and nothing that is larger.

A call has been given its inputs and weights; the code of a module that was not recorded, all that its module was given
and all that was recorded inside it so far; and, as modules keep state such as a cache, what it had in earlier steps.

Two figures are followed in this way: the error itself, and the *scale error* where it is too even to come from
rounding, which falls on each element by chance. An even factor is found far below the error that rounding may make.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.paths import ancestors, any_layer
from llmdebug_nb.core.records import Record, Site

SINGLE = 2.0**-23  # eps of float32, in which sums of narrower dtypes are accumulated
GLUE = 2.0  # code between the modules is several operators
AMPLIFIES, LEAST, MOST = (
    3.0,
    1.75,
    8.0,
)  # where no siblings tell, and the range of what they may tell
SLACK = 2.25  # times what siblings do
CHANCE = 4.0  # standard errors of the norm of so many random elements
EVEN_T, EVEN_SHARE = (
    8.0,
    0.25,
)  # a scale error is even: in standard errors, and as a share of the error
EVEN_BY_CHANCE = 0.2  # as much of the noise that a call passes on may have become even
FEW = 8  # elements, of which all may be small by chance
_NUMBER = re.compile(r"\d+")


@functools.cache
def eps_of(dtype: str) -> float:
    """Return the machine epsilon of a dtype; 0 if it does not round."""
    kind = DTYPES.get(dtype)
    if kind is not None and kind.is_complex:
        kind = kind.to_real()
    return torch.finfo(kind).eps if kind is not None and kind.is_floating_point else 0.0


def floor(eps: float, length: int) -> float:
    """Return the relative L2 error that one operator's own rounding explains.

    One eps for the result (rounding each element makes about 0.2), and for a sum of ``length`` products of
    random signs 0.2 sqrt(length) eps at most, which blocked summation makes smaller (Higham, Accuracy and Stability, 4.2).
    """
    return eps + math.sqrt(length) / 8 * min(eps, SINGLE)


def scale_floor(eps: float, length: int) -> float:
    """Return the even scale error that one operator's own rounding explains: that of a factor computed in float32 at least."""
    return eps / 20 + (1 + math.sqrt(length) / 16) * min(eps, SINGLE)


@dataclass(slots=True)
class Level:
    """How much noise there is. ``error``, ``scale``: the largest as measured; ``cap``, ``scale_cap``: of those that diverged, the largest limit.

    ``expected``: some of it comes from what is expected to differ.
    """

    error: float = 0.0
    cap: float = 0.0
    scale: float = 0.0
    scale_cap: float = 0.0
    expected: bool = False

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

    def limit(self, amplification: float, own: float) -> float:
        return math.hypot(max(amplification * self.error, self.cap), own)

    def scale_limit(self, amplification: float, own: float) -> float:
        by_chance = EVEN_BY_CHANCE * max(amplification * self.error, self.cap)
        return math.hypot(max(amplification * self.scale, self.scale_cap), own, by_chance)


@dataclass(slots=True)
class _Call:
    """The running or last call of a path. ``inside``: what it was given and what was recorded within; ``before``: in earlier calls."""

    key: tuple[int, int, str]
    inside: Level = field(default_factory=Level)
    before: Level = field(default_factory=Level)
    has_inputs: bool = False
    has_outputs: bool = False  # that round
    seen: set[str] = field(default_factory=set)
    eps: float = 0.0
    length: int = 1
    otherwise: bool = (
        False  # it is given something that has no partner: the other run computes it in another way
    )


@dataclass(slots=True)
class Explained:
    """What explains a tensor's error: noise, and the floors of the call that made it."""

    level: Level
    floor: float
    scale_floor: float


class Flow:
    """Follows noise along a run: `explain` each tensor in execution order, then `note` what became of it.

    ``size``: how many modules there are within a path, itself not counted.
    """

    def __init__(self, size: Callable[[str], int]) -> None:
        self._size = size
        self._calls: dict[tuple[int, int, str], _Call] = {}
        self._so_far: dict[tuple[int, int], Level] = defaultdict(Level)
        self._weights: dict[tuple[int, str], Level] = defaultdict(Level)

    def explain(
        self, site: Site, eps: float, shape: tuple[int, ...], replaced: bool = False
    ) -> Explained:
        """Return what explains an error of the tensor at a site. ``eps``: the coarser of both sides. ``replaced``: other operators made it."""
        length = max(shape, default=1)
        if site.role == "weight":
            return Explained(Level(), floor(eps, 1), scale_floor(eps, 1))
        if site.role == "input":
            around = self._enclosing(site)
            if (
                around is None
            ):  # given from outside: by what ran before, an encoder say, if by anything
                return _explained(self._so_far[site.rank, site.generation], eps, 1, 1.0)
            return _explained(_sum(around.inside, around.before), eps, length, GLUE)
        call = self._call(site)
        level = _sum(call.inside, call.before, self._weights[site.rank, site.path])
        if not call.has_inputs or call.otherwise:
            around = self._enclosing(site)
            level = _sum(level, *([around.inside, around.before] if around is not None else []))
        hidden = max(0, self._size(site.path) - len(call.seen))
        steps = (
            GLUE * math.sqrt(1 + hidden)
            if hidden or call.seen or replaced or call.otherwise
            else 1.0
        )
        return _explained(
            level,
            max(eps, call.eps),
            call.length if call.has_inputs else max(length, call.length),
            steps,
        )

    def pass_by(self, site: Site, eps: float, shape: tuple[int, ...]) -> None:
        """Take in an input that has no partner: how long the sums of its call are, though not how much noise there was."""
        if site.role == "input" and eps:
            call = self._call(site)
            call.eps, call.length, call.otherwise = (
                max(call.eps, eps),
                max(call.length, *shape, 1),
                True,
            )

    def note(self, site: Site, level: Level, eps: float, shape: tuple[int, ...]) -> None:
        """Take in how much noise there was in the tensor last explained."""
        if site.role == "weight":
            self._weights[site.rank, site.path].add(level)
            return
        call = self._call(site)
        if site.role == "input":
            call.has_inputs = True
            if eps:
                call.eps = max(call.eps, eps)
                call.length = max(call.length, *shape, 1)
        elif eps:
            call.has_outputs = True
        call.inside.add(level)
        self._so_far[site.rank, site.generation].add(level)
        for path in ancestors(site.path):
            around = self._calls.get((site.rank, site.generation, path))
            if around is not None:
                around.inside.add(level)
                around.seen.add(site.path)

    def has_outputs(self, site: Site) -> bool:
        """Tell whether the call of a site has put out a tensor that rounds."""
        return self._call(site).has_outputs

    def is_outermost(self, site: Site) -> bool:
        """Tell whether nothing that was recorded holds the call of a site."""
        return self._enclosing(site) is None

    def _call(self, site: Site) -> _Call:
        at, key = (site.rank, site.generation, site.path), (site.step, site.call, site.phase)
        call = self._calls.get(at)
        if call is None or call.key != key:
            before = Level() if call is None else _sum(call.inside, call.before)
            call = self._calls[at] = _Call(key, before=before)
        return call

    def _enclosing(self, site: Site) -> _Call | None:
        for path in ancestors(site.path):
            call = self._calls.get((site.rank, site.generation, path))
            if call is not None:
                return call
        return None


def _sum(*levels: Level) -> Level:
    total = Level()
    for level in levels:
        total.add(level)
    return total


def _explained(level: Level, eps: float, length: int, steps: float) -> Explained:
    return Explained(level, steps * floor(eps, length), steps * scale_floor(eps, length))


class Siblings:
    """How calls of one kind amplify what they are given, learnt from the same run.

    Of a kind are the tensors of one op at one place of its module, whatever its layer. A path is held against the others, so that
    no bug excuses itself; the median, so that it does not excuse others.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._told: dict[tuple[tuple[str, ...], str], float] = {}
        self._sizes: dict[tuple[str, ...], list[float]] = defaultdict(
            list
        )  # root mean square of each tensor
        self._usual: dict[tuple[str, ...], float] = {}

    def see(self, record: Record, error: float, explained: Explained) -> None:
        self._sizes[kind_of(record)].append(_rms(record))
        expected = math.hypot(explained.level.error, explained.floor)
        if 0.0 < error < math.inf and explained.level.error > 0.0 and 0.0 < expected < math.inf:
            self._seen[kind_of(record)][record.site.path].append(error / expected)

    def amplification(self, record: Record) -> float:
        """Return how much of the noise it was given a tensor may show; of few elements more, by chance."""
        return self._told_of(record) * (1 + CHANCE / math.sqrt(record.summary.numel or 1))

    def smallness(self, record: Record) -> float:
        """Return how many times smaller a tensor of few elements is than such tensors are: what its terms cancel to is small, and their rounding is not."""
        if record.summary.numel > FEW:
            return 1.0
        kind, rms = kind_of(record), _rms(record)
        if kind not in self._usual:
            self._usual[kind] = statistics.median(self._sizes[kind]) if self._sizes[kind] else 0.0
        return max(1.0, self._usual[kind] / rms) if rms > 0.0 else 1.0

    def _told_of(self, record: Record) -> float:
        kind, path = kind_of(record), record.site.path
        if (kind, path) not in self._told:
            others = [
                statistics.median(ratios)
                for other, ratios in self._seen[kind].items()
                if other != path
            ]
            told = SLACK * statistics.median(others) if len(others) > 1 else AMPLIFIES
            self._told[kind, path] = min(max(told, LEAST), MOST)
        return self._told[kind, path]


def _rms(record: Record) -> float:
    return (record.summary.l2norm or 0.0) / math.sqrt(record.summary.numel or 1)


def kind_of(record: Record) -> tuple[str, ...]:
    """Return what siblings have in common: op, place in the model whatever the layer, and slot."""
    s = record.site
    return record.op, any_layer(s.path), s.phase, s.role, s.slot
