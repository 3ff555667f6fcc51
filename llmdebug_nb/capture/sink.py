"""The interfaces of a recorder: the sink of its rows, and how one that only checks is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from llmdebug_nb.capture.calls import Leaf
from llmdebug_nb.core.batches import Batch, Frames
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.records import Node

if TYPE_CHECKING:
    from llmdebug_nb.core.moments import Signal

Bytes: TypeAlias = np.ndarray | memoryview  # uint8[n]


class Sink(Protocol):
    """Receives rows and payloads. `store.writer.Writer` is one.

    ``waits``: rows wait in it until the recording ends, so they may come packed.
    ``frames``: those that wait, until the next payload or `write_frames`; None: a frame is made of
    each row. ``payload`` writes values; a
    ``header`` is that of their frame, made already.
    ``drop(calls, into)`` forgets the rows of root calls, but for what is recorded once, such as
    weights: that belongs to the root call ``into`` from then on. It returns the bytes set free.
    ``tell`` tells the other processes of the run of an alarm, and ``heard`` returns theirs.
    """

    @property
    def waits(self) -> bool: ...
    @property
    def frames(self) -> Frames | None: ...
    def shortage(self, nbytes: int) -> str | None: ...
    def payload(self, row: Row, data: Bytes, header: bytes | None = None) -> None: ...
    def write_frames(self) -> None: ...
    def duplicate(self, row: Row, offset: int, length: int) -> None: ...
    def commit(self, batch: Batch) -> None: ...
    def drop(self, calls: Collection[int], into: int) -> int: ...
    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def note(self, meta: dict[str, object]) -> None: ...
    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None: ...
    def tell(self, generation: int, step: int) -> None: ...
    def heard(self) -> list[Signal]: ...
    def close(self, meta: dict[str, object]) -> None: ...


class NoSink:
    """Receives nothing: a check keeps no records."""

    waits, frames = False, None

    def shortage(self, nbytes: int) -> str | None:
        return None

    def payload(self, row: Row, data: Bytes, header: bytes | None = None) -> None: ...
    def write_frames(self) -> None: ...
    def duplicate(self, row: Row, offset: int, length: int) -> None: ...
    def commit(self, batch: Batch) -> None: ...
    def drop(self, calls: Collection[int], into: int) -> int:
        return 0

    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def note(self, meta: dict[str, object]) -> None: ...
    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None: ...
    def tell(self, generation: int, step: int) -> None: ...
    def heard(self) -> list[Signal]:
        return []

    def close(self, meta: dict[str, object]) -> None: ...


@runtime_checkable
class CheckingRecorder(Protocol):
    """A recorder that only checks what it is shown, wherever it runs: also in optimizers.

    It computes operators again, so their arguments are kept. It needs no source lines and no views.
    """

    def may_wait(self, op: str) -> bool:
        """Return whether an operator need not be looked at before it has run."""

    def passes(self, result: object) -> bool:
        """Count a call that has ended, and return True, if its result is ordinary."""

    def record_result(self, outputs: Iterable[Leaf]) -> None:
        """The outermost call of a model has returned ``outputs``."""

    def record_read(self, value: object) -> None:
        """The program has read the number in a tensor."""
