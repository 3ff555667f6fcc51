"""Files that fail under the writer of a dump: full, slow, read-only, torn, unreadable, gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from llmdebug_nb.store import writer

_ERRORS = {
    "full": (errno.ENOSPC, "database or disk is full"),
    "read-only": (errno.EROFS, "attempt to write a readonly database"),
    "unreadable": (errno.EIO, "disk I/O error"),
    "torn": (errno.EIO, "disk I/O error"),
}
# what a writer does with its index besides changing it; these never fail
_HARMLESS = ("SELECT", "ROLLBACK")
KINDS = (*_ERRORS, "slow", "short", "gone")


class FaultyFiles:
    """A layer under the writer that fails from the ``at``-th write on. ``writes``: so far.

    ``full``, ``read-only``, ``unreadable``: every later write raises that error. ``torn``: the
    first of them writes half of its bytes, and can't be taken back. ``slow``: each one takes a
    millisecond. ``short``: each one writes a part of its bytes only. ``gone``: the folder of the
    run is deleted.
    """

    def __init__(self, kind: str, at: int, folder: Path) -> None:
        self.kind, self.at, self.folder, self.writes = kind, at, folder, 0
        self._writev, self._connect = os.writev, sqlite3.connect

    @contextlib.contextmanager
    def under_the_writer(self) -> Iterator[None]:
        layer = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *rest: Any) -> Any:
                layer.note(sql)
                return super().execute(sql, *rest)

            def executemany(self, sql: str, *rest: Any) -> Any:
                layer.note(sql)
                return super().executemany(sql, *rest)

            def executescript(self, sql: str) -> Any:
                layer.note(sql)
                return super().executescript(sql)

        def connect(*args: Any, **kwargs: Any) -> Any:
            return self._connect(*args, factory=Connection, **kwargs)

        files = {"writev": self._written, "ftruncate": self._cut}
        with contextlib.ExitStack() as stack:
            for name, function in files.items():
                stack.enter_context(mock.patch.object(writer.os, name, function))
            stack.enter_context(mock.patch.object(writer.sqlite3, "connect", connect))
            yield

    def note(self, sql: str) -> None:
        if not sql.lstrip().startswith(_HARMLESS) and self._fails():
            raise sqlite3.OperationalError(_ERRORS[self.kind][1])

    def _fails(self) -> bool:
        """Count a write; return whether it fails with an error."""
        self.writes += 1
        if self.writes < self.at:
            return False
        if self.kind == "slow":
            time.sleep(0.001)
        elif self.kind == "gone":
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.kind in _ERRORS

    def _written(self, file: int, views: Any) -> int:
        if self._fails():
            if self.kind == "torn" and self.writes == self.at:
                self._writev(file, [b"".join(views)[: sum(map(len, views)) // 2]])
            raise OSError(_ERRORS[self.kind][0], os.strerror(_ERRORS[self.kind][0]))
        if self.kind == "short" and self.writes >= self.at:
            return self._writev(file, [b"".join(views)[: max(1, sum(map(len, views)) // 2)]])
        return self._writev(file, views)

    def _cut(self, file: int, size: int, cut: Callable[[int, int], None] = os.ftruncate) -> None:
        if self.kind == "torn" and self.writes >= self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        cut(file, size)
