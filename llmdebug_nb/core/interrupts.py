"""Interrupts never land in our own work: they wait until it is done, and lose nothing.

While our handler of SIGINT is installed, it looks at what it interrupts. Inside a function that is
`held`, the interrupt waits until `deliver` passes it on at the end of that function. Anywhere else
it goes to the program's own handler at once. Only the main thread can be interrupted.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 2.0  # seconds: an interrupt after that waits no longer, since the disk may hang
waiting: list[float] = []  # the time of an interrupt that waits; empty if none does
_held: set[CodeType] = set()
_open: set[CodeType] = set()
_owners: set[object] = set()  # those that keep our handler installed


def held(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function, with all that it calls, as one that no interrupt may cut short.

    It must itself call `deliver`, and works while somebody calls `watch`: this costs nothing.
    """
    _held.add(function.__code__)
    return function


def let_through(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs the program's code inside a function that is held."""
    _open.add(function.__code__)
    return function


def unbroken(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that no interrupt cuts it short; one that waited is raised at its end."""

    @functools.wraps(function)
    @held
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        owner = object()
        try:
            watch(owner)
            return function(*args, **kwargs)
        finally:
            unwatch(owner)

    return run


class Unbroken(ExitStack):
    """Several contexts as one: no interrupt cuts short how they are entered and left.

    One that comes while they are entered waits at most until they are left.
    """

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        super().__init__()
        self._contexts = contexts

    @held
    def __enter__(self) -> Unbroken:
        self.callback(unwatch, self)
        try:
            watch(self)
            for context in self._contexts:
                self.enter_context(context)
        except BaseException:
            self.close()
            raise
        return self

    @held
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:  # fmt: skip
        return super().__exit__(kind, error, trace)


def is_of_handler(error: BaseException) -> bool:
    """Tell whether a handler that the program has for a signal raised an exception."""
    codes = {
        _code_of(handler)
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
    }
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> object:
    """Return the code that runs for a function, method, partial, or object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def watch(owner: object) -> None:
    """Keep our handler installed until `unwatch` is called with that owner."""
    if not _owners:
        waiting.clear()
    _owners.add(owner)
    rewatch()


def rewatch() -> None:
    """Put our handler before the present one, unless it is there: notebooks reset it."""
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and not isinstance(before, _Handler):
            signal.signal(signal.SIGINT, _Handler(before))


def unwatch(owner: object) -> None:
    """End `watch`: the last owner puts the program's handler back. Then `deliver`."""
    _owners.discard(owner)
    if not _owners and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            signal.signal(signal.SIGINT, handler.before)
    deliver()


def deliver() -> None:
    """Pass on an interrupt that waits, as the innermost function that is held is about to end.

    If that is a part of other work that is held, the end of that work delivers it.
    """
    if not waiting or threading.current_thread() is not threading.main_thread():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _held:
        frame = frame.f_back
    while frame is not None and frame.f_code in _held:
        frame = frame.f_back
    if not _in_own_work(frame) and taken():
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            handler = handler.before
        if callable(handler):
            handler(signal.SIGINT, frame)


def taken() -> bool:
    """Return whether an interrupt waits, and forget it."""
    was_waiting = bool(waiting)
    waiting.clear()
    return was_waiting


class _Handler:
    """The handler of SIGINT. ``before``: that of the program, which it stands before."""

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _in_own_work(frame) and not (waiting and now - waiting[0] > PATIENCE):
            if not waiting:
                waiting.append(now)
            return
        waiting.clear()
        self.before(number, frame)


def _in_own_work(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _open:
        if frame.f_code in _held:
            return True
        frame = frame.f_back
    return False
