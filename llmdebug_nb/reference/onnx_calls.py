"""References of nodes of ONNX graphs, by onnx's own reference evaluator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import first_line
from llmdebug_nb.core.records import GRAPH_LEVEL, ONNX, CallKey
from llmdebug_nb.reference.computed import Change, Computed, Tensors, changed, longest
from llmdebug_nb.reference.operator_calls import kept
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.checks import FAILS, GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Scalar, Side

if TYPE_CHECKING:
    import onnx

Array = np.ndarray[Any, np.dtype[Any]]
Facts = dict[str, Scalar]
# those that models compute with; none reads files, runs graphs or matches patterns
_NAMES = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitShift
BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Concat ConstantOfShape
Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Einsum Elu Equal Erf Exp
Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Hardmax Identity
InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
LpNormalization MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg NonZero Not OneHot Or
PRelu Pad Pow QuantizeLinear RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
Resize Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Sinh Size Slice Softmax
Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK
Transpose Trilu Unsqueeze Where Xor
"""
_NODES = frozenset(_NAMES.split())
_SIZED_BY_VALUES = frozenset(
    ("ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile")
)


class OnnxCall(Computed):
    """A node of a graph on its recorded inputs. Raises CannotReplay.

    Weights are those of its module. It is computed in float64 where its opset knows that, else in
    float32.
    """

    is_one = True

    def __init__(self, graph: OnnxFacts, side: Side, key: CallKey, op: str) -> None:
        self._side, self._name = side, op.removeprefix(ONNX)
        facts = graph.of(key)
        domain = facts.get("domain", ("str", ""))[1]
        if domain:
            raise CannotReplay(f"onnx defines no operators of {domain}", UNKNOWN)
        if self._name not in _NODES:
            raise CannotReplay(f"Onnx.{self._name} is not one of those that are computed", UNKNOWN)
        if "opset" not in facts or "inputs" not in facts:
            raise CannotReplay("its opset was not recorded; record it again", GAP)
        self._opset = int(facts["opset"][1] or 0)
        self._places = [int(at) for at in (facts["inputs"][1] or "").split()]
        records = {r.site.slot: side.load(r) for r in side.records(key, "input")}
        self._scalars = side.scalars(key)
        self._taken = {str(at): self._input(str(at), graph, facts, records) for at in self._places}
        self.recorded = kept(side, key)
        self.length = longest(*self.operands, *self.recorded.values())

    def _input(
        self, slot: str, graph: OnnxFacts, facts: Facts, records: Tensors
    ) -> torch.Tensor | None:
        """Return a recorded input or weight; None for a small constant. Raises CannotReplay."""
        name = facts.get(f"initializer.{slot}", ("", None))[1]
        if slot in records:
            return records[slot]
        if slot in self._scalars:
            return None
        if name is not None:
            return graph.weight(name)
        raise CannotReplay(f"input {slot} was not recorded", GAP)

    @property
    def operands(self) -> list[torch.Tensor]:
        return [each for each in self._taken.values() if each is not None]

    def exact(self, change: Change | None = None) -> Tensors:
        known = {slot: x for slot, x in self._taken.items() if x is not None}
        load = changed(known.__getitem__, change)
        wide = self._wide()
        given = {slot: _array(load(slot), wide) for slot in known}
        found: Exception | None = None
        # a constant of one number may be one of no axes, or of one
        for axes in (0, 1):
            try:
                made = self._run({**given, **self._constants(axes, wide)})
            except CannotReplay as error:
                found = error
                continue
            if all(made[s].shape == x.shape for s, x in self.recorded.items() if s in made):
                return made
            found = CannotReplay("the shapes of its constants were not recorded", GAP)
        assert found is not None
        raise found

    def again(self, device: str = "cpu") -> Tensors:
        raise CannotReplay("nodes of a graph are not run one by one")

    def _wide(self) -> str:
        """Return the dtype in which it is computed."""
        import onnx

        try:
            schema = onnx.defs.get_schema(self._name, self._opset)
        except onnx.defs.SchemaError:
            raise CannotReplay(f"opset {self._opset} has no {self._name}", UNKNOWN) from None
        kinds = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        floats = [types for types in kinds.values() if "tensor(float)" in types]
        return "float64" if all("tensor(double)" in types for types in floats) else "float32"

    def _constants(self, axes: int, wide: str) -> dict[str, Array]:
        """Return the inputs that were recorded as numbers or texts. Raises CannotReplay."""
        made = {}
        for slot in (s for s, x in self._taken.items() if x is None):
            kind, text = self._scalars[slot]
            value = _value(slot, kind, text)
            array = np.asarray(value)
            if array.dtype.kind == "f":  # a number of the graph, in its shortest form
                array = array.astype(np.float32).astype(wide)
            made[slot] = array.reshape(-1) if axes or array.ndim else array
        return made

    def _run(self, given: Mapping[str, Array]) -> Tensors:
        import onnx
        from onnx.reference import ReferenceEvaluator

        attributes = {
            slot: _value(slot, kind, text)
            for slot, (kind, text) in self._scalars.items()
            if not slot.isdecimal()
        }
        most = max(self._places, default=-1) + 1
        names = [f"x{at}" if at in self._places else "" for at in range(most)]
        outputs = [f"y{at}" for at in range(max(map(int, self.recorded), default=0) + 1)]
        try:
            node = onnx.helper.make_node(self._name, names, outputs, **attributes)
            self._refuse_growth(node, given)
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                reference = ReferenceEvaluator(node, opsets={"": self._opset})
                found = reference.run(None, {f"x{slot}": x for slot, x in given.items()})
        except CannotReplay:
            raise
        except Exception as error:  # onnx raises errors of many kinds
            raise CannotReplay(f"onnx's reference fails: {first_line(error)}", FAILS) from None
        return {str(at): torch.from_numpy(np.array(x)) for at, x in enumerate(found)}

    def _refuse_growth(self, node: onnx.NodeProto, given: Mapping[str, Array]) -> None:
        """Raise CannotReplay if a node asks for far more than was recorded."""
        import onnx

        most = constants.REPLAY_GROWTH * sum(x.numel() + 1 for x in self.recorded.values())
        tensors = {f"x{slot}": onnx.numpy_helper.from_array(x) for slot, x in given.items()}
        types = {
            name: onnx.helper.make_tensor_type_proto(x.data_type, x.dims)
            for name, x in tensors.items()
        }
        small = {f"x{slot}" for slot, x in given.items() if x.size <= constants.SHAPE_ELEMENTS}
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(self._name, self._opset), node, types,
            {name: tensors[name] for name in small},
            opset_imports=[onnx.helper.make_opsetid("", self._opset)],
        )  # fmt: skip
        sizes = [_size(one) for one in found.values()]
        around = [abs(int(each)) for one in node.attribute if one.name == "pads"
                  for each in one.ints]  # fmt: skip
        if any(size is None for size in sizes) and self._name in _SIZED_BY_VALUES:
            raise CannotReplay("how large its result is can't be told beforehand", GAP)
        if max([math.prod(1 + each for each in around), *(s or 0 for s in sizes)]) > most:
            raise CannotReplay("its result would be far larger than recorded")


