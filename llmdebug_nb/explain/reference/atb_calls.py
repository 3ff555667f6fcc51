"""References of ATB operations, by their ``op_param.json``: those whose mathematics is public."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.opchecks import DTYPE, GAP, UNKNOWN
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.explain.execution import quiet
from llmdebug_nb.explain.operators import CannotReplay
from llmdebug_nb.explain.reference.computed import Change, Tensors, changed, longest
from llmdebug_nb.explain.reference.operator_calls import kept
from llmdebug_nb.explain.runs import Side

Parameters = Mapping[str, object]
Inputs = list[torch.Tensor]
Formula = Callable[[Parameters, Inputs], Inputs]

SUFFIX = "Operation"  # of the name of every operation
_PLAIN_FORMATS = {"", "nd", "nchw", "ncdhw"}  # the others keep elements in another order


def _integer(given: Parameters, name: str, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CannotReplay(f"its parameter {name} is no whole number")
    return value


def _integers(given: Parameters, name: str) -> list[int]:
    values = given.get(name)
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise CannotReplay(f"its parameter {name} is no list of whole numbers", GAP)
    return values


def _number(given: Parameters, name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CannotReplay(f"its parameter {name} is no number")
    return float(value)


def _part(given: Parameters, name: str) -> Parameters:
    part = given.get(name, {})
    return part if isinstance(part, dict) else {}


def _refuse(given: Parameters, *names: str) -> None:
    """Raise CannotReplay if one of these parameters asks for a variant without a formula."""
    for name in names:
        if given.get(name):
            raise CannotReplay(f"no formula for {name}={given[name]!r} is known", UNKNOWN)


def _linear(given: Parameters, inputs: Inputs) -> Inputs:
    _refuse(given, "enAccum", "quantMode", "matmulType")
    x, weight, *rest = inputs
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise CannotReplay("no formula for quantised inputs is known", UNKNOWN)
    x = x.transpose(-2, -1) if given.get("transposeA", False) else x
    weight = weight.transpose(-2, -1) if given.get("transposeB", True) else weight
    made = x @ weight
    return [made + rest[0] if given.get("hasBias", False) and rest else made]


def _rms_norm(given: Parameters, inputs: Inputs) -> Inputs:
    kind = _integer(given, "layerType", 0)
    names = {1: "normParam", 2: "preNormParam", 3: "postNormParam"}
    if kind not in names:
        raise CannotReplay(f"no formula for layerType={kind} is known", UNKNOWN)
    own = _part(given, names[kind])
    _refuse(own, "quantType", "rstd", "precisionMode", "dynamicQuantType")
    x, *rest = inputs
    if kind > 1:  # the residual, and a bias perhaps, are added first
        added = rest[: 2 if own.get("hasBias", False) else 1]
        x, rest = sum(added, x), rest[len(added) :]
    gamma = rest[0] + 1 if _integer(own, "modelType", 0) else rest[0]
    scale = (x * x).mean(-1, keepdim=True) + _number(own, "epsilon", 1e-5)
    made = x * gamma.reshape(-1) / scale.sqrt()
    return [made, x] if kind == 2 else [made]


_OF_ONE: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    3: torch.cos, 4: torch.sin, 5: torch.neg, 7: torch.logical_not, 20: torch.tanh,
}  # fmt: skip
_OF_TWO: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    8: torch.add, 9: torch.mul, 10: torch.true_divide, 11: torch.logical_and,
    12: torch.logical_or, 13: torch.less, 14: torch.greater, 15: torch.sub, 16: torch.eq,
}  # fmt: skip


def _elewise(given: Parameters, inputs: Inputs) -> Inputs:
    kind = _integer(given, "elewiseType", 0)
    if kind == 1:  # a cast
        return inputs[:1]
    if kind == 2:
        return [inputs[0] * _number(_part(given, "mulsParam"), "varAttr", 0.0)]
    if kind in _OF_ONE:
        return [_OF_ONE[kind](inputs[0])]
    if kind in _OF_TWO:
        return [_OF_TWO[kind](*inputs[:2])]
    raise CannotReplay(f"no formula for elewiseType={kind} is known", UNKNOWN)


def _activation(given: Parameters, inputs: Inputs) -> Inputs:
    kind, x = _integer(given, "activationType", 0), inputs[0]
    if kind == 1:
        return [x.relu()]
    if kind == 2:
        exact = _integer(given, "geluMode", 0) == 1
        return [torch.nn.functional.gelu(x, approximate="none" if exact else "tanh")]
    if kind == 3:
        return [x * torch.sigmoid(1.702 * x)]
    if kind == 4:
        return [x * torch.sigmoid(_number(given, "scale", 1.0) * x)]
    if kind == 5:
        return [x.log()]
    if kind == 6:
        gate, up = x.chunk(2, _integer(given, "dim", -1))
        return [torch.nn.functional.silu(gate) * up]
    raise CannotReplay(f"no formula for activationType={kind} is known", UNKNOWN)


def _softmax(given: Parameters, inputs: Inputs) -> Inputs:
    axes = _integers(given, "axes")
    return [(inputs[0] - inputs[0].logsumexp(axes, keepdim=True)).exp()]


def _gather(given: Parameters, inputs: Inputs) -> Inputs:
    _refuse(given, "batchDims")
    x, indices = inputs[:2]
    axis = _integer(given, "axis", 0) % max(x.dim(), 1)
    made = x.index_select(axis, indices.flatten().long())
    return [made.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])]


def _split(given: Parameters, inputs: Inputs) -> Inputs:
    _refuse(given, "splitSizes")
    return list(inputs[0].chunk(_integer(given, "splitNum", 2), _integer(given, "splitDim", 0)))


_FORMULAS: dict[str, Formula] = {
    "LinearOperation": _linear,
    "RmsNormOperation": _rms_norm,
    "ElewiseOperation": _elewise,
    "ActivationOperation": _activation,
    "SoftmaxOperation": _softmax,
    "GatherOperation": _gather,
    "SplitOperation": _split,
    "ConcatOperation": lambda given, x: [torch.cat(x, _integer(given, "concatDim", 0))],
    "TransposeOperation": lambda given, x: [x[0].permute(_integers(given, "perm"))],
    "WhereOperation": lambda _, x: [torch.where(x[0].bool(), x[1], x[2])],
}


class AtbCall:
    """An ATB operation on its recorded inputs. Raises CannotReplay."""

    is_one = False  # an operation may run several kernels

    def __init__(self, side: Side, key: CallKey, op: str) -> None:
        formula = _FORMULAS.get(op)
        if formula is None:
            raise CannotReplay(f"no formula of {op} is known", UNKNOWN)
        self._formula, self._given = formula, _parameters(side, key)
        if not set(side.run.meta.get("formats", ())) <= _PLAIN_FORMATS:
            raise CannotReplay("the dump has tensors of fractal formats", DTYPE)
        records = {r.site.slot: r for r in side.records(key, "input") if r.site.slot.isdecimal()}
        slots = sorted(records, key=int)
        if slots != [str(place) for place in range(len(slots))] or not slots:
            raise CannotReplay("an input was not recorded", GAP)
        self._inputs = {slot: side.load(records[slot]) for slot in slots}
        self.recorded = kept(side, key)
        self.length = longest(*self.operands, *self.recorded.values())

    @property
    def operands(self) -> Inputs:
        return list(self._inputs.values())

    def exact(self, change: Change | None = None) -> Tensors:
        load = changed(self._inputs.__getitem__, change)
        inputs = [load(slot) for slot in self._inputs]
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        try:
            shapes = self._formula(self._given, [x.to("meta") for x in wide])
            sizes = sum(math.prod(x.shape) for x in shapes)
            if sizes > constants.REPLAY_GROWTH * sum(x.numel() + 1 for x in self.recorded.values()):
                raise CannotReplay("its result would be far larger than recorded")
            with quiet():
                made = self._formula(self._given, wide)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            line = str(error).partition("\n")[0]
            raise CannotReplay(f"its formula fails: {line}") from None
        return {str(place): tensor for place, tensor in enumerate(made)}

    def again(self, device: str = "cpu") -> Tensors:
        raise CannotReplay("operations of ATB can't run here")


def _parameters(side: Side, key: CallKey) -> Parameters:
    """Return the parameters of an operation. Raises CannotReplay."""
    text = side.run.meta.get("op_params", {}).get(key.path)
    if text is None:
        raise CannotReplay("its op_param.json is missing", GAP)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CannotReplay("its op_param.json can't be read", GAP)
    return found
