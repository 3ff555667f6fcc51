"""Weights that the two programs changed between their root calls, and not alike.

Their values at a later step were not recorded, but samples of them were. A call is not blamed for
an error that its changed weights explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from llmdebug_nb.core import constants
from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.core.updates import History, Name, Step
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import ComparedCall
from llmdebug_nb.explain.runs import Runs

_NOTHING = causes.UPDATED, ""


class _Then:
    """The weights of one run in a step."""

    def __init__(self, history: History, step: Step) -> None:
        self.history, self.step = history, step

    def slots(self, path: str) -> list[str]:
        return [slot for place, slot in self.history.samples if place == path]

    def changed(self, name: Name) -> bool:
        return self.history.changed(name, self.step)


class Updates:
    """The weights of both runs, as their samples tell of them."""

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._differences, self._runs = differences, runs
        self._histories: dict[tuple[int, int], History] = {}  # by side and rank

    def blamed(self, call: ComparedCall, row: Difference) -> tuple[str, str]:
        """Return a cause and a clause, which is "" unless changed weights explain a row of a call.

        They only pass on what is wrong in a gradient of an earlier step.

        An optimizer adds products of gradients and inputs to a weight. Such a change acts on such
        inputs in full; the weight acts as chance has it, less by the root of the axis summed over.
        Rows of an embedding change by themselves: then other weights tell.
        """
        if call.golden is None or call.mine is None or row.error is None:
            return _NOTHING
        golden, mine = self._then(0, call.golden), self._then(1, call.mine)
        paths = module_of(call.golden.path), module_of(call.mine.path)
        names = [((paths[0], slot), (paths[1], slot)) for slot in golden.slots(paths[0])]
        own = _errors(golden, mine, names)
        if not own:
            return _NOTHING
        longest = max(s.longest for name in own for s in golden.history.at(name, golden.step))
        least = row.error / (constants.AMPLIFICATION * math.sqrt(longest))
        name, worst = _largest(own)
        if worst < least and any(golden.changed(g) or mine.changed(m) for g, m in names):
            every = golden.history.samples
            name, worst = _largest(_errors(golden, mine, [(each, each) for each in every]))
        if worst < least:
            return _NOTHING
        steps = [each.history.latest(each.step) for each in (golden, mine)]
        _, after = max((each for each in steps if each is not None), default=golden.step)
        words = f"its weights were changed before step {after}, not as in golden: "
        words += f"{_dotted(name)} differs by {worst:.2g} (relative L2 of a sample)"
        gradient = self._gradient(golden)
        if gradient:
            return causes.INHERITED, f"{words}; so does {gradient}"
        return causes.UPDATED, words

    def are_unknown(self, call: ComparedCall) -> bool:
        """Tell whether a call's weights changed in one run, and nothing is known of the other's.

        Parts of weights that lie on several ranks are not followed.
        """
        if call.golden is None or call.mine is None:
            return False
        sides = self._then(0, call.golden), self._then(1, call.mine)
        paths = module_of(call.golden.path), module_of(call.mine.path)
        return any(
            not other.history.samples and any(own.changed((path, s)) for s in own.slots(path))
            for own, other, path in zip(sides, sides[::-1], paths, strict=True)
        )

    def _then(self, side: int, key: CallKey) -> _Then:
        known = self._histories.get((side, key.rank))
        if known is None:
            run = (self._runs.golden, self._runs.mine)[side].run
            known = self._histories[side, key.rank] = History(run.index, key.rank)
        return _Then(known, (key.generation, key.step))

    def _gradient(self, golden: _Then) -> str:
        """Return the first gradient of a weight that differs in an earlier step, or ""."""
        for d in self._differences:
            s, name = d.site, (d.site.path, unshared(d.site.slot))
            is_wrong = d.verdict == "diverged" and s.role == "grad"
            if is_wrong and (s.generation, s.step) < golden.step and name in golden.history.samples:
                return f"the gradient of {_dotted(name)} in step {s.step}"
        return ""


def _errors(
    golden: _Then, mine: _Then, names: Iterable[tuple[Name, Name]]
) -> dict[Name, float | None]:
    """Return the errors of weights. ``names``: in golden, and in mine."""
    found: dict[Name, float | None] = {}
    for theirs, ours in names:
        its, own = golden.history.at(theirs, golden.step), mine.history.at(ours, mine.step)
        if its and own:
            errors = [each.error(other) for each in its for other in own]
            found[theirs] = max((each for each in errors if each is not None), default=None)
    return found


def _largest(errors: dict[Name, float | None]) -> tuple[Name, float]:
    told = [(name, each) for name, each in errors.items() if each is not None]
    return max(told, key=lambda each: each[1], default=(("", ""), 0.0))


def _dotted(name: Name) -> str:
    return ".".join(filter(None, name))
