"""What one program computes: the values that clear the calls of the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.search import value_sets


class Known:
    """What calls of one program take, compute and give, compared with calls of the other one.

    ``side``: 0 if they are golden's, 1 if they are mine's. ``limit``: of the relative L2 error.
    """

    def __init__(
        self,
        calls: Sequence[FlowCall],
        side: int,
        flows: tuple[Flow, Flow],
        runs: Runs,
        limit: float,
    ) -> None:
        self._calls, self._limit = calls[: constants.REGION_CALLS], limit
        self._flow, self._other_flow = flows[side], flows[1 - side]
        sides = (runs.golden, runs.mine)
        self._side, self._other = sides[side], sides[1 - side]

    def exactly(self, call: FlowCall) -> bool:
        """Tell whether what a call gives is computed here too, but for axes and padding."""
        return self._is_found(call, self._steps.have) or self._is_found(call, self._taken.pad)

    def apart(self, call: FlowCall, others: Sequence[FlowCall]) -> bool:
        """Tell whether what a call gives is here in another order, in parts, or without padding.

        For a fused projection, it is enough if the parts that ``others`` read are known.
        """
        if self._is_found(call, self._results.hold) or self._is_found(call, self._taken.cover):
            return True
        sizes = {r.id: r.summary.numel for r in call.outputs}
        parts = [r for c in others for r in c.inputs if self._other_flow.made_by(r, sizes)]
        if any(r.summary.numel in sizes.values() for r in parts):
            return False
        return bool(parts) and all(map(self._is_taken, parts))

    def moves(self, call: FlowCall) -> bool:
        """Tell whether a call of the other program gives elements of one of its inputs."""
        inputs = [r for r in call.inputs if is_floating(r.summary.dtype)]
        try:
            taken = [self._other.load(r) for r in inputs]
            given = value_sets.Values(self._other.load(r) for r in call.outputs)
        except CannotReplay:
            return False
        return self._is_found(call, value_sets.Values(taken).hold) or any(
            given.hold(tensor, self._limit) for tensor in taken
        )

    def same(self, own: Record, other: Record) -> bool:
        """Tell whether two tensors have the same elements, but for those that one lacks."""
        try:
            here, there = self._side.load(own), self._other.load(other)
        except CannotReplay:
            return False
        if value_sets.Values([here]).hold(there, self._limit):
            return True
        return value_sets.Values([there]).hold(here, self._limit)

    def is_given(self, result: torch.Tensor, whole: bool) -> bool:
        """Tell whether a result is computed here. Indices and flags are equal by chance.

        ``whole``: as a whole, and not as elements in another order, as a part, or in parts.
        """
        if not result.is_floating_point():
            return False
        if self._steps.have(result, self._limit):
            return True
        results = self._results
        return not whole and any(f(result, self._limit) for f in (results.hold, results.cover))

    def _is_found(self, call: FlowCall, among: Callable[[torch.Tensor, float], bool]) -> bool:
        try:
            results = [self._other.load(r) for r in call.outputs]
        except CannotReplay:
            return False
        return any(among(result, self._limit) for result in results)

    def _is_taken(self, record: Record) -> bool:
        try:
            value = self._other.load(record)
        except CannotReplay:
            return False
        return self._taken.have(value, self._limit) or self._taken.hold(value, self._limit)

    @cached_property
    def _steps(self) -> value_sets.Values:
        """What the calls compute, step by step."""
        values = []
        for call in self._calls:
            try:
                values += Replayed(self._side, call.key).steps()
            except CannotReplay:
                continue
        return value_sets.Values(values)

    @cached_property
    def _results(self) -> value_sets.Values:
        return self._values(r for c in self._calls for r in c.outputs)

    @cached_property
    def _taken(self) -> value_sets.Values:
        """What the calls give and take, and the tensors of which they take views."""
        given = [r for c in self._calls for r in (*c.outputs, *c.inputs)]
        bases = [self._flow.records.get(r.producer) for r in given if r.producer is not None]
        return self._values([*given, *(r for r in bases if r is not None)])

    def _values(self, records: Iterable[Record]) -> value_sets.Values:
        values = []
        for record in {r.id: r for r in records if r.summary.numel > 1}.values():
            try:
                values.append(self._side.load(record))
            except CannotReplay:
                continue
        return value_sets.Values(values)
