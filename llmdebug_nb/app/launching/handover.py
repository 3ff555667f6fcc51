"""The folder through which a launched program and its launcher exchange messages.

Every Python of the program imports this module, so it uses only the standard library.

    options.json   what to record, and where
    run            path of the run, once a process has started it
    reached/PID    the first package (torch or onnxruntime) that a process imported
    messages       JSON lines: messages of the processes for the user
    lock           held by a process that creates the run
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "LLMDEBUG_LAUNCH"  # environment variable of the program: this folder


class Handover:
    """The folder of one launch, as both sides see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def here(cls) -> Handover | None:
        """Return the folder of the launch that this process belongs to, if the launcher runs."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder and os.path.isdir(folder) else None

    # -- from the launcher to the program --------------------------------------------------------

    def write_options(self, options: Mapping[str, object]) -> None:
        """Write the options of the recording, and prepare the folder."""
        (self.folder / "reached").mkdir()
        (self.folder / "options.json").write_text(json.dumps(options), encoding="utf-8")

    def options(self) -> dict[str, Any]:
        """Return the options of the recording."""
        text = (self.folder / "options.json").read_text(encoding="utf-8")
        options: dict[str, Any] = json.loads(text)
        return options

    # -- from the program to the launcher --------------------------------------------------------

    def note_import(self, package: str) -> None:
        """Note that this process imports ``package``."""
        file = self.folder / "reached" / str(os.getpid())
        with contextlib.suppress(OSError):  # the launcher has ended
            if not file.exists():
                file.write_text(package, encoding="utf-8")

    def processes(self) -> dict[int, str]:
        """Return the ids of the processes that were reached, and the package each imported."""
        folder = self.folder / "reached"
        pids = sorted(int(file.name) for file in folder.iterdir() if file.name.isdigit())
        return {pid: (folder / str(pid)).read_text(encoding="utf-8") for pid in pids}

    def say(self, text: str) -> None:
        """Send a message. It is one write, as several processes may send at the same time."""
        line = json.dumps([os.getpid(), text]) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self.folder / "messages", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def messages(self) -> list[tuple[int, str]]:
        """Return the messages in order, each with the id of its process."""
        file = self.folder / "messages"
        messages: list[tuple[int, str]] = []
        if not file.exists():
            return messages
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # the program may write here too
                pid, text = json.loads(line)
                messages.append((int(pid), str(text)))
        return messages

    # -- the run that the processes share --------------------------------------------------------

    @property
    def run(self) -> Path | None:
        """The run's folder, once a process has created it."""
        with contextlib.suppress(OSError):
            return Path((self.folder / "run").read_text(encoding="utf-8"))
        return None

    @run.setter
    def run(self, path: Path) -> None:
        (self.folder / "run").write_text(str(path), encoding="utf-8")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of a block; a killed process releases the lock."""
        import fcntl

        with open(self.folder / "lock", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
