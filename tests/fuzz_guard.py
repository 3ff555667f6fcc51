"""The guard of fuzzing: nothing outside the folder of a case may be touched."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Escape(Exception):
    """Something outside the folder of the case was touched."""


_guarded: list[Path] = []  # the folder of the case that runs; nothing else may be written
_WRITES = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "shutil.rmtree")  # fmt: skip
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind",
          "ctypes.dlopen", "os.kill")  # fmt: skip


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    if event == "open":
        path, _, flags = args
        flags = flags or 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if isinstance(path, (str, bytes)) and (writes or b"secret" in os.fsencode(path)):
            _check(event, path)
    elif event in _WRITES:
        removes = event in ("os.remove", "os.rmdir")  # `rmtree` names files in an open folder
        within = args[1] if removes and args[1] >= 0 else None
        for path in args[:2]:
            if isinstance(path, (str, bytes)):
                name = os.fsdecode(path)
                _check(event, f"/proc/self/fd/{within}/{name}" if within else name)
    elif event == "subprocess.Popen" and args[0] != sys.executable:
        raise Escape(f"{event} {args[1]!r:.200}")
    elif event in _NEVER and not (event == "os.kill" and args[1] == 0):  # 0 only asks
        raise Escape(f"{event} {args!r:.200}")


def _check(event: str, path: str | bytes) -> None:
    real = os.path.realpath(os.fsdecode(path))
    allowed = (str(_guarded[0]), "/dev/null")
    if not real.startswith(allowed) and "__pycache__" not in real:
        raise Escape(f"{event} {real:.200}")


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    _guarded.append(folder)
    try:
        yield
    finally:
        _guarded.pop()


def watch() -> None:
    """Install the guard in this process, for good. It says nothing outside `guarded`."""
    if not getattr(sys, "_fuzz_watched", False):
        sys.addaudithook(_watch)
        sys._fuzz_watched = True  # type: ignore[attr-defined]


def release() -> None:
    """Let go of the folder of a case that was cut short."""
    _guarded.clear()
