"""Temporary folders. Of a process that was killed, the next one removes them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

_LOCK = "lock"  # held by the process whose folder it is


class Scratch:
    """A temporary folder, which is there until `remove`, or as long as the process lives.

    ``path``: where runs are written. Folders of the same ``kind`` whose process is gone are
    removed first.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"llmdebug-{kind}-"
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        new = self.path / "new"
        self._lock = new.open("w")
        # the lock gets its name once it is held; without locks, nobody removes the folder
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user whose lock nobody holds. One without a lock is just made."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process has it
            shutil.rmtree(folder)
