"""What processes of a run tell each other: an alarm of one keeps the last steps of all.

Each adds lines to one file in the run's folder, which all look at. So no message passes between
ranks that the program did not send itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmdebug_nb.store import own_file

if TYPE_CHECKING:
    from llmdebug_nb.core.moments import Signal

SIGNALS = "alarms.jsonl"
_MOST = 1 << 16  # bytes that are read at once: a line has some 60


class Signals:
    """The alarms of one run, as one of its processes sends and hears them."""

    def __init__(self, run: Path, sender: str, rank: int) -> None:
        self._file = run / SIGNALS
        self._sender, self._rank = sender, rank
        self._at = self._size()  # what was said before is about steps that are not here

    def tell(self, generation: int, step: int) -> None:
        """Tell the others of an alarm. Raises OSError and CorruptDumpError."""
        from llmdebug_nb.core.moments import Signal

        line = msgspec.json.encode(Signal(self._sender, self._rank, generation, step)) + b"\n"
        own_file.append(self._file, line)

    def heard(self) -> list[Signal]:
        """Return the alarms of others since this was last asked.

        Raises:
            OSError, CorruptDumpError: the file can't be read.
        """
        if self._size() <= self._at:
            return []
        with own_file.open_file(self._file) as stream:
            stream.seek(self._at)
            lines, end, _ = (stream.read(_MOST) or b"").rpartition(b"\n")
        self._at += len(lines) + len(end)
        found = map(_signal, lines.split(b"\n"))
        return [each for each in found if each is not None and each.sender != self._sender]

    def _size(self) -> int:
        try:
            return os.stat(self._file).st_size
        except FileNotFoundError:
            return 0


def _signal(line: bytes) -> Signal | None:
    from llmdebug_nb.core.moments import Signal

    try:
        return msgspec.json.decode(line, type=Signal)
    except (msgspec.DecodeError, RecursionError):
        return None  # written by another version, or torn
