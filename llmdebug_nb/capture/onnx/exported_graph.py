"""An exported ONNX graph: which module each of its nodes ran in.

`torch.onnx.export(dynamo=True)` notes for each node its modules, its node in the traced program and
its source lines (``pkg.torch.onnx.*`` in ``metadata_props``, written by
``torch/onnx/_internal/exporter/_core.py``). Other exporters put the modules into the node's name
(``/model/layers.0/mlp/MatMul``). A node with neither is placed by its weight or its neighbours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llmdebug_nb.capture.onnx.proto import (
    common_module,
    exporter_metadata,
    names_in,
    small_constant,
)
from llmdebug_nb.core.paths import ancestors, within

if TYPE_CHECKING:
    import onnx

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_SLICED = re.compile(r"\.slice\([^)]*\)")  # torch.export's name for model.layers[:n]


class ExportedGraph:
    """The exported graph and what it says of each value.

    ``shapes``, ``small``: of its constants, by name. ``maker``, ``place``: the node that computes a
    value, and its place. ``users``: the nodes that read a value. ``modules``: the module of each
    node, in order; ``module_of``: the module that computes a value. ``types``: class names of
    modules. ``called``: modules that are called and don't only hold others. ``guessed``: modules
    that are only known by their weights.
    """

    def __init__(self, proto: onnx.GraphProto) -> None:
        self.proto = proto
        self.shapes = {one.name: tuple(one.dims) for one in proto.initializer}
        self.small = {one.name: small_constant(one) for one in proto.initializer}
        self.maker: dict[str, onnx.NodeProto] = {}
        self.place: dict[str, int] = {}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for place, node in enumerate(proto.node):
            for value in filter(None, node.output):
                self.maker[value], self.place[value] = node, place
            for value in node.input:
                self.users[value].append(node)
        self.types: dict[str, str] = {}
        self.guessed: set[str] = set()
        self.called: set[str] = set()
        stated = [self._stated_module(node) for node in proto.node]
        self.modules = [module or "" for module in self._completed(stated)]
        self.module_of = {
            value: module
            for node, module in zip(proto.node, self.modules, strict=True)
            for value in node.output
        }

    def call_order(self) -> Callable[[str], tuple[int, int, str]]:
        """Return a sort key for modules: parents first, siblings in order of execution."""
        first: dict[str, int] = {}
        for place, module in enumerate(self.modules):
            for path in (module, *ancestors(module)):
                first.setdefault(path, place)
        return lambda path: (first.get(path, len(self.modules)), path.count("."), path)

    # -- which module ---------------------------------------------------------------------------

    def _stated_module(self, node: onnx.NodeProto) -> str | None:
        """Return the module that a node belongs to by its own account, or None."""
        metadata = exporter_metadata(node)
        scopes = names_in(metadata.get("name_scopes"))
        if scopes and scopes[0] == _NO_MODULE:
            return ""
        if len(scopes) > 1:
            paths = [_SLICED.sub("", scope) for scope in scopes[:-1]]
            self.called.update(paths)
            types = names_in(metadata.get("class_hierarchy"))
            for path, name in zip(paths, types, strict=False):
                self.types.setdefault(path, name.rpartition(".")[2])
            return paths[-1]
        parts = node.name.split("/")
        if len(parts) > 1 and not parts[0]:
            paths = [".".join(parts[1:end]) for end in range(1, len(parts))]
            self.called.update(paths)
            return paths[-1]
        return self._module_of_weight(node)

    def _module_of_weight(self, node: onnx.NodeProto) -> str | None:
        """Return the module of a weight that only this node uses."""
        for value in node.input:
            if value in self.shapes and "." in value and len(self.users[value]) == 1:
                path = str(value).rpartition(".")[0]
                self.guessed.add(path)
                self.called.add(path)
                return path
        return None

    def _completed(self, stated: list[str | None]) -> list[str | None]:
        """Place the nodes without a module, such as those that a quantiser added.

        Such a node gets the innermost module that computes its inputs or uses its outputs.
        """
        known = {module for module in stated if module is not None}
        if not known or (not self.types and self.guessed):
            return stated  # only single nodes are known: the rest belongs to the root
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
        for place, node in enumerate(self.proto.node):
            if modules[place] is None:
                makers = (modules[self.place[value]] for value in node.input if value in self.place)
                modules[place] = next((holder(one) for one in makers if one is not None), None)
        return modules

    def _by_users(self, stated: list[str | None], holder: Callable[[str], str]) -> list[str | None]:
        """Place each remaining node in the module that holds all users of its outputs."""
        modules, nodes = list(stated), self.proto.node
        places = {id(node): place for place, node in enumerate(nodes)}
        for place in range(len(nodes) - 1, -1, -1):
            if modules[place] is None:
                users = (user for value in nodes[place].output for user in self.users[value])
                using = {modules[places[id(user)]] for user in users}
                shared = common_module(_known(using))
                modules[place] = "" if shared is None else holder(shared)
        return modules


def _known(modules: Iterable[str | None]) -> set[str]:
    return {module for module in modules if module is not None}
