"""Weights that the two programs changed between their root calls, and not alike.

Their values at a later step were not recorded, but samples of them were. A call is not blamed for
an error that its changed weights explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import ancestors, is_operator, module_of, within
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.store.weight_history import History, Name, Sample, Step


class _Then(NamedTuple):
    """The weights of one run in a step."""

    history: History
    step: Step

    def latest(self) -> Step:
        return self.history.latest(self.step) or self.step


class _Weight(NamedTuple):
    """A weight of both runs in a step. ``golden``, ``mine``: its samples, of ranks that differ.

    ``began``: what it was in golden and in mine. ``changed``: since then, in either run.
    """

    name: str
    golden: list[Sample]
    mine: list[Sample]
    began: tuple[Sample | None, Sample | None]
    changed: bool

    @property
    def is_alike(self) -> bool:
        """Whether both runs began with the same values, as far as that is known."""
        golden, mine = self.began
        if golden is None or mine is None:
            return True
        return golden.is_of(mine) and not golden.distance(mine)

    @property
    def distance(self) -> float | None:
        """How far mine is from golden; None if the samples can't be compared.

        Of ranks that differ, each one is as far as from the nearest rank of the other run.
        """
        sides = (self.golden, self.mine), (self.mine, self.golden)
        nearest = [
            min((a.distance(b) for b in other if a.is_of(b)), default=None)
            for side, other in sides
            for a in side
        ]
        return max((each for each in nearest if each is not None), default=None)

    @property
    def size(self) -> float:
        return max((each.size for each in (*self.golden, *self.mine)), default=0.0)

    @property
    def moved(self) -> float:
        """How far golden is from where it began."""
        began = self.began[0]
        if began is None:
            return 0.0
        return max((s.distance(began) for s in self.golden if s.is_of(began)), default=0.0)

    @property
    def share(self) -> float:
        """The share of values that moved, in the run in which more did; all if that is unknown."""
        sides = zip((self.golden, self.mine), self.began, strict=True)
        shares = [s.share(began) for side, began in sides for s in side if began is not None]
        return max(shares, default=1.0)

    def may_be(self, row: Difference) -> bool:
        """Tell whether a row may be this weight, as an operator takes it: no call makes it."""
        golden = row.pair.golden
        if golden is None or golden.site.role != "input" or not is_operator(golden.site.path):
            return False
        return golden.producer is None and any(
            s.shape == row.pair.either.summary.shape for s in self.golden
        )

    @property
    def tells(self) -> bool:
        """Whether the samples tell of a change: few values may miss one of single rows."""
        return self.distance is not None and self.share >= constants.MAJORITY


class Updates:
    """The weights of both runs, as their samples tell of them."""

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._differences, self._runs = differences, runs
        self._histories: dict[tuple[int, int], History] = {}  # by side and rank
        self._every: dict[tuple[int, Step, Step], list[_Weight]] = {}  # by golden's history, steps

    def blamed(self, call: ComparedCall, row: Difference) -> tuple[str, str]:
        """Return a cause and a clause, which is "" unless changed weights explain a row of a call.

        They explain as much as a call may amplify, and only pass on what is wrong in a gradient of
        an earlier step. Where samples of its own weights can't tell, those of all weights do, if
        most of them have changed in another way.
        """
        sides = self._sides(call)
        if sides is None or row.error is None:
            return causes.UPDATED, ""
        own, words = self._weights(call, sides), ""
        given = next((each for each in own if each.may_be(row)), None)
        if given is not None:
            words = f"{given.name} differs by {row.error:.2g} (relative L2)"
        elif _explains(own, row.error):
            words = _differs(max(own, key=_own_error))
        elif not all(each.tells for each in own):
            other = self._changed_apart(sides)
            words = "" if other is None else f"samples of them can't tell, but {_differs(other)}"
        if not words:
            return causes.UPDATED, ""
        _, after = max(side.latest() for side in sides)
        words = f"its weights were changed before step {after}, not as in golden: {words}"
        gradient = self._gradient(sides[0])
        if gradient:
            return causes.INHERITED, f"{words}; so does {gradient}"
        return causes.UPDATED, "; ".join(filter(None, (words, self._in_terms_of_golden(sides))))

    def may_explain(self, call: ComparedCall, row: Difference) -> bool:
        """Tell whether a row may follow from weights of other calls, changed since the start."""
        sides = self._sides(call)
        if sides is None or row.error is None:
            return False
        changed = [each for each in self._all(sides) if each.changed and each.is_alike]
        return _explains(changed, row.error)

    def _in_terms_of_golden(self, sides: tuple[_Then, _Then]) -> str:
        """Return a clause on what mine's change of all weights is, of golden's; "" if unknown.

        Another learning rate multiplies it; another decay adds some of the weights.
        """
        values: list[tuple[tuple[float, ...], ...]] = []
        for each in self._all(sides):
            began, golden, mine = each.began[0], each.golden[:1], each.mine[:1]
            if began is None or not golden or not mine or not each.is_alike:
                continue
            if golden[0].is_of(began) and mine[0].is_of(began):
                values.append((began.values, golden[0].values, mine[0].values))
        if not values:
            return ""
        start, theirs, ours = (np.concatenate(part) for part in zip(*values, strict=True))
        times, decay = _factor(ours - start, theirs - start), _factor(ours - theirs, start)
        if times is not None and abs(times - 1) > constants.EVEN_SHARE_OF_CHANGE:
            return f"in all weights, its change is {times:.3g} times golden's"
        if times is None and decay is not None:
            what = f"{'minus' if decay < 0 else 'plus'} {abs(decay):.2g} times the weight"
            return f"its change is golden's {what}, as another weight decay gives"
        return ""

    def unknown(self, call: ComparedCall, row: Difference) -> str:
        """Return a clause on changed weights that may explain a row of a call, "" for none.

        Samples can't tell, or they are weights of other modules inside, which its code may use.
        """
        sides = self._sides(call)
        if sides is None or not row.error:
            return ""
        own = self._weights(call, sides)
        if not all(each.tells for each in own):
            return "its weights were changed before, and samples can't tell whether they agree"
        if _explains(own, row.error, _coherence(own)):
            return f"its weights were changed before: {_differs(max(own, key=_own_error))}"
        if _explains(self._weights(call, sides, inside=True), row.error):
            return "weights inside of it were changed before, not as in golden"
        return ""

    def _sides(self, call: ComparedCall) -> tuple[_Then, _Then] | None:
        if call.golden is None or call.mine is None:
            return None
        return self._then(0, call.golden), self._then(1, call.mine)

    def _then(self, side: int, key: CallKey) -> _Then:
        known = self._histories.get((side, key.rank))
        if known is None:
            run = (self._runs.golden, self._runs.mine)[side].run
            known = self._histories[side, key.rank] = History(run.index, key.rank)
        return _Then(known, (key.generation, key.step))

    @cached_property
    def _called(self) -> set[str]:
        """Golden's modules of which a call was recorded."""
        found = (d.pair.golden for d in self._differences)
        return {module_of(r.site.path) for r in found if r is not None and r.site.role != "weight"}

    def _weights(
        self, call: ComparedCall, sides: tuple[_Then, _Then], inside: bool = False
    ) -> list[_Weight]:
        """Return the changed weights that the code of a call's module uses.

        Those of modules inside that are never called are its own, as of a ParameterList.
        ``inside``: those of the others, too. What differed from the start is left out, and all are
        if no value of any moved: the rate was zero, or the dtype is too coarse for it.
        """
        assert call.golden is not None
        assert call.mine is not None
        paths = module_of(call.golden.path), module_of(call.mine.path)
        found = []
        for golden, mine in self._names(paths, sides):
            around = (golden[0], *ancestors(golden[0]))
            user = next((path for path in around if path in self._called), paths[0])
            if inside or user == paths[0]:
                found.append(_weight(golden, mine, sides))
        changed = [each for each in found if each.changed and each.is_alike]
        return changed if changed and any(each.share for each in self._all(sides)) else []

    def _names(
        self, paths: tuple[str, str], sides: tuple[_Then, _Then]
    ) -> Iterator[tuple[Name, Name]]:
        """Yield the names of weights inside of two modules, in golden and in mine."""
        found = {
            (name[0][len(path) :].lstrip("."), name[1])
            for path, side in zip(paths, sides, strict=True)
            for name in side.history.names
            if name[0] == path or within(name[0], path)
        }
        for rest, slot in sorted(found):
            golden, mine = (".".join(filter(None, (path, rest))) for path in paths)
            yield (golden, slot), (mine, slot)

    def _changed_apart(self, sides: tuple[_Then, _Then]) -> _Weight | None:
        """Return the weight that differs most, if most weights have changed in another way."""
        told = [e for e in self._all(sides) if e.changed and e.is_alike and e.tells]
        shares = [(each.distance or 0.0) / each.moved for each in told if each.moved]
        if not shares or statistics.median(shares) < constants.PASSED_ON_SHARE:
            return None
        return max(told, key=_own_error)

    def _all(self, sides: tuple[_Then, _Then]) -> list[_Weight]:
        """Return all weights that have one name in both runs."""
        golden, mine = sides
        key = id(golden.history), golden.step, mine.step
        if key not in self._every:
            self._every[key] = [_weight(name, name, sides) for name in golden.history.names]
        return self._every[key]

    def _gradient(self, golden: _Then) -> str:
        """Return the first gradient of a weight that differs in an earlier step, or ""."""
        names = set(golden.history.names)
        for d in self._differences:
            s, name = d.site, (d.site.path, unshared(d.site.slot))
            is_wrong = d.verdict == "diverged" and s.role == "grad"
            if is_wrong and (s.generation, s.step) < golden.step and name in names:
                return f"the gradient of {_dotted(name)} in step {s.step}"
        return ""


