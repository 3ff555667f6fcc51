"""Which outputs the programs use again, as far as inputs were recorded."""

from __future__ import annotations

from collections.abc import Iterable

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import CallKey, Record


class Uses:
    """The outputs of two runs that a later tensor is, or is a view of."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        both = list(pairs)
        records = [[r for pair in both if (r := pair.own(side))] for side in (0, 1)]
        self._used = [{record.producer for record in own} for own in records]
        # calls of operators of which some output is used
        self._useful: list[set[CallKey]] = [
            {r.site.key for r in own if r.id in used and is_operator(r.site.path)}
            for own, used in zip(records, self._used, strict=True)
        ]

    def ignores(self, pair: Pair) -> bool:
        """Tell whether both programs use another output of a call, and not this one.

        So it is with the places of `max`, of which only the values count.
        """
        return all(self._leaves(pair.own(side), side) for side in (0, 1))

    def _leaves(self, record: Record | None, side: int) -> bool:
        return (
            record is not None
            and record.site.role == "output"
            and record.id not in self._used[side]
            and record.site.key in self._useful[side]
        )
