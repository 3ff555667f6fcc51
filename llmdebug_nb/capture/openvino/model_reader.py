"""Reads a model of OpenVINO: its nodes and modules, and what enters and leaves these.

The names of nodes say the modules: ``__module.model.layers.0.mlp/aten::mul/Multiply`` from PyTorch,
``/model/layers.0/mlp/Mul`` from ONNX. Without them, the names of weights do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmdebug_nb.capture.compat import openvino_models
from llmdebug_nb.capture.graphs.graph import Graph, GraphNode, Scalar, Weight, shortest
from llmdebug_nb.capture.graphs.module_reader import with_modules
from llmdebug_nb.capture.graphs.placed_graph import ExportedNode, PlacedGraph, scoped
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import OPENVINO

if TYPE_CHECKING:
    from openvino import ConstOutput, Model, Node, Output

_MODULE, _ROOT = "__module.", "::"  # how the PyTorch front end names nodes of modules, of the root
_SELF = "self."  # and weights
_FEW = 8  # elements of a constant that is recorded as text, such as a shape or axes
_LEAVES = ("Parameter", "Constant", "Result")
_STATE = ("ReadValue", "Assign")
_PRODUCTS = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
_NESTED = ("If", "Loop", "TensorIterator")
_RANDOM = ("RandomUniform", "Multinomial")
_EPSILONS = ("eps", "epsilon")


@dataclass(frozen=True)
class ReadModel:
    """A model as it was read.

    ``graph``: it. ``ports``: value -> friendly name of its node, and number of its output.
    ``constants``: value -> the node that holds it. ``has_state``: values outlive a run.
    ``stored``: types that weights are stored in and not computed in.
    """

    graph: Graph
    ports: dict[str, tuple[str, int]]
    constants: dict[str, Node]
    has_state: bool
    stored: frozenset[str]


def read(model: Model) -> ReadModel:
    """Read a model."""
    return _Reader(model).read()


class _Reader:
    def __init__(self, model: Model) -> None:
        self._ops: list[Node] = list(model.get_ordered_ops())
        self._fed = [port.get_node() for port in model.inputs]
        self._names = self._names_of_values(model)
        self._constants: dict[str, Node] = {}
        self._folded: set[str] = set()  # friendly names of nodes that compute a constant
        self._stored: set[str] = set()
        for op in self._ops:
            self._fold(op)

    def read(self) -> ReadModel:
        computed = [op for op in self._ops if self._computes(op)]
        small = {name: _small(node) for name, node in self._constants.items()}
        shapes = {name: _shape(name, node) for name, node in self._constants.items()}
        names = {op.get_friendly_name() for op in computed}
        exported = [self._exported(op, names) for op in computed]
        stated = {node.module for node in exported if node.module is not None}
        placed = PlacedGraph(exported, shapes, small, called_modules(stated), {})
        nodes = [
            self._node(op, node, module, small)
            for op, node, module in zip(computed, exported, placed.modules, strict=True)
        ]
        outputs = [self._inputs(op)[0] for op in self._ops if op.get_type_name() == "Result"]
        graph = with_modules(
            placed, nodes, [self._name(op, 0) for op in self._fed], outputs, set(self._constants)
        )
        kinds = Counter(op.get_type_name() for op in self._ops)
        graph.nested = sum(kinds[kind] for kind in _NESTED)
        graph.random = any(kind in kinds for kind in _RANDOM)
        ports = {
            self._name(op, at): (op.get_friendly_name(), at)
            for op in computed
            for at in range(op.get_output_size())
        }
        has_state = "ReadValue" in kinds
        return ReadModel(graph, ports, self._constants, has_state, frozenset(self._stored))

    # -- values ---------------------------------------------------------------------------------

    def _names_of_values(self, model: Model) -> dict[tuple[str, int], str]:
        """Return a name for each value: as the program calls it, or that of its node."""
        taken: Counter[str] = Counter()
        names: dict[tuple[str, int], str] = {}
        for port in model.inputs:
            names[port.get_node().get_friendly_name(), 0] = any_name(port)
        for port in model.outputs:
            source = port.get_node().input_value(0)
            node = source.get_node()
            if node.get_type_name() not in _LEAVES:
                names.setdefault((node.get_friendly_name(), source.get_index()), any_name(port))
        for op in self._ops:
            name, size = op.get_friendly_name(), op.get_output_size()
            for at in range(size):
                own = f"{name}.{at}" if size > 1 else name.removeprefix(_SELF)
                names.setdefault((name, at), own)
        for key, name in names.items():
            taken[name] += 1
            if taken[name] > 1:
                names[key] = f"{name}#{taken[name]}"
        return names

    def _name(self, op: Node, at: int) -> str:
        return self._names[op.get_friendly_name(), at]

    def _inputs(self, op: Node) -> list[str]:
        values = op.input_values()
        return [self._name(value.get_node(), value.get_index()) for value in values]

    def _fold(self, op: Node) -> None:
        """Note a constant, and what is computed of constants alone: a stored weight, converted."""
        kind, name = op.get_type_name(), op.get_friendly_name()
        if kind == "Constant":
            self._constants[self._name(op, 0)] = op
            return
        sources = [value.get_node() for value in op.input_values()]
        if kind in (*_LEAVES, *_STATE, *_RANDOM, *_NESTED) or not sources:
            return
        if not all(self._is_constant(source) for source in sources):
            return
        self._folded.add(name)
        source = sources[0]
        if kind == "Convert":
            known = self._name(source, 0)
            self._names[name, 0] = known  # it is the weight: only its type is another
            self._note_stored(source, op)

    def _note_stored(self, source: Node, op: Node) -> None:
        """Note the type of a weight that is converted before anything is computed with it."""
        kinds = [each.get_output_element_type(0).get_type_name() for each in (source, op)]
        stored, computed = map(openvino_models.epsilon_of, kinds)
        if math.prod(op.get_output_shape(0)) > _FEW and stored > computed > 0:
            self._stored.add(kinds[0])

    def _is_constant(self, op: Node) -> bool:
        return op.get_type_name() == "Constant" or op.get_friendly_name() in self._folded

    def _computes(self, op: Node) -> bool:
        return op.get_type_name() not in _LEAVES and op.get_friendly_name() not in self._folded

    # -- nodes ----------------------------------------------------------------------------------

    def _exported(self, op: Node, names: Collection[str]) -> ExportedNode:
        outputs = [self._name(op, at) for at in range(op.get_output_size())]
        inputs, attributes = self._inputs(op), op.get_attributes()
        name, kind = op.get_friendly_name(), op.get_type_name()
        epsilon = next((float(attributes[one]) for one in _EPSILONS if one in attributes), None)
        weights: dict[int, tuple[str, Weight]] = {}
        if kind in _PRODUCTS and len(inputs) > 1 and inputs[1] in self._constants:
            is_matrix = kind == "MatMul" and len(op.get_input_shape(1)) == 2
            transposed = is_matrix and not attributes.get("transpose_b")
            weights[1] = "weight", Weight(inputs[1], transposed)
        return ExportedNode(
            name, kind, inputs, outputs, (), stated_module(name, names), weights,
            None if epsilon is None else shortest(epsilon),
        )  # fmt: skip

    def _node(
        self, op: Node, exported: ExportedNode, module: str, small: dict[str, object]
    ) -> GraphNode:
        node = GraphNode(
            exported.name, OPENVINO + exported.op, list(exported.inputs), list(exported.outputs),
            module,
        )  # fmt: skip
        node.scalars = list(_attributes(op))
        node.facts.append(("node", exported.name))
        for place, value in enumerate(exported.inputs):
            if small.get(value) is not None:
                node.scalars.append((str(place), small[value]))
            elif value in self._constants:
                node.facts.append((f"initializer.{place}", value))
        return node


def any_name(port: Output | ConstOutput) -> str:
    """Return the name by which a program calls an input or output."""
    names = sorted(port.get_names())
    return str(names[0] if names else port.get_node().get_friendly_name())


def stated_module(name: str, names: Collection[str]) -> str | None:
    """Return the module that a node's name says. ``names``: of all nodes.

    One node of ONNX may become several, ``/fc/Gemm`` and ``/fc/Gemm/WithoutBiases``.
    """
    while (above := name.rpartition("/")[0]) in names:
        name = above
    paths = scoped(name)
    if paths:
        return paths[-1]
    first = name.partition("/")[0]
    if first.startswith(_MODULE):
        return first.removeprefix(_MODULE)
    return "" if _ROOT in first else None


def called_modules(stated: Collection[str]) -> set[str]:
    """Return the modules that are called: those of nodes, and what holds them by name.

    What holds them by number is a list, which no program calls.
    """
    paths = {path for each in stated for path in (each, *ancestors(each))}
    holders = {path.rpartition(".")[0] for path in paths if not path.rpartition(".")[2].isdigit()}
    return {path for path in paths if path and (path in stated or path in holders)}


def _small(node: Node) -> object:
    """Return a constant of few elements as a number or text; None for any other."""
    shape = list(node.get_output_shape(0))
    size = math.prod(shape)
    if not size or size > _FEW or (size > 1 and len(shape) > 1):
        return None
    tensor = openvino_models.tensor_of(node)
    if tensor is None:
        return None
    is_float = tensor.is_floating_point()
    numbers = [shortest(one) if is_float else one for one in tensor.flatten().tolist()]
    return numbers[0] if size == 1 else str(numbers)


def _shape(name: str, node: Node) -> tuple[int, ...]:
    """Return the shape of a constant; of one without a name of its own, without axes of size 1.

    A vector that was given the axes of what it is added to is a folded weight, not a mask.
    """
    shape = tuple(node.get_output_shape(0))
    return shape if "." in name else tuple(size for size in shape if size != 1)


def _attributes(op: Node) -> Iterator[Scalar]:
    """Yield the attributes of a node that are numbers, texts or lists of these."""
    for name, value in op.get_attributes().items():
        if isinstance(value, float):
            yield name, shortest(value)
        elif isinstance(value, (bool, int, str)):
            yield name, value
        elif isinstance(value, Sequence):
            yield name, str(list(value))
