"""The model tree as the explorer shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.paths import module_of, within
from llmdebug_nb.core.records import Node
from llmdebug_nb.show import wire

_COMMENTS = 3  # of a note


class Tree:
    """The model tree with counts of rows rolled up to every ancestor.

    ``judged``: for a comparison, the counts of rows within noise, without a partner, and as
    expected. ``comments``: those of the expected rows, by path.
    """

    def __init__(
        self,
        nodes: list[Node],
        rows: Counter[str],
        bad: Counter[str],
        judged: tuple[Counter[str], Counter[str], Counter[str]] | None = None,
        comments: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.nodes = nodes or _from_paths({*rows, *bad})
        self.kids: dict[int, list[int]] = {}
        self.at: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            self.kids.setdefault(node.parent, []).append(i)
            self.at.setdefault(node.path, i)
            for name in node.aliases:
                self.at.setdefault(name, i)
        self.judged = judged is not None
        self.rows, self.bad, self.near, self.alone, self.expected = (
            self._rolled_up(counts)
            for counts in (rows, bad, *(judged or (Counter(), Counter(), Counter())))
        )
        self._comments: dict[int, dict[str, None]] = {}
        for path, texts in (comments or {}).items():
            i = self.nearest(path)
            while i >= 0:
                self._comments.setdefault(i, {}).update(dict.fromkeys(texts))
                i = self.nodes[i].parent

    def _rolled_up(self, counts: Counter[str]) -> list[int]:
        """Return the sums over each node and the nodes below it.

        An operator counts for the module that called it.
        """
        sums = [0] * len(self.nodes)
        if not counts:
            return sums
        for path, count in counts.items():
            if (i := self.nearest(path)) >= 0:
                sums[i] += count
        for i in range(len(self.nodes) - 1, -1, -1):  # parents come before children
            if (parent := self.nodes[i].parent) >= 0:
                sums[parent] += sums[i]
        return sums

    def nearest(self, path: str) -> int:
        """Return the node of the module at ``path`` or of its nearest ancestor; -1 for none."""
        if path in self.at:
            return self.at[path]
        module = module_of(path)
        while module not in self.at and module:
            module = module.rpartition(".")[0]
        return self.at.get(module, -1) if module or within(path, "") else -1

    def _verdict(self, i: int) -> wire.Verdict | None:
        """Return the worst verdict at a node and below it, of the rows that were compared."""
        if not self.judged or not self.rows[i]:
            return None
        if self.bad[i]:
            return "diverged"
        if self.expected[i]:
            return "expected"
        if self.near[i]:
            return "within_noise"
        return "match" if self.rows[i] > self.alone[i] else "unmatched"

    def children(self, parent: int, start: int, n: int) -> wire.Children:
        kids = self.kids.get(parent, [])
        return {"total": len(kids), "nodes": [self._view(i) for i in kids[start : start + n]]}

    def _view(self, i: int) -> wire.TreeNode:
        node = self.nodes[i]
        notes = [f"also {', '.join(node.aliases)}"] if node.aliases else []
        if self.expected[i]:
            comments = list(self._comments.get(i, ()))
            more = f" and {len(comments) - _COMMENTS} more" if len(comments) > _COMMENTS else ""
            text = f": {'; '.join(comments[:_COMMENTS])}{more}" if comments else ""
            notes.append(f"{self.expected[i]:,} expected{text}")
        return {
            "id": i,
            "label": node.name,
            "path": node.path,
            "type": node.type,
            "children": len(self.kids.get(i, ())),
            "rows": self.rows[i],
            "bad": self.bad[i],
            "unmatched": self.alone[i],
            "expected": self.expected[i],
            "verdict": self._verdict(i),
            "note": " · ".join(notes),
        }

    def way(self, path: str) -> list[int]:
        """Return the nodes from a root down to the one at ``path`` or its nearest ancestor."""
        ids, i = [], self.nearest(path)
        while i >= 0:
            ids.append(i)
            i = self.nodes[i].parent
        return ids[::-1]

    def path(self, node: int) -> str | None:
        """Return the path of a node; None for -1, which means everything.

        Raises:
            TensorLookupError: there is no such node.
        """
        if node == -1:
            return None
        if not 0 <= node < len(self.nodes):
            raise TensorLookupError(f"the tree has no node {node}; it has {len(self.nodes)}")
        return self.nodes[node].path


def _from_paths(paths: Iterable[str]) -> list[Node]:
    """Return a tree made from dotted paths, for dumps without a tree."""
    every = {""}
    for path in paths:
        parts = module_of(path).split(".")
        every.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    order = sorted(every, key=_by_number)
    at = {path: i for i, path in enumerate(order)}
    nodes = []
    for path in order:
        above, _, name = path.rpartition(".")
        nodes.append(Node(path, name or "(root)", "", at[above] if path else -1))
    return nodes


def _by_number(path: str) -> list[tuple[bool, int, str]]:
    """Return the sort key of a path: layers.2 comes before layers.10, and the root first."""
    names = path.split(".") if path else []
    return [(not one.isdigit(), int(one) if one.isdigit() else 0, one) for one in names]
