"""Tensors that the model itself is given in one program alone, such as positions or a mask.

Golden's argument is given to mine's live model, or is kept from golden's; mine's own is left out.
Where no model is live, golden's must be what the wrong tensor is made of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from llmdebug_nb.causes import repairs
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.replay.swap import LEFT_OUT, LiveCall


class Argument(NamedTuple):
    """An argument of the model that one program lacks. ``words``: a clause on what it does.

    ``own``: mine's model makes something in its place, as it knows no such argument.
    """

    call: ComparedCall
    row: Difference
    words: str
    own: bool


class RootArguments:
    """The arguments that make an error. ``flows``: the tensors of golden and of mine."""

    def __init__(self, calls: Calls, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self._calls, self._flows, self._runs = calls, flows, runs
        # by call and slot, with `Argument.own`; None: could not be computed
        self._known: dict[object, tuple[str, bool] | None] = {}

    def blamed(self, row: Difference) -> Argument | None:
        """Return the argument that makes the error of a row, if one does."""
        root = self._root(row)
        if root is None:
            return None
        alone = (d for d in root.inputs if d.pair.golden is None or d.pair.mine is None)
        told = ((given, *self._told(root, given, row)) for given in alone)
        return next((Argument(root, *each) for each in told if each[1]), None)

    def _root(self, row: Difference) -> ComparedCall | None:
        """Return the call of the outermost module around a row."""
        golden, mine = row.pair.golden, row.pair.mine
        if golden is None or mine is None or row.site.phase != "forward":
            return None
        calls = [flow.call(r) for flow, r in zip(self._flows, (golden, mine), strict=True)]
        for at, call in enumerate(calls):
            while call.around is not None:
                call = calls[at] = call.around
        found = self._calls.at(0, calls[0].key)
        return found if found.mine == calls[1].key else None

    def _told(self, root: ComparedCall, given: Difference, row: Difference) -> tuple[str, bool]:
        """Return a clause on what an argument does, "" if it does not make the error."""
        key, owner = (root.key, given.site.slot), "mine" if given.pair.golden is None else "golden"
        if key not in self._known:
            self._known[key] = self._computed(root, given)
        name = given.site.slot.removeprefix("kwargs.")
        words = f"{name} is given to the model in {owner} alone"
        done = self._known[key]
        if done is not None:
            return (f"{words}{done[0]}", done[1]) if done[0] else ("", False)
        golden, one_class = given.pair.golden, not root.is_rewritten
        if golden is None or not (one_class or self._calls.has_operators[1]):
            return "", False  # code of mine that was not recorded may make it
        try:
            if self._is_usual(golden) or not self._is_made_of(row, golden):
                return "", False
        except CannotReplay:  # its values were not kept
            return "", False
        return f"{words}, and the first tensor that differs is made of it (not tested)", False

    def _computed(self, root: ComparedCall, given: Difference) -> tuple[str, bool] | None:
        """Return what the models do with or without it, "" for nothing of importance."""
        slot, golden, runs = given.site.slot, given.pair.golden, self._runs
        try:
            value = LEFT_OUT if golden is None else runs.golden.load(golden)
            again = self._again(root, 1, slot, value)
            left = repairs.left(root.outputs, runs, mine=again)
            change = "with it" if golden is not None else "without it"
            return left.words(change, "mine", "golden"), False
        except CannotReplay:
            if golden is None:
                return None
        try:  # mine's model may not know the argument at all
            left = repairs.left(root.outputs, runs, golden=self._again(root, 0, slot, LEFT_OUT))
            return left.words("without it", "golden", "mine"), True
        except CannotReplay:
            return None

    def _again(self, root: ComparedCall, at: int, slot: str, value: object) -> repairs.Results:
        """Return what golden's (0) or mine's (1) live model gives with another argument."""
        runs, key = self._runs, (root.golden, root.mine)[at]
        assert key is not None
        sides = (runs.golden, runs.golden_module), (runs.mine, runs.module)
        live = LiveCall(sides[at][0], key, sides[at][1])
        live.check(max((d.limit or 0.0 for d in root.outputs), default=0.0), runs)
        return live.results(given={slot: value})

    def _is_made_of(self, row: Difference, argument: Record) -> bool:
        """Tell whether golden's tensor of a row is made of an argument whose values mine lacks."""
        flow = self._flows[0]
        queue = [row.pair.golden] if row.pair.golden is not None else []
        seen, found = {r.id for r in queue}, False
        while queue and not found:
            sources, _ = flow.sources(queue.pop())
            found = any(r.id == argument.id for r in sources)
            new = [r for r in sources if r.id not in seen and not flow.agrees(r)]
            seen |= {r.id for r in new}
            queue += new
        return found and not self._mine_has(argument)

    def _is_usual(self, argument: Record) -> bool:
        """Tell whether programs assume an argument without it: nothing masked, places from 0 on."""
        value = self._runs.golden.load(argument)
        places = torch.arange(value.shape[-1] if value.dim() else 1)
        return bool((value == value.flatten()[0]).all()) or bool((value == places).all())

    def _mine_has(self, argument: Record) -> bool:
        """Tell whether mine has the numbers of an argument, in any dtype and shape."""
        value = self._runs.golden.load(argument).flatten().double()
        for record in self._flows[1].records.values():
            if record.summary.numel != value.numel():
                continue
            try:
                if bool((self._runs.mine.load(record).flatten().double() == value).all()):
                    return True
            except CannotReplay:
                continue
        return False
