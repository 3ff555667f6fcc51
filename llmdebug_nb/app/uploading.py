"""Uploading a recording while it is made.

A process of its own does it, so that the program keeps its random numbers (the packages of stores
draw some when they try again), its threads and its memory, and so that what the program recorded
is uploaded even if it is killed. A store in this process' memory needs a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llmdebug_nb.core import interrupts
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.urls import without_secrets
from llmdebug_nb.show.words import size_text
from llmdebug_nb.store.remote import stores, upload
from llmdebug_nb.store.remote.upload import State, Upload

# Seconds that the end of a recording waits for the rest: a cell that takes longer is thought to
# hang, and most of it is uploaded by then. The upload goes on without it.
WAIT = 10.0
_CHECK = 0.05
# the modules of this process, wherever it found them
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1));"
    f" from {upload.__name__} import main; main()"
)


class Uploading(Protocol):
    """An upload that goes on. ``end()``: the recording is over. ``drop()``: forget it."""

    def end(self) -> None: ...
    def is_over(self) -> bool: ...
    def drop(self) -> None: ...


def begin(process: Path, url: str) -> Uploading:
    """Begin to upload a process folder. Raises MissingPackageError, OptionError."""
    upload.note(process, State(without_secrets(url)))
    if url.rpartition("::")[2].startswith("memory://"):
        return _Thread(Upload(process, stores.place(url)))
    return _Process(process, url)


def _tell(text: str) -> None:
    print(f"llmdebug: {text}", file=sys.stderr)


class _Thread:
    def __init__(self, one: Upload) -> None:
        self._upload, self._ended = one, threading.Event()
        follow = (one, self._ended.wait, _tell)
        self._thread = threading.Thread(target=upload.follow, args=follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def drop(self) -> None:
        self._upload.dropped = True
        self.end()
        self._thread.join(WAIT)


class _Process:
    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        folders = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
        # its own session: an interrupt of the program must not end the upload
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        pipe = self._process.stdin
        if pipe is not None:  # not as an argument, which other users see
            pipe.write(json.dumps([str(folder), url]).encode() + b"\n")
            pipe.flush()

    def end(self) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(b"\n")  # a forked child may hold the pipe open
                pipe.close()

    def is_over(self) -> bool:
        status = self._process.poll()
        if status:
            state, why = upload.state_of(self._folder), f"the upload died, status {status}"
            if state is not None and not state.complete and not state.error:
                upload.note(self._folder, replace(state, error=why))
        return status is not None

    def drop(self) -> None:
        self._process.kill()
        self._process.wait()


def finish(uploads: Sequence[Uploading], runs: Sequence[Path]) -> list[str]:
    """Tell uploads that the recording is over, and wait some time; return what is missing."""
    for each in uploads:
        each.end()
    _wait(lambda: all(each.is_over() for each in uploads))
    return [missing for run in runs if (missing := unfinished(run))]


def _wait(over: Callable[[], bool]) -> None:
    """Wait until an upload is over, at most `WAIT` seconds; an interrupt ends it, too."""
    last = time.monotonic() + WAIT
    with Stages("waiting for the upload"):
        while not over() and time.monotonic() < last and not interrupts.waiting:
            time.sleep(_CHECK)


def unfinished(run: Path) -> str:
    """Return what of a run is not uploaded, and what to do; "" if all is, or none was begun."""
    found = upload.uploads_of(run)
    missing = {process: each for process, each in found.items() if not each.covers(process)}
    if not missing:
        return ""
    left = sum(each.left(process) for process, each in missing.items())
    url, error = next((each.url or each.parent, each.error) for each in missing.values())
    nothing = not error and not any(each.url for each in missing.values())
    why = f" ({error})" if error else " (no answer from the store so far)" if nothing else ""
    here = shlex.quote(os.path.relpath(run) if run.is_relative_to(Path.cwd()) else str(run))
    return (
        f"{run.name}: {size_text(left)} of it and its index are not uploaded to {url} yet{why};"
        f" all of it is in {here}, and llmdebug copy {here} uploads the rest"
    )


def destination(run: Path) -> tuple[str, str]:
    """Return the folder in a store that a run is uploaded to, and its own; "" without one."""
    return next(((each.parent, each.url) for each in upload.uploads_of(run).values()), ("", ""))


def messages(run: Path, url: str) -> list[tuple[str, str]]:
    """Return a message on the upload of a run, with its level, after waiting some time for it."""
    _wait(lambda: all(each.complete for each in upload.uploads_of(run).values()))
    found = upload.uploads_of(run)
    for process, state in found.items():
        if state.complete and not state.covers(process):  # its index was closed meanwhile
            upload.follow(Upload(process, stores.place(url)), lambda _: True)
    missing = unfinished(run)
    if missing:
        return [("warning", missing)]
    return [("info", f"uploaded to {destination(run)[1]}")] if found else []
