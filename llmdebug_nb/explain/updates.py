"""Weights that the two programs changed between their root calls, and not alike.

Their values at a later step were not recorded, but samples of them were. A call is not blamed for
an error that its changed weights explain.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

from llmdebug_nb.core import constants
from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.placement import unshared
from llmdebug_nb.core.updates import UPDATED, Sample, error, sample_of
from llmdebug_nb.explain.calls import ComparedCall
from llmdebug_nb.explain.runs import Runs, Side

_Step: TypeAlias = tuple[int, int]  # generation and step
_Name: TypeAlias = tuple[str, str]  # path of a module, name of its weight


class Updates:
    """The weights of both runs, as their samples tell of them."""

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._differences, self._runs = differences, runs
        self._worst: dict[_Step, tuple[float, _Name]] = {}

    def words(self, call: ComparedCall, row: Difference) -> str:
        """Return a clause on changed weights that explain a row of a call, "" if none do.

        An optimizer adds products of gradients and inputs to a weight. Such a change acts on such
        inputs in full; the weight acts as chance has it, less by the root of the axis summed over.
        Rows of an embedding change by themselves: then other weights tell.
        """
        golden, mine = self._sides
        step = call.key.generation, call.key.step
        own = self._changed(call, step)
        if not own or row.error is None:
            return ""
        longest = max(golden.longest(name) for name in own)
        least = row.error / (constants.AMPLIFICATION * math.sqrt(longest))
        told = [(found, name) for name, found in own.items() if found is not None]
        worst, name = max(told, default=(0.0, ("", "")))
        if worst < least:
            worst, name = self._worst_of(step)
        if worst < least:
            return ""
        after = max(golden.latest(step), mine.latest(step))
        words = f"its weights were changed before step {after[1]}, not as in golden: "
        words += f"{'.'.join(filter(None, name))} differs by {worst:.2g} (relative L2 of a sample)"
        gradient = self._wrong_gradient(step)
        return f"{words}; so does {gradient}" if gradient else words

    def are_unknown(self, call: ComparedCall) -> bool:
        """Tell whether one run's weights of a call have changed, and nothing tells how mine's did.

        Parts of weights that lie on several ranks are not followed.
        """
        step = call.key.generation, call.key.step
        for side, other, key in zip(
            self._sides, self._sides[::-1], (call.golden, call.mine), strict=True
        ):
            if key is None:
                continue
            path = module_of(key.path)
            own = [name for name in side.names if name[0] == path and side.changed(name, step)]
            if own and not other.names:
                return True
        return False

    @cached_property
    def _sides(self) -> tuple[_Samples, _Samples]:
        return _Samples(self._runs.golden), _Samples(self._runs.mine)

    def _changed(self, call: ComparedCall, step: _Step) -> dict[_Name, float | None]:
        """Return the errors of those weights of a call's module that were changed, by name."""
        if call.golden is None or call.mine is None:
            return {}
        paths = module_of(call.golden.path), module_of(call.mine.path)
        return self._errors([((paths[0], s), (paths[1], s)) for s in self._slots(paths[0])], step)

    def _slots(self, path: str) -> list[str]:
        return [slot for place, slot in self._sides[0].names if place == path]

    def _worst_of(self, step: _Step) -> tuple[float, _Name]:
        """Return the largest error of all weights that were changed, and which has it."""
        if step not in self._worst:
            errors = self._errors([(name, name) for name in self._sides[0].names], step)
            told = ((found, name) for name, found in errors.items() if found is not None)
            self._worst[step] = max(told, default=(0.0, ("", "")))
        return self._worst[step]

    def _errors(
        self, names: Sequence[tuple[_Name, _Name]], step: _Step
    ) -> dict[_Name, float | None]:
        """Return the errors of changed weights. ``names``: in golden, and in mine."""
        found: dict[_Name, float | None] = {}
        for both in names:
            samples = [side.at(name, step) for side, name in zip(self._sides, both, strict=True)]
            changed = [s.changed(name, step) for s, name in zip(self._sides, both, strict=True)]
            golden, mine = samples
            if golden is not None and mine is not None and any(changed):
                found[both[0]] = error(golden, mine)
        return found

    def _wrong_gradient(self, step: _Step) -> str:
        """Return the first gradient of a weight that differs in an earlier step, "" for none."""
        for d in self._differences:
            s = d.site
            if (
                d.verdict == "diverged"
                and s.role == "grad"
                and (s.generation, s.step) < step
                and (s.path, unshared(s.slot)) in self._sides[0].names
            ):
                return (
                    f"the gradient of {'.'.join(filter(None, (s.path, unshared(s.slot))))} in "
                    f"step {s.step}"
                )
        return ""


class _Samples:
    """The samples of one run."""

    def __init__(self, side: Side) -> None:
        self.names: dict[_Name, list[tuple[_Step, Sample]]] = defaultdict(list)
        for row in side.run.index.scalars(role=UPDATED):
            sample = sample_of(row.value)
            if sample is not None:
                self.names[row.path, row.slot].append(((row.generation, row.step), sample))
        self.names.default_factory = None
        for several in self.names.values():
            several.sort(key=operator.itemgetter(0))

    def at(self, name: _Name, step: _Step) -> Sample | None:
        """Return what a weight was in a step; None if that is not known."""
        at = self._index(name, step)
        return self.names[name][at][1] if at >= 0 else None

    def changed(self, name: _Name, step: _Step) -> bool:
        """Tell whether a weight has changed by a step since it was first seen."""
        return self._index(name, step) > 0

    def latest(self, step: _Step) -> _Step:
        """Return the last step, up to this one, before which weights were changed."""
        every = (found for several in self.names.values() for found, _ in several[1:])
        return max((found for found in every if found <= step), default=(0, 0))

    def longest(self, name: _Name) -> int:
        """Return the length of a weight's longest axis."""
        kinds = (sample.kind for _, sample in self.names.get(name, ()))
        return max((int(n) for kind in kinds for n in re.findall(r"\b\d+\b", kind)), default=1)

    def _index(self, name: _Name, step: _Step) -> int:
        several = self.names.get(name, [])
        return bisect.bisect_right(several, step, key=operator.itemgetter(0)) - 1
