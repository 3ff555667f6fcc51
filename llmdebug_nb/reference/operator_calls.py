"""References of recorded operators: of their results, and of the gradients that they pass on."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.reference.computed import Change, Computed, Tensors, Where, changed, longest
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.checks import GAP
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay, by_formula
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Side


class OperatorCall(Computed):
    """An operator on its recorded inputs. Raises CannotReplay.

    What it keeps beside its result, as attention in bfloat16 keeps the logarithms of its sums in
    float32, need be no more exact than the result: kernels take fast exponentials for it.
    """

    def __init__(self, side: Side, key: CallKey, where: Where) -> None:
        self._call = Replayed(side, key, backward=True)
        self._where = where
        self.is_one = not by_formula(self._call.op)
        load = arguments.loader(side, self._call.records)
        self._inputs = {r.site.slot: load(r.site.slot) for r in self._call.records}
        self.recorded = kept(side, key)
        self.length = longest(*self._inputs.values(), *self.recorded.values())
        result = self.recorded.get("0")
        floating = result if result is not None and result.is_floating_point() else None
        self.rounds_to = None if floating is None else floating.dtype

    def exact(self, change: Change | None = None) -> Tensors:
        load = changed(self._load, change)
        return self._call.run_on(load, self._where.dtype, settled=True, device=self._where.device)

    def again(self, device: str = "cpu") -> Tensors:
        if by_formula(self._call.op):
            raise CannotReplay("its kernel is not run, only its formula")
        return self._call.run_on(self._load, device=device, settled=True)

    def _load(self, slot: str) -> torch.Tensor:
        return self._inputs[slot]


class GradientCall(Computed):
    """The gradients that a function or method of tensors passes on. Raises CannotReplay.

    They are those of its forward call, whose inputs must be recorded too.
    """

    def __init__(self, side: Side, key: CallKey, where: Where) -> None:
        forward = key._replace(phase="forward")
        if not side.records(forward, "output"):
            raise CannotReplay("its forward call was not recorded", GAP)
        self._call = Replayed(side, forward)
        self._side, self._where = side, where
        load = arguments.loader(side, self._call.records)
        self._inputs = {r.site.slot: load(r.site.slot) for r in self._call.records}
        arriving = side.records(key, "input")
        if not arriving:
            raise CannotReplay("no gradient of its outputs was recorded", GAP)
        self._arriving = {r.site.slot: side.load(r) for r in arriving}
        self.recorded = kept(side, key)
        self._shared = _shared(self._call.records)
        together = [slots for slots in self._shared if not self.recorded.keys().isdisjoint(slots)]
        self._wanted = (*self.recorded, *chain.from_iterable(together))
        self.length = longest(*self._inputs.values(), *self._arriving.values())

    @property
    def operands(self) -> list[torch.Tensor]:
        return [*self._inputs.values(), *self._arriving.values()]

    def exact(self, change: Change | None = None) -> Tensors:
        return self._gradients(self._where, change)

    def again(self, device: str = "cpu") -> Tensors:
        return self._gradients(Where(device, None))

    def _gradients(self, where: Where, change: Change | None = None) -> Tensors:
        load = changed(self._inputs.__getitem__, change)
        args, kwargs = arguments.filled(self._call.arguments, load, where.dtype)
        move = change or (lambda tensor: tensor)
        arriving = {
            slot: move(arguments.widened(g, where.dtype)) for slot, g in self._arriving.items()
        }
        most = constants.REPLAY_GROWTH * (sum(x.numel() for x in self._inputs.values()) + 1)
        task = Task(
            self._call.op, args, kwargs, most, device=where.device, settled=True,
            gradients=arriving, wide=where.wide, wanted=self._wanted,
        )  # fmt: skip
        found = dict(self._side.execute(task))
        for slots in self._shared:  # one tensor in several places: its gradient is their sum
            own = [found[slot] for slot in slots if slot in found]
            if len(own) > 1:
                total = sum(own[1:], own[0])
                found.update(dict.fromkeys(slots, total))
        return found


def _shared(records: list[Record]) -> list[list[str]]:
    """Return the slots that hold one tensor: the same bytes, from the same recorded output."""
    places: dict[object, list[str]] = defaultdict(list)
    for record in records:
        s = record.summary
        if s.fingerprint is not None:
            places[s.fingerprint, s.dtype, s.shape, record.producer].append(record.site.slot)
    return [slots for slots in places.values() if len(slots) > 1]


def kept(side: Side, key: CallKey) -> Tensors:
    """Return the recorded outputs of a call. Raises CannotReplay if the values were not kept."""
    return {record.site.slot: side.load(record) for record in side.records(key, "output")}
