"""References of ATB operations, by their ``op_param.json``: those whose mathematics is public."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.reference import atb_attention as attention
from llmdebug_nb.reference import atb_elements as elements
from llmdebug_nb.reference import atb_places as places
from llmdebug_nb.reference import atb_ranks as ranks
from llmdebug_nb.reference.atb_parameters import Inputs, Parameters, parameters_of
from llmdebug_nb.reference.computed import Change, Computed, Tensors, changed, formula, longest
from llmdebug_nb.reference.operator_calls import kept
from llmdebug_nb.replay.checks import DTYPE, GAP, RANDOM, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side

Formula = Callable[[Parameters, Inputs], Inputs]

SUFFIX = "Operation"  # of the name of every operation
_PLAIN_FORMATS = {"", "nd", "nchw", "ncdhw"}  # the others keep elements in another order
_BY_SHAPES: dict[str, Formula] = {
    "Activation": elements.activation,
    "AsStrided": places.as_strided,
    "Concat": lambda given, x: [torch.cat(x, given.integer("concatDim"))],
    "Cumsum": elements.cumsum,
    "Elewise": elements.elewise,
    "Gather": places.gather,
    "IndexAdd": places.index_add,
    "LayerNorm": elements.layer_norm,
    "Linear": elements.linear,
    "Matmul": elements.matmul,
    "Onehot": places.onehot,
    "Reduce": elements.reduce,
    "Repeat": lambda given, x: [x[0].repeat(given.integers("multiples"))],
    "RmsNorm": elements.rms_norm,
    "Rope": attention.rope,
    "SetValue": places.set_value,
    "Slice": places.cut,
    "Softmax": elements.softmax,
    "Sort": places.sort,
    "Split": places.split,
    "Transdata": places.transdata,
    "Transpose": lambda given, x: [x[0].permute(given.integers("perm"))],
    "Where": lambda _, x: [torch.where(x[0].bool(), x[1], x[2])],
}
# they read values, so shapes alone do not tell what they give; it is never larger than what they
# take, or than what was recorded
_BY_VALUES: dict[str, Formula] = {
    "AllGather": ranks.all_gather,
    "AllReduce": ranks.all_reduce,
    "Broadcast": ranks.broadcast,
    "Fill": places.fill,
    "Gating": places.gating,
    "KvCache": attention.kv_cache,
    "LinearParallel": ranks.linear_parallel,
    "Nonzero": places.nonzero,
    "Pad": places.pad,
    "PagedAttention": attention.paged_attention,
    "ReshapeAndCache": attention.reshape_and_cache,
    "SelfAttention": attention.self_attention,
    "TopkToppSampling": places.sampling,
    "Unpad": places.unpad,
}
FORMULAS = {**_BY_SHAPES, **_BY_VALUES}
# without a formula: kind of reason, and why
WITHOUT = {
    "LinearSparse": (UNKNOWN, "how its weights are compressed is not public"),
    "Multinomial": (RANDOM, "which one is drawn depends on random numbers of the device"),
}


class AtbCall(Computed):
    """An ATB operation on its recorded inputs. Raises CannotReplay.

    It may run several kernels. ``parameters``: JSON, for a dump without ``op_param.json``.
    """

    def __init__(self, side: Side, key: CallKey, op: str, parameters: str = "") -> None:
        self._name = op.removesuffix(SUFFIX)
        if self._name not in FORMULAS:
            kind, why = WITHOUT.get(self._name, (UNKNOWN, f"no formula of {op} is known"))
            raise CannotReplay(why, kind)
        self._side, self._key = side, key
        self._given = parameters_of(side, key, parameters)
        formats = set(side.run.meta.get("formats", ()))
        if not formats <= _PLAIN_FORMATS and self._name != "Transdata":
            raise CannotReplay("the dump has tensors of fractal formats", DTYPE)
        self._inputs = self._recorded_inputs(key)
        if not self._inputs and self._name != "Fill":
            raise CannotReplay("an input was not recorded", GAP)
        self.recorded = kept(side, key)
        self.length = longest(*self.operands, *self.recorded.values())

    def _recorded_inputs(self, key: CallKey) -> Tensors:
        found = {r.site.slot: r for r in self._side.records(key, "input")}
        slots = sorted(filter(str.isdecimal, found), key=int)
        if slots != [str(place) for place in range(len(slots))]:
            raise CannotReplay("an input was not recorded", GAP)
        return {slot: self._side.load(found[slot]) for slot in slots}

    def exact(self, change: Change | None = None) -> Tensors:
        inputs = _wide(self._inputs, change)
        outputs = [self.recorded[slot] for slot in sorted(self.recorded, key=_number)]
        given = Parameters(
            self._given, tuple(x.dtype for x in self.operands), tuple(outputs), self._key.rank,
            lambda: self._all_ranks(change),
        )  # fmt: skip
        with formula():
            if self._name in _BY_SHAPES:
                self._refuse_growth(given, inputs)
            made = FORMULAS[self._name](given, inputs)
        return {str(place): tensor for place, tensor in enumerate(made)}

    def _refuse_growth(self, given: Parameters, inputs: Inputs) -> None:
        """Raise CannotReplay if the parameters ask for far more than was recorded."""
        shapes = FORMULAS[self._name](given, [x.to("meta") for x in inputs])
        sizes = sum(math.prod(x.shape) for x in shapes)
        if sizes > constants.REPLAY_GROWTH * sum(x.numel() + 1 for x in self.recorded.values()):
            raise CannotReplay("its result would be far larger than recorded")

    def _all_ranks(self, change: Change | None) -> list[Inputs]:
        """Return the inputs of this call on all ranks that recorded it."""
        place = {name: at for name, at in self._key._asdict().items() if name != "rank"}
        same = self._side.run.records(role="input", **place)
        found = sorted({record.site.rank for record in same})
        return [
            _wide(self._recorded_inputs(self._key._replace(rank=rank)), change) for rank in found
        ]

    def again(self, device: str = "cpu") -> Tensors:
        raise CannotReplay("operations of ATB can't run here")


def _number(slot: str) -> int:
    return int(slot) if slot.isdecimal() else -1


def _wide(tensors: Tensors, change: Change | None) -> Inputs:
    load = changed(tensors.__getitem__, change)
    return [x.double() if x.is_floating_point() else x for x in map(load, tensors)]
