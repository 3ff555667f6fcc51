"""The values of tensors that a recorder keeps: equal ones are written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from llmdebug_nb.capture import geometry, rows
from llmdebug_nb.capture.payload import NotKept, Policy
from llmdebug_nb.capture.sink import Bytes, Sink
from llmdebug_nb.capture.tape.native import Contents, Seen
from llmdebug_nb.core.columns import COLUMNS, Row
from llmdebug_nb.core.errors import StoreError, first_line
from llmdebug_nb.core.kernels.raw import to_bytes
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.options import DumpOptions

T = TypeVar("T")


class KeptValues:
    """Writes payloads to a sink, and remembers where they are.

    ``policy``: which payloads are kept, and their bytes. ``contents``: of XXH3, dtype and shape,
    the row that describes them. ``kept``: count of rows with a payload. ``distinct``: of payloads.
    ``lost``: by reason, the count of wanted payloads that are missing. ``failure``: the error of a
    sink that can't go on (disk full).
    """

    def __init__(self, sink: Sink, options: DumpOptions) -> None:
        self._sink = sink
        self.policy = Policy(options, sink.shortage)
        self.contents: Contents = {}
        self.kept = self.distinct = 0
        self.lost: Counter[str] = Counter()
        self.failure: StoreError | None = None

    @property
    def may_be_packed(self) -> bool:
        """Whether values are kept whole, and their frames may be made by others."""
        return self.policy.wanted and self.policy.part_name is None and bool(self._sink.frames)

    def in_c(self) -> Contents | None:
        """Return what is kept, if what C saw is; see playing.h."""
        return self.contents if self.may_be_packed else None

    def attempt(self, row: Row, work: Callable[[Row, T], None], argument: T) -> None:
        """Do ``work(row, argument)``; an error is noted in the row."""
        try:
            work(row, argument)
        except StoreError as error:
            self.failure = error
            if row[rows.OFFSET] is None:  # else it is a duplicate, whose payload is there
                self.lose(row, str(error).partition(";")[0])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            self.lose(row, f"{type(error).__name__}: {first_line(error)}")

    def first(self, row: Row) -> Row:
        """Return the row that describes the same content: ``row`` itself if there was none.

        One that says neither where its values are nor why they are lost is being written within
        our own work, or was given up.
        """
        key = row[rows.FINGERPRINT], row[rows.DTYPE], row[rows.SHAPE]
        known = self.contents.setdefault(key, row)
        if self.policy.wanted and known[rows.OFFSET] is None and known[rows.LOST] is None:
            self.contents[key] = known = row
        return known

    def repeat(self, row: Row, known: Row) -> None:
        """Let a row have the values of an equal tensor."""
        if known[rows.OFFSET] is not None:
            row[rows.KEPT], row[rows.KEPT_SHAPE] = known[rows.KEPT], known[rows.KEPT_SHAPE]
            self.kept += 1
            self._sink.duplicate(row, known[rows.OFFSET], known[rows.LENGTH])
        elif known[rows.LOST] is not None:
            self.lose(row, known[rows.LOST])

    def keep_part(self, row: Row, tensor: torch.Tensor, read: Callable[[], Bytes]) -> None:
        """Write the wanted part of a tensor. ``read()``: the bytes of all of it."""

        def read_part() -> Bytes:
            whole = read()
            if self.policy.part_name is None:
                return whole
            row[rows.KEPT], row[rows.KEPT_SHAPE] = self.policy.part_name, geometry.shape_text(part)
            return to_bytes(part)

        try:
            part = self.policy.part(tensor)
        except NotKept as why:
            self.lose(row, str(why))
        else:
            self._keep(row, part.nbytes, read_part)

    def _keep(
        self, row: Row, nbytes: int, read: Callable[[], Bytes], header: bytes | None = None
    ) -> None:
        """Write a payload, if there is room for it. ``header``: see `Sink.payload`."""
        if self.failure is not None:
            raise self.failure
        try:
            self.policy.admit(nbytes)
        except NotKept as why:
            self.lose(row, str(why))
            return
        self._sink.payload(row, read(), header)
        self.distinct += 1
        self.kept += 1

    # -- what the tape has seen -------------------------------------------------------------------

    def describe_seen(self, row: Row, seen: Seen) -> None:
        """Keep the values that the tape has seen, for a row that has all else."""
        known = seen.known()
        if known is None or (known[rows.OFFSET] is None and known[rows.LOST] is None):
            known = self.first(row)
        if known is not row:
            self.repeat(row, known)
        else:
            self._keep_seen(row, seen)

    def keep_seen(self, seen: Seen, header: bytes) -> Row:
        """Write values that the tape has seen; return the row that describes them from now on."""
        row: Row = [None] * len(COLUMNS)
        row[rows.SEEN] = seen.content()
        self.attempt(row, partial(self._keep_seen, header=header), seen)
        return self.first(row)

    def _keep_seen(self, row: Row, seen: Seen, header: bytes | None = None) -> None:
        values = seen.values()
        if values is None:
            self.lose(row, rows.CUT_SHORT)
        else:
            data = memoryview(values)
            self._keep(row, data.nbytes, lambda: data, header)

    def write_frames(self) -> None:
        """Write frames that have waited for values; without them the index says the same."""
        try:
            self._sink.write_frames()
        except StoreError as error:
            self.failure = error

    def count_lost(self, why: str | None) -> None:
        """Count a record whose values are missing, as those of an equal tensor are."""
        if why is not None:
            self.lost[why] += 1

    def count_cut_short(self) -> None:
        """Count a record that was begun, and is missing."""
        self.lost[rows.CUT_SHORT] += 1

    # -- what is missing --------------------------------------------------------------------------

    def lose(self, row: Row, why: str) -> None:
        """Note why the values of a row are missing."""
        row[rows.LOST], row[rows.KEPT], row[rows.KEPT_SHAPE] = masked(why), None, None
        self.lost[row[rows.LOST]] += 1

    def lose_rows(self, count: int, error: StoreError) -> None:
        """Note that rows could not be committed."""
        self.failure = error
        self.lost[f"not in the index: {str(error).partition(';')[0]}"] += count
