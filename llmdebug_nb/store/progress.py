"""How far a native run is, without opening it: cheap enough to ask every second, and of the standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llmdebug_nb.store import format as fmt

State = Literal["complete", "recording", "incomplete"]
_MAX_COPY = 64 << 20  # a larger index that is still being written is not copied for its figures
_COPY_RATE = 10 << 20  # bytes a second that such copies may take of the disk
_QUIET = 10.0  # seconds without a change, after which it is asked whether the writer still runs
_FIGURES = """
SELECT (SELECT count(*) FROM records), (SELECT count(*) FROM (SELECT DISTINCT generation, step FROM records
    JOIN root_calls ON root_calls.idx = root_call WHERE role != 'weight')),
    (SELECT value FROM meta WHERE key = 'complete')
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """``bytes`` of payload; ``records`` and ``steps`` of the first process, None where the index can't tell."""

    bytes: int
    records: int | None
    steps: int | None
    state: State


_known: dict[Path, tuple[object, Progress, float]] = {}  # what was seen, what that meant, when to look again


def progress(run: Path) -> Progress:
    """Return how far the run in that folder is; what can't be read counts as incomplete, and never raises."""
    processes = sorted(folder for folder in run.glob("rank*") if (folder / fmt.INDEX).is_file())
    files = [folder / name for folder in processes for name in (fmt.INDEX, f"{fmt.INDEX}-wal", fmt.PAYLOAD)]
    seen = [(file.name, stat.st_size, stat.st_mtime) for file in files if (stat := _stat(file)) is not None]
    written = [folder for folder in processes if (folder / f"{fmt.INDEX}-wal").is_file()]
    recording = any(_writer_lives(folder, seen) for folder in written)
    nbytes = sum(size for name, size, _ in seen if name == fmt.PAYLOAD)
    before = _known.get(run)
    if before is not None and before[0] == (seen, recording):
        return before[1]
    if before is not None and recording and time.monotonic() < before[2]:
        return replace(before[1], bytes=nbytes)
    records, steps, complete = _figures(processes[0]) if processes else (None, None, False)
    state: State = "recording" if recording else "complete" if complete and not written else "incomplete"
    now = Progress(nbytes, records, steps, state)
    copied = sum(size for name, size, _ in seen if name != fmt.PAYLOAD)
    _known[run] = ((seen, recording), now, time.monotonic() + copied / _COPY_RATE)
    return now


def _stat(file: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return file.stat()
    return None


def _writer_lives(process: Path, seen: list[tuple[str, int, float]]) -> bool:
    """Does the process that writes this folder still run? On another machine, or without POSIX, a recent change tells."""
    if time.time() - max(changed for _, _, changed in seen) < _QUIET:
        return True
    pid = process.name.rpartition("_")[2]
    if os.name != "posix" or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _figures(process: Path) -> tuple[int | None, int | None, bool]:
    """Return records, steps and whether the recording ended as planned."""
    index = process / fmt.INDEX
    log = index.with_name(f"{index.name}-wal")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if log.is_file():  # read from a copy: a reader in place would be in the way of the writer's last step
                if index.stat().st_size + log.stat().st_size > _MAX_COPY:
                    return None, None, False
                shutil.copyfile(index, Path(scratch) / index.name)
                shutil.copyfile(log, Path(scratch) / log.name)
                uri = (Path(scratch) / index.name).as_uri()
            else:
                uri = f"{index.resolve().as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA trusted_schema=OFF")
                records, steps, complete = db.execute(_FIGURES).fetchone()
                return records, steps, complete is not None and json.loads(complete) is True
    except (sqlite3.Error, OSError, ValueError, TypeError, RecursionError):
        return None, None, False
