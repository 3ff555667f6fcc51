"""References of modules of torch.nn of which no operator was recorded: the function each calls.

Other classes have no formula that their name tells: two of one name may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.reference.computed import Change, Computed, Tensors, Where, changed, longest
from llmdebug_nb.reference.operator_calls import kept
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side

_HOME = "torch/nn/modules/"


class _Function(NamedTuple):
    """``op``: the function. ``weights``, ``attributes``: of the module, by the argument's name.

    ``normalizes``: it is also given the shape of its weight.
    """

    op: str
    weights: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    normalizes: bool = False


_WEIGHTED = ("weight", "bias")
_CLASSES = {
    "Linear": _Function("Functional.linear", _WEIGHTED),
    "Embedding": _Function("Functional.embedding", ("weight",)),
    "LayerNorm": _Function("Functional.layer_norm", _WEIGHTED, ("eps",), True),
    "RMSNorm": _Function("Functional.rms_norm", ("weight",), ("eps",), True),
    "ReLU": _Function("Functional.relu"),
    "GELU": _Function("Functional.gelu", (), ("approximate",)),
    "SiLU": _Function("Functional.silu"),
    "Mish": _Function("Functional.mish"),
    "ELU": _Function("Functional.elu", (), ("alpha",)),
    "LeakyReLU": _Function("Functional.leaky_relu", (), ("negative_slope",)),
    "Tanh": _Function("Torch.tanh"),
    "Sigmoid": _Function("Torch.sigmoid"),
    "Softplus": _Function("Functional.softplus", (), ("beta", "threshold")),
    "Softmax": _Function("Functional.softmax", (), ("dim",)),
    "LogSoftmax": _Function("Functional.log_softmax", (), ("dim",)),
    "Dropout": _Function("Functional.dropout", (), ("p", "training")),
    "Identity": _Function("Tensor.clone"),
}


class ModuleCall(Computed):
    """A module of torch.nn on its recorded inputs, forward or backward. Raises CannotReplay."""

    def __init__(self, side: Side, key: CallKey, op: str, where: Where) -> None:
        function = _CLASSES.get(op)
        node = side.nodes.get(key.path)
        file = "" if node is None or node.source is None else node.source.file
        if function is None or (file and _HOME not in file.replace("\\", "/")):
            raise CannotReplay(
                f"no formula of {op} is known; record its operators with mode='api' or 'aten'",
                UNKNOWN,
            )
        self._side, self._where, self._function = side, where, function
        self._backward = key.phase == "backward"
        self.is_one = not self._backward
        forward = key._replace(phase="forward")
        records = side.records(forward, "input")
        self._inputs = {record.site.slot: side.load(record) for record in records}
        if list(self._inputs) not in (["0"], ["kwargs.input"]):
            raise CannotReplay("its only input was not recorded", GAP)
        self._inputs = {"0": next(iter(self._inputs.values()))}
        self._weights = self._recorded_weights(key.path)
        self._attributes = self._recorded_attributes(key.path)
        self._arriving = {
            r.site.slot: side.load(r)
            for r in (side.records(key, "input") if self._backward else [])
        }
        if self._backward and not self._arriving:
            raise CannotReplay("no gradient of its outputs was recorded", GAP)
        self.recorded = kept(side, key)
        self.length = longest(*self.operands, *self.recorded.values())

    def _recorded_weights(self, path: str) -> dict[str, torch.Tensor | None]:
        """Return the weights that the function takes. Raises CannotReplay."""
        records = self._side.run.records(path=path, role="weight")
        found = {record.site.slot: self._side.load(record) for record in records}
        node = self._side.nodes.get(path)
        has = found if node is None else node.params
        missing = [name for name in self._function.weights if name in has and name not in found]
        if missing or (self._function.weights and not has):
            raise CannotReplay("its weights were not recorded; record with weights=True", GAP)
        return {name: found.get(name) for name in self._function.weights}

    def _recorded_attributes(self, path: str) -> dict[str, object]:
        """Return the attributes that the function takes. Raises CannotReplay."""
        scalars = self._side.attributes.get(path, {})
        missing = [name for name in self._function.attributes if name not in scalars]
        if missing:
            raise CannotReplay(f"its attribute {missing[0]} was not recorded", GAP)
        wanted = {f"kwargs.{name}": scalars[name] for name in self._function.attributes}
        return arguments.arguments_of([], wanted)[1]

    @property
    def operands(self) -> list[torch.Tensor]:
        weights = [each for each in self._weights.values() if each is not None]
        return [*self._inputs.values(), *weights, *self._arriving.values()]

    def exact(self, change: Change | None = None) -> Tensors:
        return self._run(self._where, change)

    def again(self, device: str = "cpu") -> Tensors:
        return self._run(Where(device, None))

    def _run(self, where: Where, change: Change | None = None) -> Tensors:
        tensors = {**self._inputs, **{f"weight.{n}": w for n, w in self._weights.items()
                                      if w is not None}}  # fmt: skip
        load: Callable[[str], torch.Tensor] = changed(tensors.__getitem__, change)
        shape = self._weights.get("weight")
        kwargs: dict[str, object] = {
            name: None if weight is None else arguments.Tensor(f"weight.{name}")
            for name, weight in self._weights.items()
        } | self._attributes
        if self._function.normalizes:
            if shape is None:
                raise CannotReplay("it has no weight that tells what it normalizes", GAP)
            kwargs["normalized_shape"] = tuple(shape.shape)
        filled = arguments.filled(([arguments.Tensor("0")], kwargs), load, where.dtype)
        most = constants.REPLAY_GROWTH * sum(tensor.numel() + 1 for tensor in tensors.values())
        move = change or (lambda tensor: tensor)
        arriving = {s: move(arguments.widened(g, where.dtype)) for s, g in self._arriving.items()}
        task = Task(
            self._function.op, *filled, most, device=where.device, settled=True, wide=where.wide,
            gradients=arriving if self._backward else None, wanted=("0",),
        )  # fmt: skip
        return dict(self._side.execute(task))
