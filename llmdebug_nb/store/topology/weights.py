"""The parameters and buffers of a run, and their use by operators."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from llmdebug_nb.core.records import Node

if TYPE_CHECKING:
    from llmdebug_nb.store.run import Run


class Weights:
    """Parameters and buffers of the modules. ``shapes``: by name."""

    def __init__(self, run: Run, nodes: dict[str, Node]) -> None:
        self._own: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
        self._by_bytes: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        known = {
            (row.path, row.slot): (row.type, row.value) for row in run.index.scalars(role="weight")
        }
        known |= {
            (r.site.path, r.site.slot): (r.summary.dtype, r.summary.fingerprint)
            for r in run.records(role="weight")
        }
        for path, node in nodes.items():
            for slot, shape in node.params.items():
                kind, content = known.get((path, slot), ("", None))
                self._own[path][slot] = (kind.partition(" ")[0], tuple(shape))
                self.shapes[_join(path, slot)] = tuple(shape)
                if content:
                    self._by_bytes[content].append((path, slot))

    def of(self, path: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of a module's own parameters and buffers."""
        return [(_join(path, slot), *kind) for slot, kind in self._own.get(path, {}).items()]

    def find(
        self, path: str, dtype: str, shape: tuple[int, ...], content: str | None
    ) -> str | None:
        """Return the weight that is an operator's input, or None.

        Weights with the same bytes are taken first, its own module's before others; then the only
        weight of its module with that shape, also transposed.
        """
        module = path.partition("/")[0]
        if "/" not in path:
            return None
        same = self._by_bytes.get(content or "", [])
        if same:
            return _join(*next((one for one in same if one[0] == module), same[0]))
        fits = [
            slot
            for slot, (kind, sizes) in self._own.get(module, {}).items()
            if sizes in (shape, shape[::-1]) and kind in ("", dtype) and len(shape) > 1
        ]
        return _join(module, fits[0]) if len(fits) == 1 else None


def _join(path: str, slot: str) -> str:
    return f"{path}.{slot}" if path else slot
