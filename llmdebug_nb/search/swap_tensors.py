"""What calls of both programs take: the same tensors, or each other's by exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.kernels.relative import relative_l2
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.compared_calls import kind_of_operator
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.in_place import in_place
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Runs, Side
from llmdebug_nb.search import value_sets


class Exchange:
    """The tensors that calls of golden and mine take, and mine's calls on golden's tensors."""

    def __init__(self, flows: tuple[Flow, Flow], runs: Runs) -> None:
        self.flows, self._runs = flows, runs

    def unsettled(self, golden: FlowCall, mine: FlowCall) -> tuple[list[Record], list[Record]]:
        """Return the inputs of two calls that do not hold the same values."""
        right = [record for record in mine.inputs if identifies_itself(record.summary)]
        left = []
        for record in (r for r in golden.inputs if identifies_itself(r.summary)):
            same = next((other for other in right if self.same(record, other)), None)
            if same is None:
                left.append(record)
            else:
                right.remove(same)
        return left, right

    def is_entry(self, record: Record, side: int) -> bool:
        """Tell whether a tensor enters a region: it agrees, and has values of its own."""
        return identifies_itself(record.summary) and bool(self.flows[side].agrees(record))

    def same(self, golden: Record, mine: Record) -> bool:
        """Tell whether two tensors are paired, or one has the bytes of the other's partner."""
        if self._is_partner(golden, mine, 0):
            return True
        return self._is_partner(mine, golden, 1)

    def _is_partner(self, record: Record, other: Record, side: int) -> bool:
        """Tell whether a tensor agrees, and its partner is another one, or has its bytes."""
        flow = self.flows[side]
        if not flow.agrees(record):
            return False
        partners = ((d.pair.mine, d.pair.golden)[side] for d in flow.rows[record.id])
        return any(p is not None and (p.id == other.id or same_bytes(p, other)) for p in partners)

    def answers(self, golden: FlowCall, mine: FlowCall, left: Record, right: Record) -> bool:
        """Tell whether mine's call does with golden's tensor what golden's call does."""
        same = kind_of_operator(golden.outputs[0].op) == kind_of_operator(mine.outputs[0].op)
        runs = self._runs
        scalars = runs.golden.scalars(golden.key), runs.mine.scalars(mine.key)
        if same and list(scalars[0].values()) == list(scalars[1].values()):
            return True
        try:
            return self._gives_golden(golden, mine, left, right)
        except CannotReplay:
            return same

    def does_the_same(self, golden: FlowCall, mine: FlowCall) -> bool:
        """Tell whether golden's call gives mine's result on mine's tensors."""
        return self._gives_on_mine(golden, mine, self._runs.mine, mine.outputs[0])

    def gives_golden_alone(self, golden: FlowCall, mine: FlowCall) -> bool:
        """Tell whether golden's call gives its own result on those of mine's tensors it takes."""
        return self._gives_on_mine(golden, mine, self._runs.golden, golden.outputs[0])

    def _gives_on_mine(self, golden: FlowCall, mine: FlowCall, side: Side, wanted: Record) -> bool:
        load = arguments.loader(self._runs.mine, mine.inputs)
        try:
            again = Replayed(self._runs.golden, golden.key).run_on(load, strict=False)
            own = side.load(wanted)
        except CannotReplay:
            return False
        result = next(iter(again.values())).to(own.dtype)
        return result.shape == own.shape and self._runs.error(own, result) <= _rounding(mine)

    def repeated_otherwise(
        self, golden: FlowCall, mine: FlowCall, pairs: Sequence[tuple[Record, Record]]
    ) -> bool:
        """Tell whether mine's call gives golden's result on tensors that are repeated otherwise.

        ``pairs``: golden's tensors, and mine's, which have several of each index of one axis.
        """
        values: dict[str, torch.Tensor] = {}
        load = arguments.loader(self._runs.mine, mine.inputs)
        try:
            for theirs, ours in pairs:
                own = self._runs.mine.load(ours)
                other = _otherwise(self._runs.golden.load(theirs).to(own.dtype), own)
                if other is None:
                    return False
                values[ours.site.slot] = other
            again = Replayed(self._runs.mine, mine.key)
            results = again.run_on(lambda slot: values[slot] if slot in values else load(slot))
            wanted = self._runs.golden.load(golden.outputs[0])
        except CannotReplay:
            return False
        result = next(iter(results.values()))
        same = result.shape == wanted.shape
        return same and self._runs.error(wanted, result.to(wanted.dtype)) <= _rounding(mine)

    def _gives_golden(self, golden: FlowCall, mine: FlowCall, left: Record, right: Record) -> bool:
        """Tell whether mine's call gives golden's output if it takes golden's tensor."""
        result = self.on_golden(mine, right, left)
        wanted = self._runs.golden.load(golden.outputs[0])
        rows = self.flows[0].rows[left.id]
        limit = max((d.limit or 0.0 for d in rows), default=0.0)
        if left.summary.numel != right.summary.numel:
            rounding = constants.OPERATORS_EPSILONS * epsilon(right.summary.dtype)
            return value_sets.Values([wanted]).hold(result, max(limit, rounding))
        if result.numel() != wanted.numel():
            return False
        result = result.reshape(wanted.shape).to(wanted.dtype)
        return self._runs.error(wanted, result) <= max(limit, constants.SAME_VALUES)

    def on_golden(self, call: FlowCall, record: Record, other: Record) -> torch.Tensor:
        """Return the result of a call of mine that takes a tensor of golden in place of its own.

        If golden's is a part of it, as the tokens of one request of a batch are, the result has
        only the elements that this changes.

        Raises:
            CannotReplay: the tensors have other sizes, or the call fails.
        """
        given, own = self._runs.golden.load(other), self._runs.mine.load(record)
        if given.numel() == own.numel():
            return _on_other(self._runs, call, record, given.reshape(own.shape).to(own.dtype))
        for d in self.flows[1].rows[record.id]:
            fit, part = d.pair.fit, d.pair.golden
            if fit is not None and part is not None and part.summary.shape == other.summary.shape:
                result = _on_other(self._runs, call, record, in_place(given, fit)(own))
                return result[result != self._runs.mine.load(call.outputs[0])]
        raise CannotReplay("the tensors have other sizes")