class OnnxFacts:
    """What a run holds of its graph: facts of nodes, and weights by their names there."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def of(self, key: CallKey) -> Facts:
        """Return the facts of a node; those of its first run hold for all."""
        return self._nodes.get((key.path, key.call), {})

    @cached_property
    def _nodes(self) -> dict[tuple[str, int], Facts]:
        facts: dict[tuple[str, int], Facts] = {}
        for row in self._side.run.index.scalars(role=GRAPH_LEVEL):
            facts.setdefault((row.path, row.call), {})[row.slot] = (row.type, row.value)
        return facts

    @cached_property
    def _weights(self) -> dict[str, tuple[str, str]]:
        """The module and the name there of each weight, by its name in the graph."""
        return {
            text: (path, slot.partition(".")[2])
            for (path, _), own in self._nodes.items()
            for slot, (_, text) in own.items()
            if slot.startswith("initializer.") and "node" not in own and text is not None
        }

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as the graph has it. Raises CannotReplay."""
        path, slot = self._weights.get(name, ("", ""))
        records = list(self._side.run.records(path=path, role="weight", slot=slot)) if slot else []
        if not records:
            raise CannotReplay("its weights were not recorded; record with weights=True", GAP)
        found = self._side.load(records[0])
        return found.t() if f"transposed.{slot}" in self._nodes[path, 0] else found


def _size(one: onnx.TypeProto) -> int | None:
    """Return the number of elements of a tensor type, None if it is not known."""
    tensor = one.tensor_type
    dims = tensor.shape.dim
    known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
    return math.prod(dim.dim_value for dim in dims) if known else None


def _array(x: torch.Tensor, wide: str) -> Array:
    if x.dtype == torch.bfloat16 or (x.is_floating_point() and wide == "float64"):
        x = x.to(getattr(torch, wide))
    elif x.is_floating_point():
        x = x.float()
    return x.contiguous().numpy()


def _value(slot: str, kind: str, text: str | None) -> object:
    """Read a constant or an attribute. Raises CannotReplay."""
    value = arguments.value(slot, (kind, text))
    return list(value) if isinstance(value, tuple) else value
