"""A graph of the program that is recorded: its modules in the dump, and what the filters keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.graphs.graph import (
    Graph,
    GraphModule,
    GraphNode,
    ModuleBegins,
    Scalar,
    Weight,
)
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.capture.runtime import GraphFacts
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.paths import ancestors, bounded
from llmdebug_nb.core.records import Node


class Exposed(Protocol):
    """Runs a graph of the program and returns the outputs of its nodes, too.

    ``graph``: it. ``coarse``, ``rounding``: see `Run`.
    """

    @property
    def graph(self) -> Graph: ...
    @property
    def coarse(self) -> Sequence[str]: ...
    @property
    def rounding(self) -> float: ...
    def gives(self, name: str) -> bool:
        """Tell whether it returns a value."""

    def facts(self, node: GraphNode) -> Sequence[Scalar]:
        """Return what it knows of how a node runs."""

    def has_constant(self, name: str) -> bool:
        """Tell whether a value is a constant."""

    def constant(self, name: str) -> torch.Tensor | None:
        """Return a constant; None if torch has no such dtype. Raises ValueError, OSError."""

    def shape(self, weight: Weight) -> list[int]:
        """Return the shape of a weight in its module."""

    def close(self) -> None:
        """Free what it holds."""


class FollowedGraph:
    """What the program runs, and how it is recorded.

    ``target``: a model of a runtime. ``exposed``: ours, with all values as outputs; None if there
    is none, and only inputs and outputs are seen. ``fed``: the names of its inputs. ``label``: the
    name of its root. ``prefix``: that of its paths, "" for the first root. ``kept``: module ->
    whether the filters ask for it. ``needed``: values that are computed for the recording.
    ``described``: calls whose node is already described in the dump. ``ran``: root calls in which
    ours ran.
    """

    def __init__(
        self, parts: Parts, target: object, fed: Collection[str], exposed: Exposed | None,
        fallback: str,
    ) -> None:  # fmt: skip
        """``fallback``: the label if the graph names no class of its root."""
        self._parts, self.target, self.fed, self.exposed = parts, target, fed, exposed
        self.label = (exposed.graph.modules[""].type if exposed is not None else "") or fallback
        self._operators = OperatorFilter(parts.options.apis)
        self.prefix = parts.roots.next_prefix(self.label)
        self.kept: dict[str, bool] = {}
        self.needed: list[str] = []
        self.has_weights = False
        self.described: set[tuple[str, int]] = set()
        self.checked: set[tuple[object, ...]] = set()
        self.ran: list[int] = []
        self.plan = exposed.graph.plan() if exposed is not None else []
        nodes = self.topology()
        parts.roots.add_nodes(nodes)
        parts.steps.add_root(self, nodes[0].root)
        self.select()

    def facts(self) -> GraphFacts:
        kept, exposed = any(self.kept.values()), self.exposed
        if exposed is None:
            return GraphFacts(self.label, kept, ())
        operators = {node.op for node in exposed.graph.nodes}
        return GraphFacts(self.label, kept, operators, exposed.coarse, exposed.rounding)

    def expose(self, exposed: Exposed) -> None:
        """Record it by another one of ours, whose graph has the same modules."""
        self.exposed, self.plan = exposed, exposed.graph.plan()
        self.select()

    def path(self, module: str) -> str:
        """Return the path of one of its modules in the dump."""
        return bounded((self.prefix + module).rstrip("."))

    def topology(self) -> list[Node]:
        """Return its modules as rows of the topology."""
        if self.exposed is None:
            return [Node(self.path(""), self.label, self.label, -1, root=self.label)]
        modules = self.exposed.graph.modules
        index = {path: place for place, path in enumerate(modules)}
        root = self.prefix.rstrip(".") or self.label
        rows = []
        for path, module in modules.items():
            kind = module.type or ("Module" if module.called else "ModuleList")
            above = next((one for one in ancestors(path) if one in index), None)
            parent = index[above] if above is not None else -1
            name = path[len(above or "") :].lstrip(".")
            if not path:
                name, kind = self.label, module.type or self.label
            shapes = {slot: self.exposed.shape(one) for slot, one in module.weights.items()}
            rows.append(Node(self.path(path), name, kind, parent, shapes, root=root))
        return rows

    # -- what the filters keep --------------------------------------------------------------------

    def select(self) -> None:
        """Apply the filters: which modules are recorded, which values are needed."""
        exposed, options = self.exposed, self._parts.options
        modules = exposed.graph.modules if exposed is not None else {"": GraphModule("")}
        self.kept = {}
        for path, module in modules.items():
            name = self.path(path)
            wanted = selection.selects(options, (name, path), module.type)
            by_control = self._parts.filter.selected_modules([name], self._parts.roots.nodes)
            self.kept[path] = wanted and by_control[0]
        if exposed is not None:
            outputs = exposed.graph.outputs
            wants = self._wants(outputs)
            self.needed = [name for name in wants if exposed.gives(name) or name in outputs]

    def _wants(self, outputs: Sequence[str]) -> list[str]:
        """Return the outputs of the graph and the values that are recorded."""
        names = dict.fromkeys(outputs)
        for step in self.plan:
            if isinstance(step, GraphNode) and self.is_wanted(step):
                names |= dict.fromkeys([*step.inputs, *step.outputs])
            elif isinstance(step, ModuleBegins) and self.kept[step.module.path]:
                module = step.module
                names |= dict.fromkeys([*module.inputs, *module.results, *module.more])
        return list(names)

    def is_wanted(self, node: GraphNode) -> bool:
        """Tell whether a node is recorded."""
        inside = any(self.kept.get(path) for path in (node.module, *ancestors(node.module)))
        return inside and node.op in self._operators and self._begins(node.op)

    def _begins(self, op: str) -> bool:
        """Tell whether an operator's name begins as requested, if operators are so filtered."""
        options = self._parts.options
        is_filtered = options.opname and options.operators
        return not is_filtered or selection.starts_with_any(op, options.opname)
