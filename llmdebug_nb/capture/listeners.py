"""Wrappers that serve all recordings of the process, and are there only while one is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Listeners(Generic[T]):
    """Who is told of something; the first one puts the wrapper on, the last one takes it off."""

    def __init__(self, wrap: Callable[[], Callable[[], None]]) -> None:
        """``wrap()`` puts the wrapper on and returns how to undo it."""
        self._wrap = wrap
        self._all: list[T] = []
        self._undo: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._all))

    def add(self, listener: T) -> None:
        with self._lock:
            self._all.append(listener)
            if self._undo is None:
                self._undo = self._wrap()

    def remove(self, listener: T) -> None:
        """Stop telling it; nothing happens where it was not told."""
        with self._lock:
            if listener in self._all:
                self._all.remove(listener)
            if not self._all and self._undo is not None:
                self._undo()
                self._undo = None