def _weight(golden: Name, mine: Name, sides: tuple[_Then, _Then]) -> _Weight:
    theirs, ours = sides
    return _Weight(
        _dotted(golden),
        theirs.history.at(golden, theirs.step),
        ours.history.at(mine, ours.step),
        (theirs.history.began(golden), ours.history.began(mine)),
        theirs.history.changed(golden, theirs.step) or ours.history.changed(mine, ours.step),
    )


def _factor(of: np.ndarray, other: np.ndarray) -> float | None:
    """Return the factor by which one vector is the other; None if it is not, but for rounding.

    Changes of float32 weights are rounded as the weights are, which is much for small changes.
    """
    size = float(other @ other)
    factor = float(of @ other) / size if size else 0.0
    left = float(np.linalg.norm(of - factor * other))
    near = left <= constants.EVEN_SHARE_OF_CHANGE * float(np.linalg.norm(of))
    return factor if math.isfinite(factor) and factor and near and of.any() else None


def _explains(weights: Sequence[_Weight], error: float, times: float = 1.0) -> bool:
    """Tell whether weights explain an error. ``times``: how many times theirs, beside what a call
    may amplify."""
    own = _error(weights)
    return own > 0.0 and error <= constants.MOST_AMPLIFICATION * own * times


def _error(weights: Sequence[_Weight]) -> float:
    """Return the relative L2 error of the samples of all these weights together."""
    told = [each for each in weights if each.distance is not None]
    off = math.hypot(*(each.distance or 0.0 for each in told))
    size = math.hypot(*(each.size for each in told))
    return off / size if size and math.isfinite(off) else off


def _coherence(weights: Sequence[_Weight]) -> float:
    """Return how many times more than its size a change may do.

    An optimizer adds products of gradients and inputs. On such inputs, all terms of the change add
    up, and those of the weight as chance has it: the root of their number is between them.
    """
    return math.sqrt(max((n for each in weights for s in each.golden for n in s.shape), default=1))


def _own_error(weight: _Weight) -> float:
    return (weight.distance or 0.0) / (weight.size or 1.0)


def _differs(weight: _Weight) -> str:
    return f"{weight.name} differs by {_own_error(weight):.2g} (relative L2 of a sample)"


def _dotted(name: Name) -> str:
    return ".".join(filter(None, name))
