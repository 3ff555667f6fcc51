"""Opening a run in a remote store: its marker and index are copied, its payloads read in place.

The copy has the form of a run's folder, without payloads. Names of the store are only taken if
they are those of the format, so nothing is written outside that folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import time
from pathlib import Path

from llmdebug_nb.core.errors import (
    CorruptDumpError,
    NotADumpError,
    RemoteError,
    StoreError,
    UnknownRunError,
)
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import payload
from llmdebug_nb.store.connection import log_of
from llmdebug_nb.store.own_file import PRIVATE_FOLDER
from llmdebug_nb.store.payload import Piece
from llmdebug_nb.store.payload_files import start_of
from llmdebug_nb.store.remote.stores import REQUEST, Place

# Bytes that are read at once around a small tensor, so that its neighbours need no request of
# their own: at 100 MB/s they take 0.04 s, about as long as a request takes to begin.
BLOCK = 4 << 20
# Blocks that are kept, of all runs together: 256 MiB, an eighth of the 2 GiB that a comparison may
# take, and more than the tensors between two uses of one in a layer.
BLOCKS = 64
_LOOK_EVERY = 5.0  # seconds between two looks at a run that is still being written
_TRIES = 3  # copies of an index that changes meanwhile
_ROOM = 64 << 20  # bytes that a copy leaves free on the disk
_MAX_MARKER = 1 << 22
_PROCESS = re.compile(r"rank\d+_\d+(\.\d+)?")
_Files = dict[str, tuple[int, str]]


class Mirror:
    """The copy of a run's small files, and the way to its payloads.

    ``folder``: the copy. ``files``: size and state of each file that was copied.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        """Copy marker and indexes into a new folder. Raises FileNotFoundError, StoreError."""
        self.place, self.folder, self.url = place, folder, place.url
        self._files: dict[str, _Files] = {}
        self._payload: dict[str, list[Piece]] = {}
        self._looked = 0.0
        marker = (place / fmt.MARKER).head(_MAX_MARKER)
        folder.mkdir(PRIVATE_FOLDER, parents=True)
        (folder / fmt.MARKER).write_bytes(marker)
        self.marker = marker
        try:
            self._look()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        payload.lies_elsewhere(folder, self)

    def files(self, process: str) -> list[Piece]:
        """Return the payload files of a process folder, by name."""
        return self._payload.get(process, [])

    def refresh(self) -> None:
        """Look whether the run has grown, and copy its index again if so.

        A store that fails now is no reason to lose what was read: what is read next will say so.
        """
        if time.monotonic() - self._looked > _LOOK_EVERY:
            try:
                self._look()
            except (StoreError, FileNotFoundError):
                self._looked = time.monotonic()

    def is_current(self) -> bool:
        """Tell whether the store still has what was copied. Raises FileNotFoundError, StoreError.

        What has grown is copied again.
        """
        if (self.place / fmt.MARKER).head(_MAX_MARKER) != self.marker:
            return False
        self._look()
        return True

    def _look(self) -> None:
        for name, entry in self.place.children().items():
            if entry.is_folder and _PROCESS.fullmatch(name):
                self._copy(self.place / name, self.folder / name)
        self._looked = time.monotonic()

    def _copy(self, process: Place, folder: Path) -> None:
        """Copy the index of a process if it is another one, then see how much payload there is."""
        for _ in range(_TRIES):
            files = _index_files(process)
            if fmt.INDEX not in files:
                return
            if files == self._files.get(process.name):
                break
            folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
            _room_for(sum(size for size, _ in files.values()), process, folder)
            for name, (size, _) in files.items():
                _fetch(process / name, size, folder / f"{name}.new")
            if _index_files(process) == files:
                self._put_in_place(folder, files)
                self._files[process.name] = files
                break
        else:
            raise RemoteError(f"{process.url}: its index changes while it is copied; try again")
        self._payload[process.name] = payload_files(process)

    def _put_in_place(self, folder: Path, files: _Files) -> None:
        log = log_of(folder / fmt.INDEX).name
        if log not in files:
            (folder / log).unlink(missing_ok=True)
        for name in files:
            os.replace(folder / f"{name}.new", folder / name)


