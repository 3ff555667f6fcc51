"""Execution ids as msit counts them: over the layers of a model and what runs beside them.

ATB's graph of a model has its layers at the top: the embedding is 0, and layer 0 of a Llama is 2. A
module that only holds the layers, such as ``model.model``, is no operation there and has no number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from llmdebug_nb.core.layers import repeated_layers
from llmdebug_nb.core.records import Node

MARK = "msit:"  # before an id of this kind where users write ids


class PartIds:
    """Numbers the calls of modules in one step, as they begin.

    ``around``: paths of the modules that only hold the layers, see `holders`.
    """

    def __init__(self, around: Collection[str]) -> None:
        self._around = around
        self._of = {"": ""}  # execution id of a module call -> its id here, "" if it has no number
        self._top = 0

    def of(self, path: str, id_: str) -> str | None:
        """Return the id of a call whose execution id is ``id_``; None if it has no number here.

        An operator (``3_1.4``) keeps its number in the module call; outside of all parts it has
        none.
        """
        module, dot, operator = id_.partition(".")
        if dot:
            return f"{part}.{operator}" if (part := self._of.get(module)) else None
        above, _, number = module.rpartition("_")
        outer = self._of.get(above)
        if not module or outer is None:
            return None
        if path in self._around and not outer:
            self._of[module] = ""
            return None
        if outer:
            self._of[module] = f"{outer}_{number}"
        else:
            self._of[module] = str(self._top)
            self._top += 1
        return self._of[module]


def holders(nodes: Sequence[Node]) -> set[str]:
    """Return the paths of the modules that only hold the layers of a model, without its root."""
    return {
        ".".join(parts[:length])
        for parts in (path.split(".") for path in repeated_layers(nodes))
        for length in range(1, len(parts))
    }


def part_ids(
    ids: Mapping[tuple[str, int], str], nodes: Sequence[Node]
) -> dict[tuple[str, int], str]:
    """Return the ids as msit counts them, for execution ids by path and call in their order."""
    count = PartIds(holders(nodes))
    numbered: Iterable[tuple[tuple[str, int], str | None]] = (
        (call, count.of(call[0], id_)) for call, id_ in ids.items()
    )
    return {call: number for call, number in numbered if number is not None}
