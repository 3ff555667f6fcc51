"""Layers: the repeated blocks of a model, such as ``model.layers.3``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Node

_STACKS = {"ModuleList", "Sequential"}
_LAYER = re.compile(r"(?:[^/]*?\.)?\d+(?=[./]|$)")


def layer_of(path: str) -> str:
    """Return the outermost layer that a path is or lies in, known by its number; "" for none."""
    layer = _LAYER.match(path)
    return layer[0] if layer else ""


def is_layer(path: str) -> bool:
    """Tell whether a path is that of a numbered module."""
    return not is_operator(path) and path.rpartition(".")[2].isdigit()


def repeated_layers(nodes: Sequence[Node]) -> set[str]:
    """Return the paths of the repeated layers: numbered modules of one class in one list.

    Of nested lists it is the outermost one; of several models in one, the layers of each.
    """
    members: dict[tuple[int, str], list[str]] = defaultdict(list)
    for node in nodes:
        if node.name.isdigit() and node.parent >= 0:
            members[node.parent, node.type].append(node.path)
    lists = [
        (nodes[parent].path.count("."), kind, paths)
        for (parent, kind), paths in members.items()
        if len(paths) > 1
    ]
    parents = {nodes[node.parent].path for node in nodes if node.parent >= 0}
    lists = [one for one in lists if one[2][0] in parents] or lists
    if not lists:
        return set()
    depth, kind, _ = min(lists, key=lambda one: (one[0], -len(one[2]), one[1]))
    return {path for *place, paths in lists if place == [depth, kind] for path in paths}


def parts(nodes: Sequence[Node]) -> list[int]:
    """Return the modules that divide a model: the members of stacks, and what lies beside stacks.

    A stack (ModuleList, Sequential, or any module whose children are all numbered) holds layers.
    A module around a stack is no part, and stacks inside a part are ignored. A model that would be
    a single part is divided further. The modules are given by their indices in ``nodes``.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        children[node.parent].append(index)
    tree = _Stacks(nodes, dict(children))
    found = list(tree.outermost(children[-1]))
    while len(found) == 1 and children.get(found[0]):
        found = list(tree.outermost(children[found[0]]))
    return found


class _Stacks:
    """The stacks of a model. ``around``: they and all modules that hold them."""

    def __init__(self, nodes: Sequence[Node], children: dict[int, list[int]]) -> None:
        self._nodes, self._children = nodes, children
        self._around = set[int]()
        for index in range(len(nodes)):
            at = index if self._is_stack(index) else -1
            while at >= 0 and at not in self._around:
                self._around.add(at)
                at = nodes[at].parent

    def _is_stack(self, index: int) -> bool:
        members = self._children.get(index, [])
        return bool(members) and (
            self._nodes[index].type in _STACKS
            or all(self._nodes[member].name.isdigit() for member in members)
        )

    def outermost(self, indices: Iterable[int]) -> Iterator[int]:
        """Yield the members of the outermost stacks below these modules, and those beside them."""
        for index in indices:
            if self._is_stack(index):
                yield from self._children[index]
            elif index in self._around:
                yield from self.outermost(self._children[index])
            else:
                yield index
