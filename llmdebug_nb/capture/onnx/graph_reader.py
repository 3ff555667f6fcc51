"""Reads the graph that a session runs: its nodes and modules, and what enters and leaves these.

An optimiser drops the metadata and names of nodes but keeps the names of values. So the modules are
read from the exported graph, and looked up by the values that an optimised node still computes. A
new node is placed where its outputs are used.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from llmdebug_nb.capture.onnx.exported_graph import ExportedGraph
from llmdebug_nb.capture.onnx.graph import OnnxGraph, OnnxModule, OnnxNode, Weight
from llmdebug_nb.capture.onnx.proto import (
    attributes,
    common_module,
    exporter_metadata,
    inputs_of,
    shortest,
    small_constant,
)
from llmdebug_nb.core.paths import ancestors, within
from llmdebug_nb.core.records import EXPORTED

if TYPE_CHECKING:
    import onnx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_PART = 200  # characters of a scalar that a dump keeps
_LONGEST = 2000  # characters of a node's text that are recorded, in parts
_UNKNOWN = "?"  # the module of a node that is yet to be placed
_RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
    "Bernoulli",
)  # fmt: skip
_PRODUCTS = (
    "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "Conv", "ConvTranspose",
)  # fmt: skip
_NESTED = ("If", "Loop", "Scan")


def read(model: onnx.ModelProto, optimised: onnx.ModelProto | None = None) -> OnnxGraph:
    """Return the graph that runs: ``optimised``, or ``model`` if that runs unchanged.

    Both are without their external data.
    """
    exported = ExportedGraph(model.graph)
    proto = model.graph if optimised is None else optimised.graph
    constants = {one.name for one in proto.initializer}
    constants |= {one.values.name for one in proto.sparse_initializer}
    opsets = {one.domain: one.version for one in (optimised or model).opset_import}
    nodes = _nodes(exported, proto, constants, opsets)
    used = {path for node in nodes for path in (node.module, *ancestors(node.module))}
    paths = used | set(exported.module_of.values()) | {""}
    modules = {}
    for path in sorted(paths, key=exported.call_order()):
        module = modules[path] = OnnxModule(path, exported.types.get(path, ""))
        module.called, module.guessed = path in exported.called, path in exported.guessed
    inputs = [one.name for one in proto.input if one.name not in constants]
    graph = OnnxGraph(nodes, modules, inputs, [one.name for one in proto.output], constants)
    graph.nested = sum(node.op_type in _NESTED for node in proto.node)
    graph.random = any(node.op_type in _RANDOM for node in proto.node)
    _ModuleReader(exported, graph).read()
    return graph


# -- nodes --------------------------------------------------------------------------------------


def _nodes(
    exported: ExportedGraph, proto: onnx.GraphProto, constants: set[str], opsets: Mapping[str, int]
) -> list[OnnxNode]:
    """Return the nodes that run, each in its module."""
    small = exported.small
    nodes = list(proto.node)
    if proto is not exported.proto:
        small = {**small, **{one.name: small_constant(one) for one in proto.initializer}}
        nodes = _in_order(exported, nodes)
    read = [_node(exported, node, constants, small, opsets) for node in nodes]
    users: dict[str, list[OnnxNode]] = defaultdict(list)
    for node in read:
        for value in node.inputs:
            users[value].append(node)
    for node in reversed(read):
        if node.module == _UNKNOWN:
            using = {user.module for value in node.outputs for user in users[value]}
            node.module = common_module(using - {_UNKNOWN}) or ""
    return read


def _in_order(exported: ExportedGraph, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return optimised nodes in an executable order, as close to the exported graph as possible.

    An optimiser mixes the nodes of different modules.
    """
    maker = {value: place for place, node in enumerate(nodes) for value in node.output if value}
    needs = [{maker[value] for value in inputs_of(node) if value in maker} for node in nodes]
    needed_by: dict[int, list[int]] = defaultdict(list)
    rank = [0.0] * len(nodes)
    for place, node in enumerate(nodes):  # onnxruntime has already written an executable order
        known = [exported.place[value] for value in node.output if value in exported.place]
        after_inputs = max((rank[one] for one in needs[place]), default=-1.0) + 0.5
        rank[place] = min(known) if known else after_inputs
        for one in needs[place]:
            needed_by[one].append(place)
    waiting = [len(one) for one in needs]
    ready = [(rank[place], place) for place, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, place = heapq.heappop(ready)
        order.append(nodes[place])
        for one in needed_by[place]:
            waiting[one] -= 1
            if not waiting[one]:
                heapq.heappush(ready, (rank[one], one))
    return order if len(order) == len(nodes) else nodes


def _node(
    exported: ExportedGraph, node: onnx.NodeProto, constants: Collection[str],
    small: Mapping[str, object], opsets: Mapping[str, int],
) -> OnnxNode:  # fmt: skip
    """Return a node with the module and metadata of the exported node for the same value."""
    known = next((value for value in node.output if value in exported.maker), None)
    metadata = exporter_metadata(exported.maker[known]) if known is not None else {}
    module = exported.module_of.get(known, _UNKNOWN) if known is not None else _UNKNOWN
    op = EXPORTED + node.op_type
    read = OnnxNode(node.name, op, list(node.input), list(node.output), module)
    read.scalars = list(attributes(node))
    read.facts.append(("node", node.name or next(iter(node.output), "")))
    for place, value in enumerate(node.input):
        if small.get(value) is not None:
            read.scalars.append((str(place), small[value]))
        elif value in constants:
            read.facts.append((f"initializer.{place}", value))
    if node.domain not in ("", "ai.onnx"):
        read.facts.append(("domain", node.domain))
    elif opset := opsets.get("", opsets.get("ai.onnx", 0)):
        read.facts.append(("opset", opset))
    there = " ".join(str(place) for place, value in enumerate(node.input) if value)
    read.facts.append(("inputs", there))
    text = metadata.get("fx_node", "")[:_LONGEST]
    for at in range(0, len(text), _PART):
        read.facts.append((f"fx.{at}" if at else "fx", text[at : at + _PART]))
    frames = _FRAME.findall(metadata.get("stack_trace", ""))
    read.source = tuple(f"{file}:{line} {name}" for file, line, name in reversed(frames))
    return read


# -- modules ------------------------------------------------------------------------------------


class _ModuleReader:
    """Finds the inputs, outputs, weights and settings of modules in the exported graph."""

    def __init__(self, exported: ExportedGraph, graph: OnnxGraph) -> None:
        self._exported, self._graph = exported, graph

    def read(self) -> None:
        """Complete the modules of the graph."""
        exported, graph = self._exported, self._graph
        users: dict[str, set[str]] = defaultdict(set)  # value -> modules that use it
        for node, path in zip(exported.proto.node, exported.modules, strict=True):
            for value in inputs_of(node):
                users[value].add(path)
            if path in graph.modules:
                self._read_settings(graph.modules[path], node)
        makers: dict[str, str | None] = dict.fromkeys(graph.inputs)
        makers |= {value: path for value, path in exported.module_of.items() if value}
        outputs = set(graph.outputs)
        for value, maker in makers.items():
            self._read_value(value, maker, users[value], value in outputs)
        self._read_constants(users)
        for module in graph.modules.values():
            if not module.results:
                rest = module.more
                module.results, module.more = (rest[-1:], rest[:-1]) if module.path else ([], rest)

    def _read_value(self, value: str, maker: str | None, users: set[str], is_output: bool) -> None:
        """Add a value to the modules that it enters or leaves. ``maker``: None for an input."""
        modules = self._graph.modules
        for path in {path for user in users for path in (user, *ancestors(user))}:
            if path and (maker is None or not within(maker, path)):
                modules[path].inputs.append(value)
        for path in (maker, *ancestors(maker)) if maker is not None else ():
            is_outside = [not within(user, path) for user in users]
            if path and all(is_outside) and users:
                modules[path].results.append(value)
            elif path and (any(is_outside) or is_output):
                # Also used inside: a common subexpression or a key-value cache, not the result.
                modules[path].more.append(value)

    def _read_constants(self, users: Mapping[str, set[str]]) -> None:
        """Add large constants that are not weights to the inputs of the modules that use them."""
        graph, exported = self._graph, self._exported
        weights = {one.name for module in graph.modules.values() for one in module.weights.values()}
        for value in sorted(graph.constants - weights):
            if len(exported.shapes.get(value, ())) > 1 and exported.small.get(value) is None:
                for path in users.get(value, ()):
                    graph.modules[path].inputs.append(value)

    def _read_settings(self, module: OnnxModule, node: onnx.NodeProto) -> None:
        """Add the weights and settings of a node to its module."""
        exported, op = self._exported, node.op_type
        for place, value in enumerate(node.input):
            is_named = "." in value
            is_weight = value in exported.shapes and (is_named or exported.small.get(value) is None)
            if not module.called or not is_weight:
                continue
            if is_named:
                weight = Weight(value)
                name = value.rpartition(".")[2]
            elif op in _PRODUCTS and place in (1, 2):
                is_matrix = len(exported.shapes[value]) == 2 and op in ("MatMul", "Gemm")
                stored = any(one.name == "transB" and one.i for one in node.attribute)
                weight = Weight(value, transposed=is_matrix and place == 1 and not stored)
                name = ("weight", "bias")[place - 1]
            else:
                continue
            module.weights.setdefault(name, weight)
        epsilon = self._epsilon(node)
        if epsilon is not None:
            module.settings["eps"] = epsilon

    def _epsilon(self, node: onnx.NodeProto) -> float | None:
        """Return a node's epsilon: an attribute, or the constant that is added below a root."""
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                return shortest(attribute.f)
        users = self._exported.users[node.output[0]] if node.op_type == "Add" else ()
        if any(user.op_type in ("Sqrt", "Rsqrt") for user in users):
            constants = (self._exported.small.get(value) for value in node.input)
            return next((number for number in constants if isinstance(number, float)), None)
        return None
