"""The sink of a recording in lockstep: rows are written, values are handed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from llmdebug_nb.app.lockstep.events import Event, Rows, Value
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.moments import Signal
from llmdebug_nb.core.records import Node

_ID, _OFFSET, _LENGTH = AT["id"], AT["offset"], AT["length"]


class Tap:
    """Numbers the bytes of all values as if they went into one file, and hands them over."""

    waits, frames = False, None

    def __init__(self, offer: Callable[[Event], None], rows: Rows | None, since: int) -> None:
        """``since``: values of records before this one are not handed over.

        ``rows``: None drops them.
        """
        self._offer, self._rows, self._since, self._end = offer, rows, since, 0

    def shortage(self, nbytes: int) -> None:
        """Values need no disk."""

    def payload(self, row: Row, data: np.ndarray | memoryview, header: bytes | None = None) -> None:
        row[_OFFSET], row[_LENGTH] = self._end, data.nbytes
        self._end += data.nbytes
        if row[_ID] >= self._since:
            # an empty tensor has the place of the next one, and nothing to hold
            self._offer(Value([*row], bytes(data) or None))

    def write_frames(self) -> None:
        """There are none."""

    def duplicate(self, row: Row, offset: int, length: int) -> None:
        row[_OFFSET], row[_LENGTH] = offset, length
        if row[_ID] >= self._since:
            self._offer(Value([*row], None))

    def drop(self, calls: Collection[int], into: int) -> int:
        """Forget no rows: a comparison in lockstep keeps those of all steps."""
        return 0

    def commit(self, batch: Batch) -> None:
        if self._rows is not None:
            self._rows.commit(batch)

    def tell(self, generation: int, step: int) -> None:
        """Tell nobody: no step is dropped that an alarm could keep."""

    def heard(self) -> list[Signal]:
        return []

    def nodes(self, nodes: Iterable[Node], start: int) -> None:
        if self._rows is not None:
            self._rows.nodes(nodes, start)

    def note(self, meta: dict[str, object]) -> None:
        if self._rows is not None:
            self._rows.note(meta)

    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None:
        if self._rows is not None:
            self._rows.table(name, rows)

    def close(self, meta: dict[str, object]) -> None:
        if self._rows is not None:
            self._rows.close(meta)
