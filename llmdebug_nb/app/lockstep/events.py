"""What two programs that run side by side tell, and how they are told to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.records import Node, Record, Site, Summary
from llmdebug_nb.store.checked import shape_of

if TYPE_CHECKING:
    import torch

_EVENT = 512  # bytes that an event takes besides its values, at least
_SUMMARY = ("min", "max", "mean", "l2norm", "nan", "inf", "zero", "fingerprint")
Puts: TypeAlias = "Mapping[str, torch.Tensor]"  # by slot of an output


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor was recorded. ``row``: of `columns.RECORDS`.

    ``data``: its values; None if they were handed over before, or are not asked for.
    """

    row: Row
    data: bytes | None

    @property
    def nbytes(self) -> int:
        return _EVENT + len(self.data or b"")

    @property
    def id(self) -> int:
        """The number of the record."""
        return int(self.row[AT["id"]])

    @property
    def offset(self) -> int:
        """The place of its values, as if all were written to one file."""
        return int(self.row[AT["offset"]])

    @property
    def end(self) -> int:
        return self.offset + int(self.row[AT["length"]])


@dataclass(frozen=True, slots=True)
class End:
    """A recorded call has ended. ``waits``: it is asked which outputs the program goes on with."""

    root_call: int
    generation: int
    step: int
    path: str
    number: int
    waits: bool = False

    @property
    def nbytes(self) -> int:
        return _EVENT


Event: TypeAlias = Value | End


def values_in(event: Event) -> int:
    """Return the bytes of values that an event holds."""
    return len(event.data or b"") if isinstance(event, Value) else 0


class Play(NamedTuple):
    """How a program runs. ``ahead``: bytes of events before it waits for them to be taken.

    ``since``: values of records before this one are not handed over. ``waits``: it waits at the
    end of each call of a module, to be told what it goes on with.
    """

    ahead: int
    since: int = 0
    waits: bool = False


class Rows(Protocol):
    """Takes all that a recording writes but values. `store.writer.Writer` does."""

    def commit(self, batch: Batch) -> None: ...
    def nodes(self, nodes: Iterable[Node], start: int) -> None: ...
    def note(self, meta: dict[str, object]) -> None: ...
    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None: ...
    def close(self, meta: dict[str, object]) -> None: ...


class Playing(Protocol):
    """A program that runs. It runs only while `next` waits for it."""

    @property
    def ahead(self) -> int:
        """Bytes of values that it made and nobody has taken yet."""

    def next(self) -> Event | None:
        """Return what happened next; None after the end.

        Raises:
            CaptureError: the program failed, or is gone.
        """

    def reply(self, puts: Puts) -> None:
        """Let the program go on after an `End` that waits, with other outputs of that call."""

    def stop(self) -> None:
        """End the program at its next event, and take all hooks off."""


class Program(Protocol):
    """A program that runs again and again, from the same state."""

    def play(self, how: Play, rows: Rows | None) -> Playing:
        """Begin to run it. ``rows``: gets its rows; None: they are known."""

    def close(self) -> None:
        """Let go of it: one of another process can't be run any more."""

    @property
    def why_once(self) -> str:
        """Why it can't be run again with the same values; "" if it can."""


def record_of(row: Row, generation: int, step: int) -> Record:
    """Return the record of a row, as the index of the run will hold it."""
    at = AT
    shape = shape_of(row[at["shape"]])
    figures = (row[at[name]] for name in _SUMMARY)
    site = Site(
        row[at["path"]], step, row[at["call"]], row[at["phase"]], row[at["role"]],
        row[at["slot"]], generation=generation,
    )  # fmt: skip
    number = row[at["id"]]
    kept_shape = row[at["kept_shape"]]
    return Record(
        number, site, number, row[at["op"]], Summary(row[at["dtype"]], shape, *figures),
        row[at["device"]], row[at["producer"]],
        f"0,{row[at['offset']]},{row[at['length']]}", None, row[at["kept"]],
        None if kept_shape is None else shape_of(kept_shape),
    )  # fmt: skip
