"""The sink of a recording in lockstep: rows are written, values are handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from llmdebug_nb.app.lockstep.events import Event, Rows, Value
from llmdebug_nb.capture.sink import Bytes, NoSink
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.records import Node

_ID, _OFFSET, _LENGTH = AT["id"], AT["offset"], AT["length"]


class Tap(NoSink):
    """Numbers the bytes of all values as if they went into one file, and hands them over.

    Values need no disk. The rows of all steps are kept, so no other process is told of an alarm.
    """

    def __init__(self, offer: Callable[[Event], None], rows: Rows | None, since: int) -> None:
        """``since``: values of records before this one are not handed over.

        ``rows``: None drops them.
        """
        self._offer, self._rows, self._since, self._end = offer, rows, since, 0

    def payload(self, row: Row, data: Bytes, header: bytes | None = None) -> None:
        row[_OFFSET], row[_LENGTH] = self._end, data.nbytes
        self._end += data.nbytes
        if row[_ID] >= self._since:
            # an empty tensor has the place of the next one, and nothing to hold
            self._offer(Value([*row], bytes(data) or None))

    def duplicate(self, row: Row, offset: int, length: int) -> None:
        row[_OFFSET], row[_LENGTH] = offset, length
        if row[_ID] >= self._since:
            self._offer(Value([*row], None))

    def commit(self, batch: Batch) -> None:
        if self._rows is not None:
            self._rows.commit(batch)

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
