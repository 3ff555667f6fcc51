"""Reading the payload of a process, whose files lie in its folder or in a remote store."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from llmdebug_nb.store import own_file
from llmdebug_nb.store.payload_files import payload_files


class Piece(NamedTuple):
    """A file of a payload: its frames have the offsets from ``start`` to before ``end``.

    ``fill(at, view)`` reads as many bytes as the view has, from ``at`` of the file on. It raises
    FileNotFoundError, OSError or a StoreError.
    """

    start: int
    end: int
    name: str
    fill: Callable[[int, memoryview], None]


class Elsewhere(Protocol):
    """A run in a remote store, of which this machine has marker and index in a folder.

    ``url``: its place. ``pieces(process)``: the payload of a process folder, by name.
    ``refresh()``: look whether the run has grown, and copy its index again if so.
    """

    url: str

    def pieces(self, process: str) -> list[Piece]: ...

    def refresh(self) -> None: ...


_elsewhere: dict[Path, Elsewhere] = {}  # by the run's folder, which this process made


def lies_elsewhere(run: Path, there: Elsewhere) -> None:
    """Let the payloads of the run in a folder be read from a remote store."""
    _elsewhere[run] = there


def elsewhere(run: Path | None) -> Elsewhere | None:
    """Return the place where the payloads of a run lie; None: in its own folder."""
    return None if run is None else _elsewhere.get(run)


def pieces(process: Path) -> list[Piece]:
    """Return the files of a payload in the order of their offsets. Raises CorruptDumpError."""
    there = _elsewhere.get(process.parent)
    if there is not None:
        return there.pieces(process.name)
    found = payload_files(process)
    return [Piece(start, end, str(path), _filler(path)) for start, end, path in found]


def read(found: Sequence[Piece], offset: int, length: int) -> bytearray:
    """Return bytes of a payload. Place and length are checked before memory is allocated.

    Raises:
        ValueError: they lie beyond the end of their file. FileNotFoundError, OSError, StoreError:
            that can't be read.
    """
    piece = holding(found, offset)
    if not (offset >= piece.start and length >= 0 and offset + length <= piece.end):
        raise ValueError("cut short: the bytes of this tensor lie beyond its end")
    data = bytearray(length)
    piece.fill(offset - piece.start, memoryview(data))
    return data


def holding(found: Sequence[Piece], offset: int) -> Piece:
    """Return the file that an offset belongs to. Raises FileNotFoundError: there is none."""
    before = [piece for piece in found if piece.start <= offset]
    if not before:
        raise FileNotFoundError
    return before[-1]


def stream(piece: Piece) -> BinaryIO:
    """Return a file of a payload as one that can be read from any place."""
    return cast("BinaryIO", io.BufferedReader(_Stream(piece)))


def _filler(file: Path) -> Callable[[int, memoryview], None]:
    def fill(at: int, view: memoryview) -> None:
        with own_file.open_file(file) as opened:
            opened.seek(at)
            if fill_from(opened, view) != len(view):
                raise OSError("cut short: it ends early")

    return fill


def fill_from(opened: io.RawIOBase, view: memoryview) -> int:
    """Read until the view is full or the file ends; return the number of bytes.

    One call of the system reads 2 GiB at most.
    """
    done = 0
    while done < len(view) and (count := opened.readinto(view[done:])):
        done += count
    return done


class _Stream(io.RawIOBase):
    def __init__(self, piece: Piece) -> None:
        self.name = piece.name
        self._piece, self._at = piece, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self._piece.end - self._piece.start
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        view = view[: max(self._piece.end - self._piece.start - self._at, 0)]
        if len(view):
            self._piece.fill(self._at, view)
        self._at += len(view)
        return len(view)