def _rounding(call: FlowCall) -> float:
    """Return the error that rounding makes in what a call gives."""
    eps = constants.OPERATORS_EPSILONS * epsilon(call.outputs[0].summary.dtype)
    return min(eps, constants.OTHER_VALUES)


def _otherwise(golden: torch.Tensor, mine: torch.Tensor) -> torch.Tensor | None:
    """Return golden's tensor repeated as a whole if mine repeats each index, and the other way.

    None if mine does neither.
    """
    sizes = list(enumerate(zip(golden.shape, mine.shape, strict=False)))
    longer = [(axis, b // a) for axis, (a, b) in sizes if a != b and a and b % a == 0]
    if golden.dim() != mine.dim() or len(longer) != 1 or golden.shape[longer[0][0]] < 2:
        return None
    axis, times = longer[0]
    each = golden.repeat_interleave(times, axis)
    whole = torch.cat([golden] * times, axis)
    if each.shape != mine.shape:
        return None
    apart = [relative_l2(x.double(), mine.double()) for x in (whole, each)]
    if min(apart) > constants.SAME_VALUES:
        return None
    return each if apart[0] < apart[1] else whole


def _on_other(runs: Runs, call: FlowCall, record: Record, given: torch.Tensor) -> torch.Tensor:
    """Return the result of a call of mine on another tensor. Raises CannotReplay."""

    def load(slot: str) -> torch.Tensor:
        own = next((r for r in call.inputs if r.site.slot == slot), None)
        if own is None:
            raise CannotReplay(f"argument {slot} was not recorded")
        return given if own.id == record.id else runs.mine.load(own)

    return next(iter(Replayed(runs.mine, call.key).run_on(load).values()))
