"""Wrappers that serve all recordings of a process and exist only while one of them is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


def with_methods(methods: Iterable[tuple[object, str, object]]) -> Callable[[], None]:
    """Set attributes of objects; return how to undo it, so that inherited ones are so again."""
    undo = ExitStack()
    for owner, name, method in methods:
        before = vars(owner).get(name)
        if before is None:
            undo.callback(delattr, owner, name)
        else:
            undo.callback(setattr, owner, name, before)
        setattr(owner, name, method)
    return undo.close


class Listeners(Generic[T]):
    """The listeners of one wrapper: the first one puts it on, the last one takes it off.

    It is true while there are any, or while one waits for a run.
    """

    def __init__(self, wrap: Callable[[], Callable[[], None]]) -> None:
        """``wrap()`` puts the wrapper on and returns how to undo it."""
        self._wrap = wrap
        self._listeners: list[T] = []
        self._waiting: list[Callable[[Any], None]] = []
        self._undo: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._listeners))

    def __bool__(self) -> bool:
        return bool(self._listeners or self._waiting)

    def at_run(self, model: object) -> Iterator[T]:
        """Return the listeners to a run of a model that is about to begin.

        Those that wait for one are told of it first, and may add a listener.
        """
        for begins in tuple(self._waiting):
            begins(model)
        return iter(self)

    def wait(self, begins: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``begins(model)`` before each run of a model; return how to end that."""
        self._enter(self._waiting, begins)
        return partial(self._leave, self._waiting, begins)

    def add(self, listener: T) -> None:
        self._enter(self._listeners, listener)

    def remove(self, listener: T) -> None:
        """Remove a listener; do nothing if it was not added."""
        self._leave(self._listeners, listener)

    def _enter(self, among: list[S], one: S) -> None:
        with self._lock:
            among.append(one)
            if self._undo is None:
                self._undo = self._wrap()

    def _leave(self, among: list[S], one: S) -> None:
        with self._lock:
            if one in among:
                among.remove(one)
            if not self and self._undo is not None:
                self._undo()
                self._undo = None
