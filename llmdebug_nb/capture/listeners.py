"""Wrappers that serve all recordings of a process and exist only while one of them is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Listeners(Generic[T]):
    """The listeners of one wrapper: the first one puts it on, the last one takes it off."""

    def __init__(self, wrap: Callable[[], Callable[[], None]]) -> None:
        """``wrap()`` puts the wrapper on and returns how to undo it."""
        self._wrap = wrap
        self._listeners: list[T] = []
        self._undo: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._listeners))

    def add(self, listener: T) -> None:
        with self._lock:
            self._listeners.append(listener)
            if self._undo is None:
                self._undo = self._wrap()

    def remove(self, listener: T) -> None:
        """Remove a listener; do nothing if it was not added."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners and self._undo is not None:
                self._undo()
                self._undo = None
