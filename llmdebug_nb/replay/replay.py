"""Replay an operator on its recorded inputs: in the same dtype, and in float64.

Its own error is the relative L2 error between the two results. It is counted in units of
rounding: half the machine epsilon of the coarsest dtype among inputs and outputs. A correct
operator stays below about ten units, whatever its inputs are. An inherited error does not count.

Nothing in a dump is evaluated: `operators.py` lists what is replayed, `execution.py` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import coarsest, epsilon
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay, replayed
from llmdebug_nb.replay.runs import Runs, Scalar, Side

_DOUBLE = epsilon("float64")


class Replayed:
    """A recorded operator call of one side, to be replayed on its own tensors or on others.

    ``backward``: also an operator of the dispatcher that ran in a backward pass. ``scalars``: its
    arguments that are no tensors, if not the recorded ones.

    Raises:
        CannotReplay: the call can't be replayed.
    """

    def __init__(
        self,
        side: Side,
        key: CallKey,
        backward: bool = False,
        scalars: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.side, self.key = side, key
        self.records: list[Record] = side.records(key, "input")
        outputs = side.records(key, "output")
        if not outputs:
            raise CannotReplay("its output was not recorded", GAP)
        if key.phase != "forward" and not backward:
            raise CannotReplay("calls of backward passes are not replayed")
        self.op = outputs[0].op
        self.name, _ = replayed(self.op)
        given = side.scalars(key) if scalars is None else scalars
        self.arguments = arguments.arguments_of(self.records, given)
        self._shapes = {record.site.slot: record.summary.shape for record in outputs}
        recorded = sum(record.summary.numel for record in (*self.records, *outputs))
        self._most = constants.REPLAY_GROWTH * (recorded + 1)

    def run(
        self, tensors: Replayed | None = None, wide: bool = False, seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the result by slot.

        ``tensors``: another call, whose tensors are used; default: its own. ``wide``: compute in
        float64.

        Raises:
            CannotReplay: the operator fails, or would give a result of another size than recorded.
        """
        source = tensors or self
        load = arguments.loader(source.side, source.records)
        floating = torch.float64 if wide else None
        return self.run_on(load, floating, seed, strict=tensors is None)

    def run_on(
        self,
        load: Callable[[str], torch.Tensor],
        floating: torch.dtype | None = None,
        seed: int = 0,
        strict: bool = True,
        device: str = "cpu",
        settled: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return the result by slot on the tensors that ``load`` returns for the input slots.

        ``floating``: the dtype of its floating tensors; None: as they are. ``strict``: the result
        must have the recorded shapes. ``device``, ``settled``: of the `execution.Task`.

        Raises:
            CannotReplay: the operator fails, or would give a result of another size than recorded.
        """
        args, kwargs = arguments.filled(self.arguments, load, floating)
        shapes = self._shapes if strict else None
        task = Task(
            self.op, args, kwargs, self._most, shapes, seed, device=device, settled=settled,
            wide=floating == torch.float64,
        )  # fmt: skip
        return dict(self.side.execute(task))

    def steps(self) -> list[torch.Tensor]:
        """Return what the operator computes on its own tensors: each step, and its result.

        Raises:
            CannotReplay: the operator fails.
        """
        args, kwargs = arguments.filled(self.arguments, arguments.loader(self.side, self.records))
        task = Task(self.op, args, kwargs, self._most, steps=True)
        return [tensor for _, tensor in self.side.execute(task)]

    def units(self, runs: Runs) -> float:
        """Return its own error in units of rounding: the recorded result against float64.

        Raises:
            CannotReplay: the operator fails, or its result does not round.
        """
        recorded = arguments.outputs(self.side, self.key)
        reference = self.run(wide=True)
        dtypes = [r.summary.dtype for r in self.records]
        units = [
            runs.error(reference[slot], tensor) / unit([*dtypes, str(tensor.dtype)])
            for slot, tensor in recorded.items()
            if slot in reference
            and tensor.is_floating_point()
            and reference[slot].shape == tensor.shape
        ]
        if not units:
            raise CannotReplay("it gives no floating-point values")
        return max(units)


def unit(dtypes: list[str]) -> float:
    """Return a unit of rounding: half the machine epsilon of the coarsest floating dtype."""
    name = coarsest(dtype.removeprefix("torch.") for dtype in dtypes)
    return (epsilon(name) if name is not None else _DOUBLE) / 2


def largest_error(
    golden: dict[str, torch.Tensor], mine: dict[str, torch.Tensor], runs: Runs
) -> float:
    """Return the largest error over the results of both. Raises CannotReplay if there are none."""
    errors = [
        runs.error(tensor, mine[slot])
        for slot, tensor in golden.items()
        if slot in mine and mine[slot].shape == tensor.shape
    ]
    if not errors:
        raise CannotReplay("the two calls have no results to compare")
    return max(errors)


def is_random(call: Replayed) -> bool:
    """Tell whether the result depends on random numbers. Raises CannotReplay."""
    one, other = call.run(seed=0), call.run(seed=1)
    return any(not same(tensor, other[slot]) for slot, tensor in one.items())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, NaN counting as equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
