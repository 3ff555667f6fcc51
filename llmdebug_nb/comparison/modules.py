"""What the modules of a model tell of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import Node, Record


class Modules:
    """The modules of a model: how many are in each, and which outputs are logits.

    ``vocabularies``: the numbers of rows of its embeddings.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._sizes = Counter(around for node in nodes for around in ancestors(node.path))
        shapes = {
            node.path: [tuple(shape) for shape in node.params.values() if len(shape) == 2]
            for node in nodes
        }
        embeddings = {node.path for node in nodes if "embedding" in node.type.lower()}
        tables = {shape for path in embeddings for shape in shapes[path]}
        # A head projects back onto the rows of an embedding, tied to it or not.
        # A root may do so by itself.
        self._heads = {
            path for path in shapes if path not in embeddings and tables.intersection(shapes[path])
        }
        self._heads |= {node.path for node in nodes if node.parent < 0}
        self.vocabularies = {rows for rows, _ in tables}

    def size(self, path: str) -> int:
        """Return how many modules are inside one."""
        return self._sizes[path]

    def are_logits(self, record: Record) -> bool:
        """Tell whether a tensor is an output whose last axis is the vocabulary."""
        site, summary = record.site, record.summary
        if site.role != "output" or site.phase != "forward":
            return False
        if not summary.shape or "float" not in summary.dtype:
            return False
        if self.vocabularies:
            return site.path in self._heads and summary.shape[-1] in self.vocabularies
        return "logits" in (site.slot, site.path.rpartition(".")[2])
