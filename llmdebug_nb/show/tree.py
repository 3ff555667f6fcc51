"""The model tree as the explorer shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Node
from llmdebug_nb.show import wire

_SAID = 3  # comments of a note


class Tree:
    """The model tree with counts of rows rolled up to every ancestor.

    ``near``, ``alone``, ``expected``: rows within noise, without a partner and as expected, where rows are those of a comparison; ``said``: what was
    said of those, by path.
    """

    def __init__(
        self,
        nodes: list[Node],
        rows: Counter[str],
        bad: Counter[str],
        near: Counter[str] | None = None,
        alone: Counter[str] | None = None,
        expected: Counter[str] | None = None,
        said: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.nodes = nodes or _from_paths({*rows, *bad})
        self.kids: dict[int, list[int]] = {}
        self.at: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            self.kids.setdefault(node.parent, []).append(i)
            self.at.setdefault(node.path, i)
            for name in node.aliases:
                self.at.setdefault(name, i)
        self.judged = near is not None
        self.rows, self.bad, self.near, self.alone, self.expected = (
            self._rolled_up(counts or Counter()) for counts in (rows, bad, near, alone, expected)
        )
        self._said: dict[int, dict[str, None]] = {}
        for path, texts in (said or {}).items():
            i = self.nearest(path)
            while i >= 0:
                self._said.setdefault(i, {}).update(dict.fromkeys(texts))
                i = self.nodes[i].parent

    def _rolled_up(self, counts: Counter[str]) -> list[int]:
        """Return the sum over each node and what lies below it; an operator counts where it was called."""
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
        """Return the node of the module at ``path`` or of the nearest one above it; -1 for none."""
        if path in self.at:
            return self.at[path]
        module = path.partition("/")[0]
        while module not in self.at and module:
            module = module.rpartition(".")[0]
        return self.at.get(module, -1) if module or within(path, "") else -1

    def _verdict(self, i: int) -> wire.Verdict | None:
        """Return the worst verdict at a node and below it, on what could be compared."""
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
            said = list(self._said.get(i, ()))
            more = f" and {len(said) - _SAID} more" if len(said) > _SAID else ""
            notes.append(
                f"{self.expected[i]:,} expected"
                + (f": {'; '.join(said[:_SAID])}{more}" if said else "")
            )
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
        """Return node ids from a root down to the node at ``path``, or to its nearest ancestor that exists."""
        ids, i = [], self.nearest(path)
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
        parts = path.partition("/")[0].split(".")
        every.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    order = sorted(
        every,
        key=lambda path: (
            [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in path.split(".")]
            if path
            else []
        ),
    )
    at = {path: i for i, path in enumerate(order)}
    return [
        Node(
            path,
            path.rpartition(".")[2] or "(root)",
            "",
            at[path.rpartition(".")[0]] if path else -1,
        )
        for path in order
    ]
