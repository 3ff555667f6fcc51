"""What calls of both programs take: the same tensors, or each other's by exchange."""

from __future__ import annotations

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.compared_calls import kind_of_operator
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall, same_bytes
from llmdebug_nb.replay.in_place import in_place
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Runs
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


def _on_other(runs: Runs, call: FlowCall, record: Record, given: torch.Tensor) -> torch.Tensor:
    """Return the result of a call of mine on another tensor. Raises CannotReplay."""

    def load(slot: str) -> torch.Tensor:
        own = next((r for r in call.inputs if r.site.slot == slot), None)
        if own is None:
            raise CannotReplay(f"argument {slot} was not recorded")
        return given if own.id == record.id else runs.mine.load(own)

    return next(iter(Replayed(runs.mine, call.key).run_on(load).values()))
