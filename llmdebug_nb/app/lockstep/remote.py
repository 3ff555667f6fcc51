"""A program of another process, which runs there and is told of here."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import torch

from llmdebug_nb.app.lockstep import frames
from llmdebug_nb.app.lockstep.events import End, Event, Play, Puts, Rows, Value, values_in
from llmdebug_nb.app.lockstep.frames import Link
from llmdebug_nb.core.batches import Batch
from llmdebug_nb.core.columns import AT, RECORDS, TABLES
from llmdebug_nb.core.errors import CaptureError, PeerError
from llmdebug_nb.core.kernels.raw import dtype_name, from_bytes, plain, to_bytes
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node
from llmdebug_nb.store.checked import DAMAGE, rows_of

_TABLES = {table.name for table in TABLES}


class RemoteProgram:
    """The program that `lockstep_peer` offers at an address."""

    def __init__(self, address: str, secret: bytes, options: DumpOptions, timeout: float) -> None:
        """Raises OptionError: no address. PeerError: nobody there, or with another secret."""
        host, port = frames.checked_address(address)
        try:
            connection = socket.create_connection((host, port), frames.HANDSHAKE)
        except OSError as error:
            raise PeerError(
                f"{address}: nobody answers ({error.strerror or error}); start"
                " ld.lockstep_peer(model, address, inputs, secret=…) there first"
            ) from None
        self.link, self.why_once = Link(connection, address, timeout), ""
        try:
            self.link.prove(secret, listens=False)
            self.link.send(frames.Begin(options.as_json()))
            self.told(self.link.receive()[0])
        except BaseException:
            self.close()
            raise

    def play(self, how: Play, rows: Rows | None) -> RemotePlaying:
        return RemotePlaying(self, how, rows)

    def close(self) -> None:
        self.link.close()

    def told(self, message: frames.Message) -> bool:
        """Take what the program says when it waits; tell whether it has ended. Raises PeerError."""
        if not isinstance(message, (frames.Paused, frames.Over)):
            raise PeerError(f"{self.link.who} sent {type(message).__name__}, which fits nothing")
        self.why_once = message.once
        if isinstance(message, frames.Over) and message.error:
            raise CaptureError(f"{self.link.who}: {message.error}")
        return isinstance(message, frames.Over)


class RemotePlaying:
    """See `events.Playing`."""

    def __init__(self, program: RemoteProgram, how: Play, rows: Rows | None) -> None:
        self._program, self._link, self._rows = program, program.link, rows
        self._events: deque[Event] = deque()
        self._over, self._values = False, 0
        self._link.send(frames.Run(how.ahead, how.since, how.waits, rows is not None))

    @property
    def ahead(self) -> int:
        return self._values

    def next(self) -> Event | None:
        while not self._events and not self._over:
            try:
                self._link.send(frames.More())
                self._take()
            except PeerError:
                self._over = True  # nothing that it says counts any more
                raise
        if not self._events:
            return None
        event = self._events.popleft()
        self._values -= values_in(event)
        return event

    def reply(self, puts: Puts) -> None:
        tensors = {slot: plain(tensor) for slot, tensor in puts.items()}
        body = [to_bytes(tensor).tobytes() for tensor in tensors.values()]
        told = [
            frames.Put(slot, dtype_name(tensor), tuple(tensor.shape), len(data))
            for (slot, tensor), data in zip(tensors.items(), body, strict=True)
        ]
        self._link.send(frames.Reply(told), body)

    def stop(self) -> None:
        self._events.clear()
        if self._over:
            return
        self._over = True
        with contextlib.suppress(CaptureError):  # a peer that is gone has stopped
            self._link.send(frames.Halt())
            while not isinstance((message := self._link.receive())[0], frames.Over):
                self._handle(*message)
        self._events.clear()

    def _take(self) -> None:
        """Take events until the program waits or has ended. Raises CaptureError."""
        while True:
            message, body = self._link.receive()
            if isinstance(message, (frames.Paused, frames.Over)):
                self._over = isinstance(message, frames.Over)
                self._program.told(message)
                return
            self._handle(message, body)

    def _handle(self, message: frames.Message, body: bytes) -> None:
        if isinstance(message, frames.Told):
            self._events.append(_value(self._link.who, message, body))
            self._values += len(body)
        elif isinstance(message, frames.CallEnd):
            self._events.append(End(*msgspec.structs.astuple(message)))
        elif self._rows is not None:
            _write(self._rows, self._link.who, message)


def _value(who: str, message: frames.Told, body: bytes) -> Value:
    """Raises PeerError: the row is none of a record, or of other values."""
    try:
        (row,) = rows_of(RECORDS.row, [message.row])
    except (*DAMAGE, TypeError, IndexError) as error:
        raise PeerError(f"{who} sent no row of a record ({error})") from None
    value = Value([*row], body or None)
    offset, length = row[AT["offset"]], row[AT["length"]]
    if offset is None or length is None or offset < 0 or (body and len(body) != length):
        raise PeerError(f"{who} sent {len(body):,} bytes of values, and said {length}")
    return value


def _write(rows: Rows, who: str, message: frames.Message) -> None:
    try:
        if isinstance(message, frames.Committed):
            rows.commit(Batch(**msgspec.structs.asdict(message)))
        elif isinstance(message, frames.Nodes):
            rows.nodes(message.nodes, message.start)
        elif isinstance(message, frames.Noted):
            (rows.close if message.last else rows.note)(message.meta)
        elif isinstance(message, frames.Table) and message.name in _TABLES:
            rows.table(message.name, message.rows)
        else:
            raise PeerError(f"{who} sent {type(message).__name__}, which fits nothing")
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise PeerError(f"{who} sent rows that can't be written ({error})") from None


def tensors_of(who: str, message: frames.Reply, body: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a reply. Raises PeerError."""
    found, at = {}, 0
    try:
        for put in message.puts:
            found[put.slot] = from_bytes(body[at : at + put.nbytes], put.dtype, put.shape)
            at += put.nbytes
    except (ValueError, OverflowError) as error:
        raise PeerError(f"{who} sent no tensor ({error})") from None
    return found


class Forwarding:
    """Sends all that a recording writes to the other process. It is a `Rows`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def commit(self, batch: Batch) -> None:
        parts: tuple[Iterable[Sequence[object]], ...] = (
            batch.scalars, batch.operators, batch.sources, batch.chains, batch.called,
            batch.functions,
        )  # fmt: skip
        cells = [[[*row] for row in part] for part in parts]
        records = [[*row] for row in batch.records]
        self._link.send(frames.Committed(records, [*batch.calls], *cells))

    def nodes(self, nodes: Iterable[Node], start: int) -> None:
        self._link.send(frames.Nodes([*nodes], start))

    def note(self, meta: dict[str, object]) -> None:
        self._link.send(frames.Noted(meta, last=False))

    def table(self, name: str, rows: Iterable[Sequence[object]]) -> None:
        self._link.send(frames.Table(name, [[*row] for row in rows]))

    def close(self, meta: dict[str, object]) -> None:
        self._link.send(frames.Noted(meta, last=True))
