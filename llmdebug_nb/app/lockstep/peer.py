"""`lockstep_peer`: offers a model to a comparison in lockstep that runs in another process."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmdebug_nb.app.lockstep import frames
from llmdebug_nb.app.lockstep.events import End, Event, Play
from llmdebug_nb.app.lockstep.frames import Link
from llmdebug_nb.app.lockstep.program import Inputs, LocalProgram, Running
from llmdebug_nb.app.lockstep.remote import Forwarding, tensors_of
from llmdebug_nb.app.lockstep_outcome import TIMEOUT
from llmdebug_nb.core.errors import LLMDebugError, OptionError, PeerError
from llmdebug_nb.core.options import DumpOptions

if TYPE_CHECKING:
    import torch

_NOT_TAKEN = ("path", "graph", "control", "profile")  # they concern files here


def lockstep_peer(
    model: torch.nn.Module,
    address: str,
    inputs: Inputs,
    *,
    secret: str | bytes | None = None,
    timeout: float = TIMEOUT,
    ready: Callable[[str], object] = print,
) -> None:
    """Offer a model to `lockstep` in another process or on another machine, and serve it once.

    There, ``ld.lockstep(golden, "tcp://host:port", inputs, secret=…)`` compares with it. The call
    returns when that comparison is over. Values are sent unencrypted: between machines, use a
    tunnel, such as ``ssh -L``.

    Args:
        model: the model, which stays in this process.
        address: where to listen: ``tcp://127.0.0.1:0`` takes any free port.
        inputs: as in `lockstep`; the same as there.
        secret: which both sides must know; at least 8 characters. None makes one and tells it.
        timeout: seconds of silence after which the other process counts as gone.
        ready: is told the address, and the secret if it was made here, as a line of text.

    Raises:
        OptionError: an invalid argument.
        PeerError: the address can't be used, or the other process is gone.
    """
    host, port = frames.checked_address(address)
    made = secrets.token_hex(16) if secret is None else None
    known = frames.checked_secret(made if secret is None and made else secret or "")
    LocalProgram("this process", model, inputs, DumpOptions())  # refuses what can't run at once
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise PeerError(f"can't listen at {address}: {error.strerror or error}") from None
    with listening:
        place = f"tcp://{host}:{listening.getsockname()[1]}"
        ready(f"{place}{f' secret {made}' if made else ''}")
        link = _met(listening, known, timeout, ready)
    with contextlib.closing(link):
        _Serving(link, model, inputs).run()


def _met(
    listening: socket.socket, secret: bytes, timeout: float, ready: Callable[[str], object]
) -> Link:
    """Return the connection of who knows the secret; others are told of and end no offer."""
    while True:
        connection, (other, *_) = listening.accept()
        link = Link(connection, f"the comparison at {other}", timeout)
        try:
            link.prove(secret, listens=True)
        except PeerError as error:
            link.close()
            ready(f"{error}; still waiting")
        else:
            return link


class _Serving:
    """Answers what another process asks, until that closes the connection."""

    def __init__(self, link: Link, model: torch.nn.Module, inputs: Inputs) -> None:
        self._link, self._model, self._inputs = link, model, inputs
        self._program: LocalProgram | None = None
        self._running: Running | None = None

    def run(self) -> None:
        message, _ = self._link.receive()
        if not isinstance(message, frames.Begin):
            raise PeerError(f"{self._link.who} began with {type(message).__name__}")
        try:
            options = {k: v for k, v in message.options.items() if k not in _NOT_TAKEN}
            given = {k: v for k, v in options.items() if v is not None}
            chosen = DumpOptions.of(**given)
            self._program = LocalProgram("this process", self._model, self._inputs, chosen)
        except OptionError as error:
            self._link.send(frames.Over(str(error)))
            raise
        self._link.send(frames.Paused())
        try:
            while True:
                try:
                    message, body = self._link.receive()
                except PeerError:  # the comparison is over
                    return
                self._answer(self._program, message, body)
        finally:
            self._halt()

    def _answer(self, program: LocalProgram, message: frames.Message, body: bytes) -> None:
        if isinstance(message, frames.Run):
            self._halt()
            rows = Forwarding(self._link) if message.rows else None
            how = Play(message.ahead, message.since, message.waits)
            self._running = program.play(how, rows)
        elif isinstance(message, frames.Reply) and self._running is not None:
            self._running.reply(tensors_of(self._link.who, message, body))
        elif isinstance(message, frames.More) and self._running is not None:
            self._go_on(program, self._running)
        elif isinstance(message, frames.Halt):
            self._halt()
            self._link.send(frames.Over(once=program.why_once))
        else:
            raise PeerError(f"{self._link.who} sent {type(message).__name__}, which fits nothing")

    def _go_on(self, program: LocalProgram, running: Running) -> None:
        """Run the program until it waits, and tell what happened."""
        try:
            event = running.next()
            while event is not None:
                self._tell(event)
                if not running.waiting:
                    self._link.send(frames.Paused(program.why_once))
                    return
                event = running.next()
        except LLMDebugError as error:
            if isinstance(error, PeerError):
                raise
            self._link.send(frames.Over(str(error), program.why_once))
            return
        self._link.send(frames.Over(once=program.why_once))

    def _tell(self, event: Event) -> None:
        if isinstance(event, End):
            self._link.send(frames.CallEnd(
                event.root_call, event.generation, event.step, event.path, event.number,
                event.waits,
            ))  # fmt: skip
        else:
            self._link.send(frames.Told(event.row), [event.data] if event.data else [])

    def _halt(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()
