"""Files of a run, opened as what they are: a link, a pipe or a device is refused.

Whoever sends a run decides what its names are. A link would read a file of the reader's, and a
pipe would block the reader for ever.
"""

from __future__ import annotations

import contextlib
import os
import stat
from io import FileIO
from pathlib import Path

from llmdebug_nb.core.errors import CorruptDumpError

# permissions: a dump is its owner's alone, whatever the umask
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # those that the system has


def check(file: Path) -> os.stat_result:
    """Return the state of a regular file.

    Raises:
        CorruptDumpError: it is a link, or no regular file.
        FileNotFoundError, OSError: it is not there, or can't be asked.
    """
    return _regular(file, os.lstat(file))


def open_file(file: Path) -> FileIO:
    """Open a regular file to read it, without a buffer. Raises as `check`."""
    check(file)
    return _opened(file, os.O_RDONLY, "rb")


def open_to_change(file: Path) -> FileIO:
    """Open a regular file of this user to read and change it; make it if there is none.

    A file that has another name too is refused, as that may be a file of another kind.

    Raises:
        CorruptDumpError: it is a link, no regular file, or not this user's alone.
        OSError: it can't be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        check(file)
    return _opened(file, os.O_RDWR | os.O_CREAT, "r+b")


def append(file: Path, line: bytes) -> None:
    """Add a line to a file of this user, which several processes write; make it if there is none.

    Raises as `open_to_change`.
    """
    with contextlib.suppress(FileNotFoundError):
        check(file)
    with _opened(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, "r+b") as stream:
        stream.write(line)  # at once, so no other line comes between


def _opened(file: Path, flags: int, mode: str) -> FileIO:
    for name in _FLAGS:
        flags |= getattr(os, name, 0)
    handle = os.open(file, flags, PRIVATE_FILE)
    try:
        state = _regular(file, os.fstat(handle))  # it may be another one by now
        if "+" in mode:
            _alone(file, state)
        return FileIO(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def _alone(file: Path, state: os.stat_result) -> None:
    if state.st_nlink > 1:
        raise CorruptDumpError(f"{file} has another name too; remove it")
    if hasattr(os, "getuid") and state.st_uid != os.getuid():
        raise CorruptDumpError(f"{file} belongs to another user; choose another folder")


def _regular(file: Path, state: os.stat_result) -> os.stat_result:
    if stat.S_ISLNK(state.st_mode):
        raise CorruptDumpError(f"{file} is a link, and is not followed; put the file in its place")
    if not stat.S_ISREG(state.st_mode):
        raise CorruptDumpError(f"{file} is no regular file")
    return state
