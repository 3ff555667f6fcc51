"""An exported graph: which module each of its nodes ran in.

Exporters say it of most nodes, in metadata or in names. A node that says nothing is placed by its
weight or by its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.capture.graphs.graph import Weight, common_module
from llmdebug_nb.core.paths import ancestors, within


@dataclass(slots=True)
class ExportedNode:
    """A node of the graph as it was exported.

    ``op``: its type, ``MatMul``. ``inputs``, ``outputs``: names of values, "" for one that is left
    out. ``inner``: values that its branches and loops read. ``module``: the module that it says it
    ran in, None if it says nothing. ``weights``: places of inputs that are weights whatever their
    names are, with the name in the module. ``epsilon``: its attribute.
    """

    name: str
    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    inner: Sequence[str] = ()
    module: str | None = None
    weights: Mapping[int, tuple[str, Weight]] = field(default_factory=dict)
    epsilon: float | None = None

    @property
    def read(self) -> list[str]:
        """The values that it reads, those of its branches and loops included."""
        return [value for value in (*self.inputs, *self.inner) if value]


class PlacedGraph:
    """The exported graph and what it says of each value.

    ``shapes``, ``small``: of its constants, by name. ``maker``, ``place``: the node that computes a
    value, and its place. ``users``: the nodes that read a value. ``modules``: the module of each
    node, in order; ``module_of``: the module that computes a value. ``types``: class names of
    modules. ``called``: modules that are called and don't only hold others. ``guessed``: modules
    that are only known by their weights.
    """

    def __init__(
        self, nodes: Sequence[ExportedNode], shapes: Mapping[str, tuple[int, ...]],
        small: Mapping[str, object], called: Collection[str], types: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.nodes, self.shapes, self.small, self.types = nodes, shapes, small, types
        self.maker: dict[str, ExportedNode] = {}
        self.place: dict[str, int] = {}
        self.users: dict[str, list[ExportedNode]] = defaultdict(list)
        for place, node in enumerate(nodes):
            for value in filter(None, node.outputs):
                self.maker[value], self.place[value] = node, place
            for value in node.inputs:
                self.users[value].append(node)
        self.guessed: set[str] = set()
        self.called = set(called)
        named = any(node.module is not None for node in nodes)
        stated = [
            self._module_of_weight(node) if node.module is None else node.module for node in nodes
        ]
        self.modules = [module or "" for module in (self._completed(stated) if named else stated)]
        self.module_of = {
            value: module
            for node, module in zip(nodes, self.modules, strict=True)
            for value in node.outputs
        }

    def call_order(self) -> Callable[[str], tuple[int, int, str]]:
        """Return a sort key for modules: parents first, siblings in order of execution."""
        first: dict[str, int] = {}
        for place, module in enumerate(self.modules):
            for path in (module, *ancestors(module)):
                first.setdefault(path, place)
        return lambda path: (first.get(path, len(self.modules)), path.count("."), path)

    def epsilon(self, node: ExportedNode) -> float | None:
        """Return a node's epsilon: an attribute, or the constant that is added below a root."""
        if node.epsilon is not None:
            return node.epsilon
        users = self.users[node.outputs[0]] if node.op == "Add" else ()
        if any(user.op in ("Sqrt", "Rsqrt") for user in users):
            constants = (self.small.get(value) for value in node.inputs)
            return next((number for number in constants if isinstance(number, float)), None)
        return None

    # -- which module ---------------------------------------------------------------------------

    def _module_of_weight(self, node: ExportedNode) -> str | None:
        """Return the module of a weight that only this node uses."""
        for value in node.inputs:
            if value in self.shapes and "." in value and len(self.users[value]) == 1:
                path = value.rpartition(".")[0]
                self.guessed.add(path)
                self.called.add(path)
                return path
        return None

    def _completed(self, stated: list[str | None]) -> list[str | None]:
        """Place the nodes without a module, such as those that a quantiser or converter added.

        Between two nodes of one module, such a node is in it, too. Else it gets the innermost
        module that holds others, of those that compute its inputs or use its outputs.
        """

        def same(module: str) -> str:
            return module

        ends = self._by_inputs(stated, same), self._by_users(stated, same)
        stated = [
            source if module is None and source == user else module
            for module, source, user in zip(stated, *ends, strict=True)
        ]
        known = {module for module in stated if module is not None}
        holders = {above for module in known for above in ancestors(module)} | {""}

        def holder(module: str) -> str:
            """Return the innermost module that holds others, and hence may hold further nodes."""
            return module if module in holders else next(iter(ancestors(module)), "")

        by_inputs, by_users = self._by_inputs(stated, holder), self._by_users(stated, holder)
        completed = list(stated)
        for place, module in enumerate(stated):
            if module is None:
                source, user = by_inputs[place], by_users[place] or ""
                is_deeper = user and source is not None and within(source, user)
                completed[place] = source if is_deeper else user
        return completed

    def _by_inputs(
        self, stated: list[str | None], holder: Callable[[str], str]
    ) -> list[str | None]:
        """Place each remaining node in the module that computes its first input."""
        modules = list(stated)
        for place, node in enumerate(self.nodes):
            if modules[place] is None:
                makers = (modules[self.place[v]] for v in node.inputs if v in self.place)
                modules[place] = next((holder(one) for one in makers if one is not None), None)
        return modules

    def _by_users(self, stated: list[str | None], holder: Callable[[str], str]) -> list[str | None]:
        """Place each remaining node in the module that holds all users of its outputs."""
        modules = list(stated)
        places = {id(node): place for place, node in enumerate(self.nodes)}
        for place in range(len(self.nodes) - 1, -1, -1):
            if modules[place] is None:
                outputs = self.nodes[place].outputs
                users = (user for value in outputs for user in self.users[value])
                using = {modules[places[id(user)]] for user in users}
                shared = common_module(_known(using))
                modules[place] = "" if shared is None else holder(shared)
        return modules


def _known(modules: Iterable[str | None]) -> set[str]:
    return {module for module in modules if module is not None}


def scoped(name: str) -> list[str]:
    """Return the modules that a node's name ``/model/layers.0/mlp/MatMul`` lists, outermost first.

    Empty: it lists none.
    """
    parts = name.split("/")
    if len(parts) < 2 or parts[0]:
        return []
    return [".".join(parts[1:end]) for end in range(1, len(parts))]
