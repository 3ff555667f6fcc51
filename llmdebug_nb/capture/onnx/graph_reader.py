"""Reads the graph that a session runs: its nodes and modules, and what enters and leaves these.

An optimiser drops the metadata and names of nodes but keeps the names of values. So the modules are
read from the exported graph, and looked up by the values that an optimised node still computes. A
new node is placed where its outputs are used.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from llmdebug_nb.capture.graphs.graph import Graph, GraphNode, common_module
from llmdebug_nb.capture.graphs.module_reader import with_modules
from llmdebug_nb.capture.graphs.placed_graph import PlacedGraph
from llmdebug_nb.capture.onnx.exported_graph import placed
from llmdebug_nb.capture.onnx.proto import attributes, exporter_metadata, inputs_of, small_constant
from llmdebug_nb.core.records import ONNX

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
_NESTED = ("If", "Loop", "Scan")


def read(model: onnx.ModelProto, optimised: onnx.ModelProto | None = None) -> Graph:
    """Return the graph that runs: ``optimised``, or ``model`` if that runs unchanged.

    Both are without their external data.
    """
    exported = placed(model.graph)
    proto = model.graph if optimised is None else optimised.graph
    constants = {one.name for one in proto.initializer}
    constants |= {one.values.name for one in proto.sparse_initializer}
    opsets = {one.domain: one.version for one in (optimised or model).opset_import}
    metadata = [exporter_metadata(node) for node in model.graph.node]
    small = dict(exported.small)
    ran = list(proto.node)
    if optimised is not None:
        small |= {one.name: small_constant(one) for one in proto.initializer}
        ran = _in_order(exported, ran)
    nodes = [_node(exported, metadata, node, constants, small, opsets) for node in ran]
    _place_by_users(nodes)
    inputs = [one.name for one in proto.input if one.name not in constants]
    outputs = [one.name for one in proto.output]
    graph = with_modules(exported, nodes, inputs, outputs, constants)
    graph.nested = sum(node.op_type in _NESTED for node in proto.node)
    graph.random = any(node.op_type in _RANDOM for node in proto.node)
    return graph


# -- nodes --------------------------------------------------------------------------------------


def _place_by_users(nodes: list[GraphNode]) -> None:
    """Place the nodes that an optimiser made where their outputs are used."""
    users: dict[str, list[GraphNode]] = defaultdict(list)
    for node in nodes:
        for value in node.inputs:
            users[value].append(node)
    for node in reversed(nodes):
        if node.module == _UNKNOWN:
            using = {user.module for value in node.outputs for user in users[value]}
            node.module = common_module(using - {_UNKNOWN}) or ""


def _in_order(exported: PlacedGraph, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
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
    exported: PlacedGraph, exporters: Sequence[Mapping[str, str]], node: onnx.NodeProto,
    constants: Collection[str], small: Mapping[str, object], opsets: Mapping[str, int],
) -> GraphNode:  # fmt: skip
    """Return a node with the module and metadata of the exported node for the same value.

    ``exporters``: metadata of the exported nodes, in order.
    """
    known = next((value for value in node.output if value in exported.place), None)
    metadata = exporters[exported.place[known]] if known is not None else {}
    module = exported.module_of.get(known, _UNKNOWN) if known is not None else _UNKNOWN
    op = ONNX + node.op_type
    read = GraphNode(node.name, op, list(node.input), list(node.output), module)
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
