"""The payload files of one process: one, or with the option ``last`` one for each step.

All their frames have one count of offsets. The first file begins at 0, and each further one says in
its name where it begins: ``tensors.1048576.bin``. Files between others may be gone, with the
steps that they were of.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import own_file
from llmdebug_nb.store.own_file import PRIVATE_FILE

_LATER = re.compile(r"tensors\.([1-9]\d{0,17})\.bin")
_MAX_WRITE = 1 << 30
_GATHERS = hasattr(os, "writev")


class PayloadFile(NamedTuple):
    """A payload file: its frames have the offsets from ``start`` to before ``end``."""

    start: int
    end: int
    path: Path


def start_of(name: str) -> int | None:
    """Return the offset at which a payload file of this name begins; None: it is no such file."""
    later = _LATER.fullmatch(name)
    return int(later[1]) if later else 0 if name == fmt.PAYLOAD else None


def name_of(start: int) -> str:
    """Return the name of the payload file that begins there."""
    return f"tensors.{start}.bin" if start else fmt.PAYLOAD


def places(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the payload files of a process, in any order, each with the offset of its begin."""
    for name in os.listdir(folder):
        start = start_of(name)
        if start is not None:
            yield start, folder / name


def payload_files(folder: Path) -> list[PayloadFile]:
    """Return the payload files of a process in the order of their offsets.

    Raises:
        CorruptDumpError: one is a link, no regular file, or begins inside another.
    """
    found: list[PayloadFile] = []
    for start, path in sorted(places(folder)):
        with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
            found.append(PayloadFile(start, start + own_file.check(path).st_size, path))
    for before, after in itertools.pairwise(found):
        if after.start < before.end:
            raise CorruptDumpError(f"{after.path} begins inside {before.path.name}")
    return found


def _write_rest(file: int, parts: list[bytes | memoryview], done: int) -> None:
    """Write what is left of the parts, in as many calls as the system wants."""
    for part in parts:
        if done >= len(part):
            done -= len(part)
            continue
        view, done = memoryview(part).cast("B")[done:], 0
        while len(view):
            view = view[os.write(file, view[:_MAX_WRITE]) :]


class PayloadWriter:
    """Appends to the payload files of a process. Its methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [0]  # where each begins that is there
        self._ended = False  # the last one gets no further frames
        self._file = self._create()

    def _create(self) -> FileIO:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        path = self._path(self._files[-1])
        return FileIO(os.open(path, flags, PRIVATE_FILE), "r+b")

    def _path(self, start: int) -> Path:
        return self._folder / name_of(start)

    @property
    def end(self) -> int:
        """The offset of the next frame."""
        return self._files[-1] + os.fstat(self._file.fileno()).st_size

    def append(self, parts: list[bytes | memoryview]) -> int:
        """Write ``uint8[n]`` in one go and return where they start: a multiple of `format.ALIGN`.

        If that fails, the file is cut back to its last complete frame.
        """
        if self._ended:
            self._next_file()
        start, file, size = None, self._file.fileno(), sum(map(len, parts))
        try:
            start = os.fstat(file).st_size
            done = os.writev(file, parts) if _GATHERS and size <= _MAX_WRITE else 0
            if done < size:
                _write_rest(file, parts, done)
        except OSError:
            if start is not None:
                with contextlib.suppress(OSError):  # readers recognise a torn frame
                    os.ftruncate(file, start)
            raise
        return self._files[-1] + start

    def begin_file(self) -> None:
        """Let further frames go to a file of their own, made with the first of them."""
        self._ended = True

    def _next_file(self) -> None:
        self._ended, end = False, self.end
        if end > self._files[-1]:
            self._file.close()
            self._files.append(end)
            self._file = self._create()

    def between(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each earlier file that holds some of the offsets."""
        for start, end in itertools.pairwise(self._files):
            if low < end and start <= high:
                yield start, end

    def remove(self, start: int) -> int:
        """Remove the file that begins there; return its size."""
        path = self._path(start)
        size = path.stat().st_size
        path.unlink()
        self._files.remove(start)
        return size

    def close(self) -> None:
        self._file.close()
