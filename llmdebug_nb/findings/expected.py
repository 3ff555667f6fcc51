"""Behind a difference that is expected: does a region make an error, or only pass that one on?

The size of an expected difference explains small errors behind it (`comparison/tolerance.py`).
What is larger has to be proven here. A tensor that is seen again is the same difference. A call
that gives golden's result on golden's inputs, or an operator that computes what it should on its
own, adds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from llmdebug_nb.causes import verify
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.paths import ancestors, within
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search import near_tie


class PassedOn:
    """Tells of the regions of one phase whether they only pass expected differences on.

    ``ties``: how many tokens the steps of those rows have that differ by a near tie.
    """

    def __init__(
        self,
        differences: Sequence[Difference],
        phase: str,
        runs: Runs,
        ties: Mapping[int, int] | None = None,
    ) -> None:
        self._differences, self._phase, self._runs = differences, phase, runs
        self._ties = ties or {}
        self._proven: dict[int, bool] = {}  # by the id of the call

    def __call__(self, region: Region) -> bool:
        if any(region.row.content in d.contents for d in region.expected):
            return True
        if self._ties and self._behind(region):
            return True
        return any(map(self._is_proven, self._around(region)))

    @cached_property
    def _behind(self) -> near_tie.Behind:
        sites = {d.index: d.site for d in self._differences if d.index in self._ties}
        steps = {(at.generation, at.step): self._ties[index] for index, at in sites.items()}
        rows = [d for d in self._differences if d.site.phase == self._phase]
        return near_tie.Behind(steps, self._runs, Flow(rows, 0))

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self._differences, self._phase)

    @cached_property
    def _modules(self) -> dict[tuple[object, ...], list[ComparedCall]]:
        """The calls of modules that both programs make, by pass and golden's path."""
        found: dict[tuple[object, ...], list[ComparedCall]] = defaultdict(list)
        for call in self._calls.all:
            if not call.is_operator and not call.one_sided:
                found[(*call.key[:3], call.path)].append(call)
        return found

    def _around(self, region: Region) -> Iterator[ComparedCall]:
        """Yield the calls that make all of a region: its own one, then the module around it."""
        call = self._calls.of(region.row)
        if call is None:
            return
        if region.is_one_call:
            yield call
        for path in ancestors(call.path):
            for module in self._modules.get((*call.key[:3], path), ()):
                if self._calls.is_inside(call, module) and _holds(module, region):
                    yield module
                    return

    def _is_proven(self, call: ComparedCall) -> bool:
        if id(call) not in self._proven:
            self._proven[id(call)] = verify.passes_on(call, self._runs)
        return self._proven[id(call)]


def _holds(module: ComparedCall, region: Region) -> bool:
    """Tell whether a region is inside a module: its calls are, and it does not end at an input."""
    sides = (module.golden, region.golden), (module.mine, region.mine)
    inside = all(
        key is not None and within(call.key.path, key.path)
        for key, calls in sides
        for call in calls
    )
    return inside and all(d.content != region.row.content for d in module.inputs)
