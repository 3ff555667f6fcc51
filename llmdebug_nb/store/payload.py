"""Reading the payload of a process, whose files lie in its folder or in a remote store.

Files that follow each other without a gap are read as one: a store of objects can't append, so
what is one file here is there in parts, whose borders may lie inside a tensor.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from llmdebug_nb.core import constants
from llmdebug_nb.store import own_file
from llmdebug_nb.store.payload_files import payload_files

UPLOAD = "upload.json"  # beside the payload of a run that is uploaded: how far it is


class Piece(NamedTuple):
    """Bytes of a payload, in a file or several: those from ``start`` to before ``end``.

    ``name``: of the first file. ``fill(at, view)`` reads as many bytes as the view has, from ``at``
    of the piece on. It raises FileNotFoundError, OSError or a StoreError.
    """

    start: int
    end: int
    name: str
    fill: Callable[[int, memoryview], None]


class Elsewhere(Protocol):
    """A run in a remote store, of which this machine has marker and index in a folder.

    ``url``: its place. ``files(process)``: the payload files of a process folder, by name.
    ``refresh()``: look whether the run has grown, and copy its index again if so.
    """

    url: str

    def files(self, process: str) -> list[Piece]: ...

    def refresh(self) -> None: ...


_elsewhere: dict[Path, Elsewhere] = {}  # by the run's folder, which this process made


def lies_elsewhere(run: Path, there: Elsewhere) -> None:
    """Let the payloads of the run in a folder be read from a remote store."""
    _elsewhere[run] = there


def elsewhere(run: Path | None) -> Elsewhere | None:
    """Return the place where the payloads of a run lie; None: in its own folder."""
    return None if run is None else _elsewhere.get(run)


def pieces(process: Path) -> list[Piece]:
    """Return a payload in the order of offsets, with gaps between pieces.

    Raises CorruptDumpError: a file is a link, no regular file, or begins inside another.
    """
    there = _elsewhere.get(process.parent)
    if there is not None:
        return joined(there.files(process.name))
    found = payload_files(process)
    return joined(
        [Piece(start, end, str(path), _filler(path, end - start)) for start, end, path in found]
    )


def joined(files: Sequence[Piece]) -> list[Piece]:
    """Return pieces in the order of offsets, with those put together that have no gap between."""
    rows: list[list[Piece]] = []
    for file in files:
        if rows and rows[-1][-1].end == file.start:
            rows[-1].append(file)
        else:
            rows.append([file])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _joined(row: Sequence[Piece]) -> Piece:
    """Return files of which each begins where the one before it ends as one piece."""
    first, starts = row[0].start, [piece.start for piece in row]

    def fill(at: int, view: memoryview) -> None:
        at += first
        while len(view):
            piece = row[bisect.bisect_right(starts, at) - 1]
            count = min(len(view), piece.end - at)
            piece.fill(at - piece.start, view[:count])
            at, view = at + count, view[count:]

    return Piece(first, row[-1].end, row[0].name, fill)


def read(found: Sequence[Piece], offset: int, length: int) -> bytearray:
    """Return bytes of a payload. Place and length are checked before memory is allocated.

    Raises:
        ValueError: they lie beyond the end of their piece. FileNotFoundError, OSError, StoreError:
            that can't be read.
    """
    piece = holding(found, offset)
    if not (offset >= piece.start and length >= 0 and offset + length <= piece.end):
        raise ValueError("cut short: the bytes of this tensor lie beyond its end")
    data = bytearray(length)
    piece.fill(offset - piece.start, memoryview(data))
    return data


def holding(found: Sequence[Piece], offset: int) -> Piece:
    """Return the piece that an offset belongs to. Raises FileNotFoundError: there is none."""
    before = [piece for piece in found if piece.start <= offset]
    if not before:
        raise FileNotFoundError
    return before[-1]


def stream(piece: Piece) -> BinaryIO:
    """Return a piece of a payload as a file that can be read from any place."""
    return cast("BinaryIO", io.BufferedReader(_Stream(piece)))


def _filler(file: Path, size: int) -> Callable[[int, memoryview], None]:
    """Return what fills a view from a file, of which the first ``size`` bytes are there for good.

    Small tensors that are read one after the other mostly lie side by side, so what follows one is
    read with it: opening the file takes longer than reading as much.
    """
    mine = object()

    def read(at: int, view: memoryview) -> int:
        with own_file.open_file(file) as opened:
            opened.seek(at)
            return fill_from(opened, view)

    def fill(at: int, view: memoryview) -> None:
        if len(view) >= constants.READ_AHEAD:
            found = read(at, view)
        else:
            start, known = _ahead.get(mine, (0, memoryview(b"")))
            if not start <= at <= at + len(view) <= start + len(known):
                start, known = at, memoryview(bytearray(min(constants.READ_AHEAD, size - at)))
                known = known[: read(at, known)]
                _keep(mine, start, known)
            part = known[at - start : at - start + len(view)]
            found = len(part)
            view[:found] = part
        if found != len(view):
            raise OSError(f"cut short: {file.name} ends early")

    return fill


_ahead: dict[object, tuple[int, memoryview]] = {}  # what was read last, and where it begins


def _keep(file: object, start: int, data: memoryview) -> None:
    """Keep what was read of a file last, for the files of late."""
    _ahead.pop(file, None)
    for oldest in [*_ahead][: max(len(_ahead) - constants.FILES_AHEAD + 1, 0)]:
        _ahead.pop(oldest, None)
    _ahead[file] = start, data


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