def _index_files(process: Place) -> _Files:
    """Return size and state of the index and, until its writer closes it, of its log."""
    names = (fmt.INDEX, log_of(Path(fmt.INDEX)).name)
    children = process.children()
    return {name: (process / name).state() for name in names if name in children}


def _room_for(nbytes: int, process: Place, folder: Path) -> None:
    """Raises CorruptDumpError: the disk has no room for a copy of that size."""
    free = shutil.disk_usage(folder).free - _ROOM
    if nbytes > free:
        raise CorruptDumpError(
            f"{process.url}: a copy of its index is read, and that needs {nbytes:,} bytes:"
            f" {folder.parent} has {max(free, 0):,}; TMPDIR names another folder"
        )


def _fetch(file: Place, size: int, to: Path) -> None:
    with open(to, "wb") as copy:
        for start in range(0, size, REQUEST):
            copy.write(file.read(start, min(start + REQUEST, size)))


def payload_files(process: Place) -> list[Piece]:
    """Return the payload files of a process in the order of their offsets.

    Raises FileNotFoundError, RemoteError.
    """
    children = process.children()
    starts = {name: start for name in children if (start := start_of(name)) is not None}
    pieces = []
    for name in sorted(starts, key=starts.__getitem__):
        start, size = starts[name], children[name].size
        file = _File(process / name, (process / name).state()[0] if size is None else size)
        pieces.append(Piece(start, start + file.size, file.place.url, file.fill))
    return pieces


class _File:
    """A file that is read in place: small ranges through blocks that are kept."""

    def __init__(self, place: Place, size: int) -> None:
        self.place, self.size = place, size

    def fill(self, offset: int, view: memoryview) -> None:
        """Read as many bytes as the view has. Raises RemoteError."""
        at, stop = offset, offset + len(view)
        try:
            while at < stop:
                data = self._next(at, stop)
                view[at - offset : at - offset + len(data)] = data
                at += len(data)
        except FileNotFoundError:
            raise RemoteError(f"{self.place.url} is gone: was the run deleted?") from None

    def _next(self, at: int, stop: int) -> bytes | memoryview:
        """Return the next bytes of a range: up to a request of a large one, or those of a block."""
        if stop - at > BLOCK:
            return self.place.read(at, min(at + REQUEST, stop))
        number = at // BLOCK
        block = memoryview(_block(self, number))
        return block[at - number * BLOCK : stop - number * BLOCK]


@functools.lru_cache(BLOCKS)
def _block(file: _File, number: int) -> bytes:
    start = number * BLOCK
    return file.place.read(start, min(start + BLOCK, file.size))


def find(place: Place) -> Place:
    """Return the run at a place: itself, or the only one in it.

    Raises:
        UnknownRunError: there is nothing. NotADumpError: it is no run of ours, or holds several.
        RemoteError: the store can't be asked.
    """
    try:
        children = place.children()
    except FileNotFoundError as error:
        raise UnknownRunError(f"no run at {place.url}: nothing is there ({error})") from None
    if fmt.MARKER in children:
        return place
    folders = sorted(name for name, entry in children.items() if entry.is_folder)
    inside = [name for name in folders if _is_run(place / name)]
    if len(inside) == 1:
        return place / inside[0]
    if inside:
        names = ", ".join(inside[:12]) + (" …" if len(inside) > 12 else "")
        raise NotADumpError(f"{place.url} holds several runs; name one of {names}")
    if not children:
        raise UnknownRunError(f"no run at {place.url}: nothing is there")
    raise NotADumpError(
        f"{place.url} is no run of llmdebug_nb: it has no {fmt.MARKER}. Dumps of other tools are"
        " read on this machine alone: copy it to a folder, and open that"
    )


def _is_run(place: Place) -> bool:
    try:
        return bool(json.loads((place / fmt.MARKER).head(_MAX_MARKER)))
    except (FileNotFoundError, ValueError, RecursionError):
        return False
