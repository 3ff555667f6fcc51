"""Running a command to its end: output, signals, and regular checks of its processes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from llmdebug_nb.app.launching.children import below

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit statuses, as in a shell
_LOOK = 0.25  # seconds between two checks of the program's processes


class NotStarted(Exception):
    """The command could not be started. ``status``: the exit status of a shell in that case."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def start(words: Sequence[str], variables: Mapping[str, str], piped: bool) -> subprocess.Popen[Any]:
    """Start a command. ``piped``: its output can be read, and it has no input.

    Raises:
        NotStarted: there is no such command, or it can't be executed.
    """
    streams: dict[str, Any] = {}
    if piped:
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        streams = {**pipes, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    try:
        return subprocess.Popen(words, env=variables, **streams)
    except FileNotFoundError:
        assigns = "=" in words[0].split("/")[0]
        hint = "; set variables before llmdebug itself: A=1 llmdebug dump …" if assigns else ""
        raise NotStarted(NOT_FOUND, f"{words[0]}: command not found{hint}") from None
    except OSError as error:
        raise NotStarted(NOT_EXECUTABLE, f"{words[0]}: {error.strerror or error}") from None


def wait(
    program: subprocess.Popen[Any],
    output: Callable[[str, str], object] | None,
    look: Callable[[int], None],
) -> int:
    """Wait for a program and return its exit status; 128 + n if signal n ended it.

    ``output(stream, text)`` gets its output, if given. ``look(pid)`` is called now and then.
    """
    reader = _OutputReader(program, output) if output is not None else None
    with _forwarded_signals(program), _looking(program, look):
        _wait(program, reader)
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


class _OutputReader:
    """Passes on the lines that a program writes, in the thread that waits for it."""

    def __init__(
        self, program: subprocess.Popen[Any], output: Callable[[str, str], object]
    ) -> None:
        self._output = output
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, args=(name, getattr(program, name)), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put((name, line))

    def pass_on(self, seconds: float) -> None:
        """Wait up to ``seconds`` for a line, then pass on all lines that have arrived."""
        with contextlib.suppress(queue.Empty):
            self._output(*self._lines.get(timeout=seconds))
            while True:
                self._output(*self._lines.get_nowait())

    def finish(self) -> None:
        """Pass on the rest, without waiting for background processes that hold the streams."""
        for thread in self._threads:
            thread.join(timeout=1)
        self.pass_on(0.01)


def _wait(program: subprocess.Popen[Any], reader: _OutputReader | None) -> None:
    while program.returncode is None:
        try:
            if reader is None:
                program.wait()
            elif program.poll() is None:
                reader.pass_on(0.05)
        except KeyboardInterrupt:  # the program decides what an interrupt means
            continue
    if reader is not None:
        reader.finish()


@contextlib.contextmanager
def _looking(program: subprocess.Popen[Any], look: Callable[[int], None]) -> Iterator[None]:
    """Look at the program's processes now and then, in a thread that delays nothing."""
    over = threading.Event()

    def look_repeatedly() -> None:
        while not over.wait(_LOOK):
            look(program.pid)

    thread = threading.Thread(target=look_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _forwarded_signals(program: subprocess.Popen[Any]) -> Iterator[None]:
    """Forward signals to the program, except interrupts that it receives anyway."""

    def forward(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and _reaches_all():
            return
        for pid in (program.pid, *(below(program.pid) if number != signal.SIGINT else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reaches_all() -> bool:
    """True if an interrupt goes to all processes: from Jupyter, or from our terminal."""
    if "ipykernel" in sys.modules:
        return True
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
