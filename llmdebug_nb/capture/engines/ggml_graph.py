"""A graph of ggml as a model: its nodes, and the modules that own their weights.

Nothing in a graph names modules. A weight's name says which module it is of: ``blk.0.attn_q`` has
``blk.0.attn_q.weight`` and perhaps a bias. A node that uses a weight runs in its module; so does a
norm whose result is at once multiplied by one. Other nodes run in the block that the end of their
name says (``l_out-0``), nameless ones in that of the node before.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmdebug_nb.core.ggml import PREFIX, PRODUCTS, owner_of
from llmdebug_nb.core.paths import ancestors, bounded
from llmdebug_nb.core.records import Node

_BLOCK = "blk"  # of tensor names in a GGUF file: blk.0.attn_q.weight
_IN_BLOCK = re.compile(rf"(?:.+\.)?{_BLOCK}\.\d+(?=\.|$)")
_NUMBERED = re.compile(r"-(\d+)$")
_NAMELESS = re.compile(r"(node|leaf)_\d+|")
_NORMS = ("NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM")
# nodes that compute nothing, or only write into the cache
_NO_VALUES = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "SET_ROWS", "CPY", "SET")


def has_values(op: str, sources: Sequence[str]) -> bool:
    """Tell whether a node has values that no other node has. ``sources``: their operations.

    A view has none, unless it keeps the first of what was sorted: ggml has no other top-k.
    """
    return op not in _NO_VALUES or (op == "VIEW" and tuple(sources[:1]) == ("ARGSORT",))


class NodeKey(NamedTuple):
    """A node of a graph. ``name``: its own, or the weight's it uses. ``number``: n-th of these."""

    name: str
    op: str
    number: int


@dataclass(slots=True)
class GraphNode:
    """A node. ``sources``: what it is made of, through views. ``weights``: names -> shapes."""

    key: NodeKey
    sources: tuple[NodeKey, ...]
    weights: dict[str, list[int]]
    dtypes: dict[str, str] = field(default_factory=dict)
    module: str = ""


class Keys:
    """Numbers the nodes of a graph that have the same name and operation."""

    def __init__(self, taken: Iterable[NodeKey] = ()) -> None:
        self._count = Counter((key.name, key.op) for key in taken)

    def next(self, name: str, op: str, weights: Sequence[str]) -> NodeKey:
        if _NAMELESS.fullmatch(name):
            name = weights[0] if weights else ""
        number = self._count[name, op]
        self._count[name, op] += 1
        return NodeKey(name, op, number)


class Graph:
    """The nodes of a graph in execution order, each with its module; and the modules' tree.

    ``nodes``: by key. ``readers``: how many nodes read the result of each.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.nodes = {node.key: node for node in nodes}
        self.readers = Counter(key for node in nodes for key in {*node.sources})
        self.types: dict[str, str] = {}
        self.weights: dict[str, dict[str, list[int]]] = defaultdict(dict)
        self.dtypes: dict[str, str] = {}
        block = ""
        for at, node in enumerate(nodes):
            following = nodes[at + 1] if at + 1 < len(nodes) else None
            block = self._place(node, following, block)
        self._called = {"", *(node.module for node in nodes)}

    def _place(self, node: GraphNode, following: GraphNode | None, block: str) -> str:
        """Find the module of a node; return the block that it runs in."""
        owner = next((owner_of(name)[0] for name in node.weights), None)
        if (
            owner is None
            and node.key.op in _NORMS
            and following is not None
            and (node.key in following.sources)
        ):
            owner = next((owner_of(name)[0] for name in following.weights), None)
        if owner is not None:
            inside = _IN_BLOCK.match(owner)
            block = inside[0] if inside else block_of(node.key.name)
            self.types.setdefault(owner, node.key.op)
        elif not _NAMELESS.fullmatch(node.key.name):
            block = block_of(node.key.name)
        for name, shape in node.weights.items():
            module, slot = owner_of(name)
            self.weights[module][slot] = shape
            self.dtypes[name] = node.dtypes.get(name, "")
        node.module = block if owner is None else owner
        return block

    def products(self) -> dict[str, str]:
        """Return the type of the weight that a module multiplies with, by the module's path."""
        return {
            owner_of(name)[0]: kind
            for node in self.nodes.values()
            if PREFIX + node.key.op in PRODUCTS
            for name, kind in node.dtypes.items()
        }

    def modules(self) -> list[str]:
        """Return the paths of all modules, parents first, in execution order."""
        found: dict[str, None] = {"": None}
        for node in self.nodes.values():
            for path in reversed([node.module, *ancestors(node.module)]):
                found.setdefault(path)
        for path in self.weights:
            found.setdefault(path)
        return sorted(found, key=lambda path: path.count(".") if path else -1)

    def borders(self) -> set[NodeKey]:
        """Return the nodes with which modules begin or end."""
        nodes = list(self.nodes.values())
        homes = [None, *({node.module, *ancestors(node.module)} for node in nodes), None]
        return {
            node.key
            for node, before, after in zip(nodes, homes, homes[2:], strict=False)
            if any(home is None or node.module not in home for home in (before, after))
        }

    def called(self, path: str) -> bool:
        """Tell whether a module is called: it does not only hold other modules."""
        return path in self._called

    def type_of(self, path: str, label: str) -> str:
        """Return a module's type: the operation that it begins with."""
        if not path:
            return label
        if path in self.types:
            return PREFIX + self.types[path].title().replace("_", "")
        return "Block" if _IN_BLOCK.fullmatch(path) else "ModuleList"

    def topology(self, label: str, prefix: str) -> list[Node]:
        """Return the modules as rows of a dump's topology."""
        paths, rows = list(self._tree()), []
        index = {path: at for at, path in enumerate(paths)}
        root = prefix.rstrip(".") or label
        for path in paths:
            above = next((one for one in ancestors(path) if one in index), None)
            name = path[len(above or "") :].lstrip(".") if path else label
            parent = -1 if above is None else index[above]
            kind, shapes = self.type_of(path, label), self.weights.get(path, {})
            rows.append(Node(path_in(prefix, path), name, kind, parent, dict(shapes), root=root))
        return rows

    def _tree(self) -> Iterator[str]:
        """Yield the paths of all modules, each one followed by those inside of it."""
        children: dict[str | None, list[str]] = defaultdict(list)
        known = set(self.modules())
        for path in self.modules():
            above = next((one for one in ancestors(path) if one in known), None)
            children[above].append(path)

        def walk(path: str) -> Iterator[str]:
            yield path
            for child in children[path]:
                yield from walk(child)

        yield from walk("")


def block_of(name: str) -> str:
    """Return the block that the end of a node's name says; "" if it says none."""
    number = _NUMBERED.search(name)
    return f"{_BLOCK}.{int(number[1])}" if number else ""


@functools.lru_cache(maxsize=4096)
def path_in(prefix: str, path: str) -> str:
    """Return the path of a module in the dump."""
    return bounded((prefix + path).rstrip("."))
