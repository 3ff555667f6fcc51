"""What has been checked so far, on disk: an interrupted check goes on where it stopped.

The file may be torn, or come from elsewhere: what is no check of a call of this run is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from llmdebug_nb.app.opcheck.checking import How
from llmdebug_nb.app.opcheck.choosing import Call
from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, saving
from llmdebug_nb.replay.checks import CallCheck
from llmdebug_nb.store import own_file
from llmdebug_nb.store.run import Run

_VERSION = 1  # of the checks: another one begins anew
_LONGEST = 1 << 20  # bytes of a line; a call's has hundreds


class Journal:
    """One line of JSON for each checked call, in a file of this run and these options.

    ``done``: what an interrupted check left, by id of the call's first output.
    """

    def __init__(self, folder: Path, run: Run, how: How, calls: Iterable[Call]) -> None:
        """``calls``: those to check; what the file says of others is passed over.

        Raises:
            DumpWriteError: the file can't be written, or is not this user's own.
        """
        calls = list(calls)
        self.path = folder / f".opcheck_{_key(run, how, calls)}.jsonl"
        self.done: dict[int, CallCheck] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = io.BufferedRandom(own_file.open_to_change(self.path))
            whole = self._read({call.record: call for call in calls})
            self._file.truncate(whole)
            self._file.seek(whole)
        except (OSError, CorruptDumpError) as error:
            why = getattr(error, "strerror", None) or error
            raise DumpWriteError(
                f"can't write {self.path}: {why}; choose another folder (-o)"
            ) from None

    def _read(self, calls: Mapping[int, Call]) -> int:
        """Read the lines that are whole; return where they end."""
        end = 0
        while line := self._file.readline(_LONGEST):
            try:
                check = CallCheck.read(line) if line.endswith(b"\n") else None
            except ValueError:
                check = None
            if check is None:
                break
            end += len(line)
            call = calls.get(check.record)
            if call is not None and (call.key, call.op, call.id) == (check.key, check.op, check.id):
                self.done[check.record] = check
        return end

    def add(self, check: CallCheck) -> None:
        """Keep a check. Raises DumpWriteError."""
        self.done[check.record] = check
        with saving(self.path):
            self._file.write(check.line().encode() + b"\n")
            self._file.flush()

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


def _key(run: Run, how: How, calls: Iterable[Call]) -> str:
    """Return a name for a run as it is now, and for the options that change results."""
    where = "" if run.path is None else str(run.path.resolve())
    options = asdict(how) | {"trusted": None}  # another process goes on
    given = [(call.record, call.parameters) for call in calls if call.parameters]
    facts = [_VERSION, where, len(run), run.meta.get("created"), options, given]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
