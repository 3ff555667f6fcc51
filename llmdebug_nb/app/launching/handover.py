"""The folder through which a launched program and its launcher exchange messages.

Every Python of the program imports this module, so it uses only the standard library.

    options.json   what to record, and where
    packages       one a line: those that a process waits for, `PACKAGES`
    run            path of the run, once a process has started it
    reached/PID    the first of these packages that a process imported
    errcheck/PID   the result of an error check in a process
    ended          JSON lines: what each recording that has ended wrote
    messages       JSON lines: messages of the processes for the user
    lock           held by a process that creates the run
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECK = "errcheck"  # the option that a launch has if it checks in place of recording
VARIABLE = "LLMDEBUG_LAUNCH"  # environment variable of the program: this folder
_PRIVATE = 0o700  # the mode that `mkdtemp` gives


def in_an_environment(text: str) -> bool:
    """Tell whether another process of this user began with a text in its environment (Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = folder.name == str(os.getpid())
            if not own and os.fsencode(text) in (folder / "environ").read_bytes():
                return True
    return False


class Handover:
    """The folder of one launch, as both sides see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def here(cls) -> Handover | None:
        """Return the folder of the launch that this process belongs to, if the launcher runs.

        It counts only if it is what the launcher makes: a folder, no link, of this user alone.
        Otherwise somebody else could make it anew, and tell this program what to write where.
        """
        folder = os.environ.get(VARIABLE)
        if not folder:
            return None
        try:
            found, options = os.lstat(folder), os.lstat(os.path.join(folder, "options.json"))
        except (OSError, ValueError):
            return None
        own = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == _PRIVATE
        owners = {found.st_uid, options.st_uid}
        return cls(Path(folder)) if own and owners == {os.getuid()} else None

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Handover]:
        """Make the folder of a launch, and empty it afterwards.

        The folder itself stays while a process still has it in its environment, first on PATH: in a
        temporary folder that all users share, somebody else could make it anew.
        """
        folder = Path(tempfile.mkdtemp(prefix="llmdebug-"))
        try:
            yield cls(folder)
        finally:
            for each in folder.iterdir():
                if each.is_dir():
                    shutil.rmtree(each, ignore_errors=True)
                else:
                    each.unlink(missing_ok=True)
            if not in_an_environment(str(folder)):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    # -- from the launcher to the program --------------------------------------------------------

    def write_options(self, options: Mapping[str, object], packages: Iterable[str]) -> None:
        """Write the options of the recording, and prepare the folder.

        ``packages``: a process that imports one may run models.
        """
        (self.folder / "reached").mkdir()
        (self.folder / "packages").write_text("\n".join(packages), encoding="utf-8")
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
        """Send a message."""
        self._add("messages", text)

    def messages(self) -> list[tuple[int, str]]:
        """Return the messages in order, each with the id of its process."""
        return [(pid, str(text)) for pid, text in self._added("messages")]

    def note_end(self, part: Sequence[object]) -> None:
        """Send what the recording of this process wrote, a `Part`, now that it has ended."""
        self._add("ended", part)

    def ended(self) -> list[object]:
        """Return what each recording wrote that has ended, see `Part.of`."""
        return [part for _, part in self._added("ended")]

    def _add(self, name: str, what: object) -> None:
        """Add a line to a file, in one write: several processes may do so at the same time."""
        line = json.dumps([os.getpid(), what]) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def _added(self, name: str) -> Iterator[tuple[int, Any]]:
        """Yield the lines of a file, each with the id of the process that added it."""
        file = self.folder / name
        if not file.exists():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # the program may write here too
                pid, what = json.loads(line)
                yield int(pid), what

    def note_check(self, result: bytes) -> None:
        """Send the result of this process's check so far; it replaces an earlier one."""
        folder = self.folder / CHECK
        with contextlib.suppress(OSError):  # the launcher has ended
            folder.mkdir(exist_ok=True)
            fresh = folder / f"{os.getpid()}.new"
            fresh.write_bytes(result)
            fresh.replace(folder / str(os.getpid()))

    def checks(self) -> list[bytes]:
        """Return the results of all processes."""
        folder = self.folder / CHECK
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [file.read_bytes() for file in files if file.name.isdigit()]

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
