"""Finds the inputs, outputs, weights and settings of modules in an exported graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from llmdebug_nb.capture.graphs.graph import Graph, GraphModule, GraphNode, Weight
from llmdebug_nb.capture.graphs.placed_graph import ExportedNode, PlacedGraph
from llmdebug_nb.core.paths import ancestors, within


def with_modules(
    exported: PlacedGraph, nodes: list[GraphNode], inputs: list[str], outputs: list[str],
    constants: set[str],
) -> Graph:  # fmt: skip
    """Return the graph of these nodes, each in its module, with the modules of the exported graph.

    ``inputs``, ``outputs``: of the graph. ``constants``: values that no node computes.
    """
    used = {*(node.module for node in nodes), *exported.module_of.values()}
    paths = {"", *used, *(above for path in used for above in ancestors(path))}
    modules = {}
    for path in sorted(paths, key=exported.call_order()):
        module = modules[path] = GraphModule(path, exported.types.get(path, ""))
        module.called, module.guessed = path in exported.called, path in exported.guessed
    graph = Graph(nodes, modules, inputs, outputs, constants)
    _ModuleReader(exported, graph).read()
    return graph


class _ModuleReader:
    def __init__(self, exported: PlacedGraph, graph: Graph) -> None:
        self._exported, self._graph = exported, graph

    def read(self) -> None:
        """Complete the modules of the graph."""
        exported, graph = self._exported, self._graph
        users: dict[str, set[str]] = defaultdict(set)  # value -> modules that use it
        for node, path in zip(exported.nodes, exported.modules, strict=True):
            for value in node.read:
                users[value].add(path)
            if path in graph.modules:
                self._read_settings(graph.modules[path], node)
        makers: dict[str, str | None] = dict.fromkeys(graph.inputs)
        makers |= {value: path for value, path in exported.module_of.items() if value}
        outputs, folded = set(graph.outputs), self._made_of_constants()
        for value, maker in makers.items():
            if value not in folded:
                self._read_value(value, maker, users[value], value in outputs)
        self._read_constants(users)
        for module in graph.modules.values():
            if not module.results:
                rest = module.more
                module.results, module.more = (rest[-1:], rest[:-1]) if module.path else ([], rest)

    def _made_of_constants(self) -> set[str]:
        """Return the values that nodes make of constants alone, as of a quantised weight."""
        constants, made = set(self._exported.shapes), set[str]()
        for node in self._exported.nodes:
            if node.read and constants.issuperset(node.read):
                made |= set(node.outputs)
                constants |= set(node.outputs)
        return made

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

    def _read_settings(self, module: GraphModule, node: ExportedNode) -> None:
        """Add the weights and settings of a node to its module."""
        exported = self._exported
        for place, value in enumerate(node.inputs):
            is_named = "." in value
            is_weight = value in exported.shapes and (is_named or exported.small.get(value) is None)
            if not module.called or not is_weight:
                continue
            if is_named:
                module.weights.setdefault(value.rpartition(".")[2], Weight(value))
            elif place in node.weights:
                name, weight = node.weights[place]
                module.weights.setdefault(name, weight)
        epsilon = exported.epsilon(node)
        if epsilon is not None:
            module.settings["eps"] = epsilon
