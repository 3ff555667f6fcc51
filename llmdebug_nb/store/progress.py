"""The progress of a native run, without opening it.

It is cheap enough to ask every second, and needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import own_file
from llmdebug_nb.store.catalog import process_folders
from llmdebug_nb.store.checked import json_of
from llmdebug_nb.store.connection import connect, log_of
from llmdebug_nb.store.part import Part
from llmdebug_nb.store.payload_files import places, start_of

State = Literal["complete", "recording", "incomplete"]
_MAX_COPY = 64 << 20  # bytes: a larger index that is still being written is not copied
_COPY_RATE = 10 << 20  # bytes a second that such copies may read
_QUIET = 10.0  # seconds without a change before the writer's process is checked
_LONGEST = 2.0  # seconds: the list of runs waits for each of them
_FIGURES = """
SELECT (SELECT count(*) FROM records),
    (SELECT count(*) FROM (SELECT DISTINCT generation, step FROM records
        JOIN root_calls ON root_calls.idx = root_call WHERE role != 'weight')),
    (SELECT value FROM meta WHERE key = 'complete'),
    (SELECT value FROM meta WHERE key = 'ended_by'),
    (SELECT CAST(substr(type, 1, 100) AS TEXT) FROM nodes WHERE path = '' ORDER BY idx LIMIT 1)
"""


class _Figures(NamedTuple):
    records: int
    steps: int
    complete: str | None
    ended_by: str | None
    model: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """``bytes``: of values. Of the first process, None if unknown: ``records``, ``steps``, and
    ``model``, the class of the first one.
    """

    bytes: int
    records: int | None
    steps: int | None
    state: State
    model: str | None = None


# run -> state of its files, the progress read from them, and the time to read them again
_known: dict[Path, tuple[object, Progress, float]] = {}


def parts(run: Path) -> list[Part]:
    """Return what each process wrote, in order of their folders' names; never raises."""
    return [part(folder) for folder in process_folders(run)]


def part(folder: Path) -> Part:
    """Return what the process of a folder wrote; never raises."""
    sizes = [stat.st_size for _, file in places(folder) if (stat := _stat(file)) is not None]
    seen = _figures(folder)
    rank = folder.name.partition("_")[0].removeprefix("rank")
    return Part(folder.name, rank, sum(sizes), seen.records, seen.complete, seen.ended_by)


def progress(run: Path) -> Progress:
    """Return the progress of the run in a folder; unreadable files count as incomplete."""
    processes = process_folders(run)
    files = [folder / name for folder in processes for name in (fmt.INDEX, f"{fmt.INDEX}-wal")]
    files += sorted(file for folder in processes for _, file in places(folder))
    seen = [
        (file.name, stat.st_size, stat.st_mtime)
        for file in files
        if (stat := _stat(file)) is not None
    ]
    written = [folder for folder in processes if (folder / f"{fmt.INDEX}-wal").is_file()]
    recording = any(_writer_lives(folder, seen) for folder in written)
    nbytes = sum(size for name, size, _ in seen if start_of(name) is not None)
    before = _known.get(run)
    if before is not None and before[0] == (seen, recording):
        return before[1]
    if before is not None and recording and time.monotonic() < before[2]:
        return replace(before[1], bytes=nbytes)
    first = _figures(processes[0]) if processes else _UNKNOWN
    whole = first.complete and not written
    state: State = "recording" if recording else "complete" if whole else "incomplete"
    now = Progress(nbytes, first.records, first.steps, state, first.model)
    copied = sum(size for name, size, _ in seen if start_of(name) is None)
    _known[run] = ((seen, recording), now, time.monotonic() + copied / _COPY_RATE)
    return now


def _stat(file: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError, CorruptDumpError):
        return own_file.check(file)
    return None


def _writer_lives(process: Path, seen: list[tuple[str, int, float]]) -> bool:
    """Tell whether the process that writes this folder still runs.

    On another machine, or without POSIX, only a recent change tells.
    """
    if time.time() - max(changed for _, _, changed in seen) < _QUIET:
        return True
    pid = process.name.rpartition("_")[2]
    if os.name != "posix" or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


class _Seen(NamedTuple):
    """What the index of a process says; ``ended_by``: why it is not complete."""

    records: int | None
    steps: int | None
    complete: bool
    ended_by: str | None
    model: str | None


_UNKNOWN = _Seen(None, None, False, None, None)


def _figures(process: Path) -> _Seen:
    """Return what the index of a process says."""
    index = process / fmt.INDEX
    try:
        states = [os.lstat(index), *filter(None, [_stat(log_of(index))])]
        if len(states) > 1 and sum(state.st_size for state in states) > _MAX_COPY:
            return _UNKNOWN
        with contextlib.closing(connect(index)) as db:
            db.longest = _LONGEST
            (found,) = db.rows(_Figures, _FIGURES)
            reason = json_of(object, found.ended_by or "null")
            whole = db.settled and json_of(bool, found.complete or "false")
            why = reason if isinstance(reason, str) else None
            return _Seen(found.records, found.steps, whole, why, found.model)
    except (CorruptDumpError, OSError, ValueError, RecursionError):
        return _UNKNOWN
