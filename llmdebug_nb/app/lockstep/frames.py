"""Frames between two processes: a header in msgpack and raw bytes, after both proved the secret.

Nothing that arrives is executed, and lengths are checked before memory is taken. The frames are
authenticated at the start alone and not encrypted: between machines they belong in a tunnel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from llmdebug_nb.core.errors import OptionError, PeerError
from llmdebug_nb.core.records import Node, RootCall

VERSION = 2
_MAGIC = b"llmdebug lockstep"
_NONCE = 32
_HELLO = struct.Struct(f">{len(_MAGIC)}sI{_NONCE}s")
_SIZES = struct.Struct(">IQ")  # of the header and of the bytes after it
LONGEST_HEADER = 1 << 26  # 4,096 rows, which are committed together, have some 2 MB
LONGEST_BODY = 1 << 36  # the largest tensors have some 10 GB
_CHUNK = 1 << 20  # memory is taken as bytes arrive
SHORTEST_SECRET = 8
_SOON = 1e-3  # seconds: a socket that must not wait waits so long
HANDSHAKE = 10.0  # seconds in which the other side must prove the secret
_ROLES = b"listens", b"connects"
Cells: TypeAlias = list[Any]  # of a row; checked by its table where it is used


class Begin(msgspec.Struct, tag=True):
    """Asks for the program. ``options``: of the recording, as a dump's JSON has them."""

    options: dict[str, Any]


class Run(msgspec.Struct, tag=True):
    """Asks to run the program; see `events.Play`. ``rows``: its rows are asked for, too."""

    ahead: int
    since: int
    waits: bool
    rows: bool


class More(msgspec.Struct, tag=True):
    """Asks for the next events."""


class Put(msgspec.Struct, tag=True):
    """A tensor among the bytes of `Puts`."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Reply(msgspec.Struct, tag=True):
    """Tells which outputs the program goes on with; their bytes follow."""

    puts: list[Put]


class Halt(msgspec.Struct, tag=True):
    """Asks to stop the program."""


class Told(msgspec.Struct, tag=True):
    """A tensor was recorded; its bytes follow if they are handed over."""

    row: Cells


class CallEnd(msgspec.Struct, tag=True):
    """A call has ended; see `events.End`."""

    root_call: int
    generation: int
    step: int
    path: str
    number: int
    waits: bool


class Committed(msgspec.Struct, tag=True):
    """Rows of the run; see `core.batches.Batch`."""

    records: list[Cells]
    calls: list[RootCall]
    scalars: list[Cells]
    operators: list[Cells]
    sources: list[Cells]
    chains: list[Cells]
    called: list[Cells]
    functions: list[Cells]


class Nodes(msgspec.Struct, tag=True):
    """Modules of the run."""

    nodes: list[Node]
    start: int


class Noted(msgspec.Struct, tag=True):
    """What the run says of itself. ``last``: its rows are complete."""

    meta: dict[str, Any]
    last: bool


class Table(msgspec.Struct, tag=True):
    """Rows of another table."""

    name: str
    rows: list[Cells]


class Paused(msgspec.Struct, tag=True):
    """The program waits. ``once``: see `events.Program.why_once`."""

    once: str = ""


class Over(msgspec.Struct, tag=True):
    """The program has ended. ``error``: it failed."""

    error: str = ""
    once: str = ""


Message: TypeAlias = (
    Begin | Run | More | Reply | Halt | Told | CallEnd | Committed | Nodes | Noted | Table
    | Paused | Over
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Link:
    """A connection to the other process. ``who``: for messages."""

    def __init__(self, connection: socket.socket, who: str, timeout: float) -> None:
        """``timeout``: seconds without a byte after which the other process counts as gone."""
        self._socket, self.who, self._timeout = connection, who, timeout
        self._until: float | None = None  # when the handshake must be over
        # each side waits for the other's answer: small frames must not wait for more
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prove(self, secret: bytes, listens: bool) -> None:
        """Prove that both know the secret. Raises PeerError.

        Who listens checks the other's proof before it gives its own: a stranger gets nothing of it
        to try guesses with. All of it takes `HANDSHAKE` seconds at most.
        """
        self._until = time.monotonic() + HANDSHAKE
        own = secrets.token_bytes(_NONCE)
        self._send(_HELLO.pack(_MAGIC, VERSION, own))
        magic, version, other = _HELLO.unpack(self._receive(_HELLO.size))
        if magic != _MAGIC:
            raise PeerError(f"{self.who} is no llmdebug process that waits for a lockstep")
        if version != VERSION:
            raise PeerError(
                f"{self.who} speaks version {version} of the lockstep protocol, this process"
                f" {VERSION}: use the same llmdebug_nb on both sides"
            )
        mine, theirs = _ROLES if listens else _ROLES[::-1]
        wrong = PeerError(f"{self.who} has another secret: give both sides the same one")
        if not listens:
            self._send(_proof(secret, mine, own, other))
        try:
            given = self._receive(hashlib.sha256().digest_size)
        except PeerError as error:
            raise error if listens else wrong from None
        if not hmac.compare_digest(given, _proof(secret, theirs, other, own)):
            raise wrong
        if listens:
            self._send(_proof(secret, mine, own, other))
        self._until = None
        self._socket.settimeout(self._timeout)

    def send(self, message: Message, body: Sequence[bytes] = ()) -> None:
        """Raises PeerError: the other process is gone."""
        header = _encoder.encode(message)
        self._send(_SIZES.pack(len(header), sum(map(len, body))) + header)
        for part in body:
            self._send(part)

    def receive(self) -> tuple[Message, bytes]:
        """Raises PeerError: the other process is gone, or talks nonsense."""
        size, more = _SIZES.unpack(self._receive(_SIZES.size))
        if size > LONGEST_HEADER or more > LONGEST_BODY:
            raise PeerError(f"{self.who} sent a frame of {size + more:,} bytes: too long for any")
        try:
            message = _decoder.decode(self._receive(size))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise PeerError(f"{self.who} sent no valid message ({error})") from None
        return message, self._receive(more)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error) from None

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                if self._until is not None:
                    self._socket.settimeout(max(self._until - time.monotonic(), _SOON))
                part = self._socket.recv(min(size - len(data), _CHUNK))
            except OSError as error:
                raise self._gone(error) from None
            if not part:
                raise self._gone("it closed the connection")
            data += part
        return bytes(data)

    def _gone(self, why: object) -> PeerError:
        if isinstance(why, TimeoutError):
            limit = HANDSHAKE if self._until is not None else self._timeout
            why = f"it said nothing for {limit:.0f} s"
        return PeerError(f"{self.who} is gone: {why or 'the connection broke'}")


def _proof(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(secret, role + own + other, hashlib.sha256).digest()


def checked_secret(secret: str | bytes) -> bytes:
    """Return a secret as bytes. Raises OptionError."""
    given = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(given, bytes) or len(given) < SHORTEST_SECRET:
        raise OptionError(
            f"secret: expected a text of at least {SHORTEST_SECRET} characters, the same on both"
            " sides"
        )
    return given


def checked_address(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``. Raises OptionError."""
    parts = None
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        port = parts.port
    if parts is None or parts.scheme != "tcp" or not parts.hostname or port is None:
        raise OptionError(f"address {address[:80]!r}: expected tcp://host:port")
    return parts.hostname, port
