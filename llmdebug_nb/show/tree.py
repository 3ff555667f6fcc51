"""The model tree as the explorer shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llmdebug_nb.errors import TensorLookupError
from llmdebug_nb.records import Node
from llmdebug_nb.show import wire


class Tree:
    """The model tree with row counts rolled up to every ancestor."""

    def __init__(self, nodes: list[Node], rows: Counter[str], bad: Counter[str]) -> None:
        self.nodes = nodes or _from_paths({*rows, *bad})
        self.kids: dict[int, list[int]] = {}
        self.at: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            self.kids.setdefault(node.parent, []).append(i)
            for name in (node.path, *node.aliases):
                self.at.setdefault(name, i)
        self.rows = [rows[node.path] for node in self.nodes]
        self.bad = [bad[node.path] for node in self.nodes]
        for i in range(len(self.nodes) - 1, -1, -1):  # parents come before children
            parent = self.nodes[i].parent
            if parent >= 0:
                self.rows[parent] += self.rows[i]
                self.bad[parent] += self.bad[i]

    def children(self, parent: int, start: int, n: int) -> wire.Children:
        kids = self.kids.get(parent, [])
        return {"total": len(kids), "nodes": [self._view(i) for i in kids[start : start + n]]}

    def _view(self, i: int) -> wire.TreeNode:
        node = self.nodes[i]
        note = f"also {', '.join(node.aliases)}" if node.aliases else ""
        return {
            "id": i,
            "label": node.name,
            "path": node.path,
            "type": node.type,
            "children": len(self.kids.get(i, ())),
            "rows": self.rows[i],
            "bad": self.bad[i],
            "note": note,
        }

    def way(self, path: str) -> list[int]:
        """Return node ids from a root down to the node at ``path``, or to its nearest ancestor that exists."""
        while path not in self.at and path:
            path = path.rpartition(".")[0]
        ids, i = [], self.at.get(path, -1)
        while i >= 0:
            ids.append(i)
            i = self.nodes[i].parent
        return ids[::-1]

    def path(self, node: int) -> str | None:
        """Return the path of a node; None for -1 (everything). Raises TensorLookupError for no such node."""
        if node == -1:
            return None
        if not 0 <= node < len(self.nodes):
            raise TensorLookupError(f"the tree has no node {node}; it has {len(self.nodes)}")
        return self.nodes[node].path


def _from_paths(paths: Iterable[str]) -> list[Node]:
    """Return a tree made from dotted paths, for dumps that came without one."""
    every = {""}
    for path in paths:
        parts = path.split(".")
        every.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    order = sorted(
        every,
        key=lambda path: [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in path.split(".")] if path else [],
    )
    at = {path: i for i, path in enumerate(order)}
    return [
        Node(path, path.rpartition(".")[2] or "(root)", "", at[path.rpartition(".")[0]] if path else -1)
        for path in order
    ]
