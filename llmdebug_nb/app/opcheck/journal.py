"""What has been checked so far, on disk: an interrupted check goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import msgspec

from llmdebug_nb.app.opcheck.checking import How
from llmdebug_nb.core.errors import DumpWriteError
from llmdebug_nb.core.opchecks import CallCheck
from llmdebug_nb.store.run import Run

_VERSION = 1  # of the checks: another one begins anew


class Journal:
    """One line of JSON for each checked call, in a file of this run and these options.

    ``done``: what an interrupted check left, by id of the call's first output.
    """

    def __init__(self, folder: Path, run: Run, how: How) -> None:
        """Raises DumpWriteError."""
        self.path = folder / f".opcheck_{_key(run, how)}.jsonl"
        self.done: dict[int, CallCheck] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                raise OSError("it is a link")
            whole = self._read() if self.path.exists() else 0
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = os.fdopen(file, "r+b")
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise DumpWriteError(
                f"can't write {self.path}: {error.strerror or error}; choose another folder (-o)"
            ) from None

    def _read(self) -> int:
        """Read the lines that are whole; return where they end."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                check = CallCheck.read(line)
            except (ValueError, msgspec.ValidationError):
                break
            self.done[check.record] = check
            end += len(line)
        return end

    def add(self, check: CallCheck) -> None:
        """Keep a check. Raises DumpWriteError."""
        self.done[check.record] = check
        try:
            self._file.write(check.line().encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise DumpWriteError(f"can't write {self.path}: {error.strerror or error}") from None

    def remove(self) -> None:
        """Everything is checked and written elsewhere."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()


def _key(run: Run, how: How) -> str:
    """Return a name for a run as it is now, and for the options that change results."""
    where = "" if run.path is None else str(run.path.resolve())
    options = asdict(how) | {"trusted": None}  # another process goes on
    facts = [_VERSION, where, len(run), run.meta.get("created"), options]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
