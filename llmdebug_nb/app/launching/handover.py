"""The folder by which a program and who launched it know of each other. Of the standard library alone, as every Python of the program reads it.

options.json   what to record, and where
run            path of the run, once a process has begun it
reached/PID    a process that imported torch or onnxruntime, by which of them
said           lines of JSON: what a process could not do, or was stopped by
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "LLMDEBUG_LAUNCH"  # in the environment of the program: this folder


class Handover:
    """One launch's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def here(cls) -> Handover | None:
        """Return that of the launch that this process is part of, if it is part of one that still runs."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder and os.path.isdir(folder) else None

    # -- what the program is told -------------------------------------------------------------

    def order(self, options: dict[str, Any]) -> None:
        (self.folder / "reached").mkdir()
        (self.folder / "options.json").write_text(json.dumps(options), encoding="utf-8")

    def orders(self) -> dict[str, Any]:
        ordered: dict[str, Any] = json.loads(
            (self.folder / "options.json").read_text(encoding="utf-8")
        )
        return ordered

    # -- what it tells ------------------------------------------------------------------------

    def reached(self, package: str) -> None:
        """A process of the program imports ``package``."""
        file = self.folder / "reached" / str(os.getpid())
        with contextlib.suppress(OSError):  # who launched it is gone: then nobody asks
            if not file.exists():
                file.write_text(package, encoding="utf-8")

    def processes(self) -> dict[int, str]:
        """Return the processes that were reached, and the package that each imported."""
        found = sorted(
            int(file.name) for file in (self.folder / "reached").iterdir() if file.name.isdigit()
        )
        return {
            pid: (self.folder / "reached" / str(pid)).read_text(encoding="utf-8") for pid in found
        }

    def say(self, text: str) -> None:
        """Tell who launched the program, by one write: processes say things at the same time."""
        line = json.dumps([os.getpid(), text]) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self.folder / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def said(self) -> list[tuple[int, str]]:
        """Return what processes said, in order."""
        file = self.folder / "said"
        found = []
        for line in (
            file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ()
        ):
            with contextlib.suppress(ValueError, TypeError):  # the program can write there too
                pid, text = json.loads(line)
                found.append((int(pid), str(text)))
        return found

    # -- the run that its processes share -----------------------------------------------------

    @property
    def run(self) -> Path | None:
        """The run's folder, once it was begun."""
        with contextlib.suppress(OSError):
            return Path((self.folder / "run").read_text(encoding="utf-8"))
        return None

    @run.setter
    def run(self, path: Path) -> None:
        (self.folder / "run").write_text(str(path), encoding="utf-8")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the other processes out meanwhile; one that is killed lets them in."""
        import fcntl

        with open(self.folder / "lock", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
