"""Uploading what one process records, while it does so and afterwards.

The files of the recording are the queue: a round uploads what they have more than the store, so
nothing is lost if the store fails, and a later round, also of another process, goes on from there.

In the store, the payload is in parts, since objects can't grow: each has its offset in its name, as
files of a payload have. The index is a copy without a log, uploaded after the payload that it
names; an empty log beside it says that its writer has not closed it. So whatever is in the store
after a crash can be read.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, LLMDebugError, RemoteError
from llmdebug_nb.core.urls import without_secrets
from llmdebug_nb.store import catalog, own_file, payload, waiting
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store.checked import json_of
from llmdebug_nb.store.connection import log_of
from llmdebug_nb.store.own_file import PRIVATE_FILE
from llmdebug_nb.store.payload import UPLOAD
from llmdebug_nb.store.payload_files import name_of
from llmdebug_nb.store.remote import stores
from llmdebug_nb.store.remote.mirror import payload_files
from llmdebug_nb.store.remote.stores import Place

# Bytes of a part: at 100 MB/s a third of a second, ten times what a request takes to begin. Stores
# take that much in one request, so a part is there as a whole or not at all.
PART = 32 << 20
EVERY = 5.0  # seconds between two rounds: what a crash of the machine keeps from the store
# Rounds take a tenth of the time at most, as each uploads the whole index.
_SHARE = 10
_FAILURES = 3  # rounds without any progress, after the end, until an upload is given up
_LONGEST_PAUSE = 60.0  # seconds between two rounds while the store fails
_AGAIN = 1.0  # seconds before a round after a failure, after the end; then twice as long
_MOST_RUNS = 10_000  # of one name in a store
_TRIES = 2  # to make the parts whole: another upload may have cut them in other places

Span = tuple[int, int]  # the first offset of some bytes, and the one behind the last


@dataclass(frozen=True)
class State:
    """How far an upload is, as the file `UPLOAD` beside the payload says.

    ``parent``: the folder of the store for the run. ``url``: the run in it, "" until it is known.
    ``sent``: bytes of payload that are there. ``complete``: all is there. ``error``: of the
    last round. ``opened``: the writer had not closed the index by then.
    """

    parent: str
    sent: int = 0
    complete: bool = False
    error: str = ""
    url: str = ""
    opened: bool = False

    def covers(self, process: Path) -> bool:
        """Tell whether all of a process folder is in the store, as it is now."""
        return self.complete and self.opened == (not _closed(process))

    def left(self, process: Path) -> int:
        """Return how many bytes of the payload of a process folder are not in the store."""
        return max(0, _length(_spans(process)) - self.sent)


def state_of(process: Path) -> State | None:
    """Return how far the upload of a process folder is; None: none was begun."""
    try:
        with own_file.open_file(process / UPLOAD) as stream:
            return json_of(State, stream.read(1 << 16).decode())
    except (OSError, ValueError, RecursionError, LLMDebugError):
        return None


def note(process: Path, state: State) -> None:
    """Write how far an upload is. A full disk is no reason to stop."""
    new = process / f".{UPLOAD}.new"
    with contextlib.suppress(OSError):
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "w") as file:
            file.write(json.dumps(asdict(state)))
        os.replace(new, process / UPLOAD)


class Upload:
    """Uploads one process folder of a run.

    ``progress(n)`` is called after ``n`` bytes of payload were uploaded.
    """

    def __init__(
        self, process: Path, parent: Place, progress: Callable[[int], object] = lambda n: None
    ) -> None:
        """``parent``: the folder of the store that will hold the run."""
        self.process, self._parent, self._progress = process, parent, progress
        self._there: Place | None = None  # the process folder in the store
        self._parts: list[Span] = []  # those that are there, in order
        self._seen: object = None  # the state of the index that is there
        self._open = False  # whether we wrote the empty log that is there: the index was open
        self.url = ""  # of the run in the store, once it is known
        self.dropped = False  # nothing is to be uploaded any more

    @property
    def sent(self) -> int:
        """Bytes of payload that are in the store."""
        return _length(self._parts)

    def state(self, complete: bool = False, error: str = "") -> State:
        return State(self._parent.url, self.sent, complete, error, self.url, self._open)

    def round(self, ended: bool = False) -> None:
        """Upload what is new. ``ended``: nobody writes any more, so all that there is.

        A recording that has recorded nothing yet is left alone, as it may still be given up; the
        store is only asked whether it answers.

        Raises:
            RemoteError: the store fails. DumpWriteError: no room for a copy of the index.
            CorruptDumpError, OSError: the recording can't be read.
        """
        index, closed = self.process / fmt.INDEX, _closed(self.process)
        if self.dropped:
            return
        now = closed, _stamp(index), _stamp(log_of(index)), ended and _spans(self.process)
        if now == self._seen:
            return
        whole = ended or closed
        with contextlib.nullcontext(index) if closed else _snapshot(index) as copy:
            covered = _covered(copy)
            if covered is None and not ended:
                self._parent.reach()
                self._seen = now
                return
            if whole or covered is None:
                covered = sys.maxsize
            there = self._place()
            self._send(there, covered, whole)
            log = there / log_of(index).name
            if not closed and not self._open:
                log.write(b"")
                self._open = True
            (there / fmt.INDEX).put(copy)
        if closed:
            log.remove()
            self._open = False
        self._seen = now

    def _place(self) -> Place:
        """Return the process folder in the store; the first time, see what is there already."""
        if self._there is None:
            run = _run_in(self._parent, self.process.parent)
            self.url, there = run.url, run / self.process.name
            self._parts = _parts(there, self.process)
            self._there = there
        return self._there

    def _send(self, there: Place, covered: int, whole: bool) -> None:
        """Upload the payload before an offset; ``whole``: then see that all of it is there."""
        for _ in range(_TRIES):
            spans = [(start, min(end, covered)) for start, end in _spans(self.process)]
            for start, end in _gaps(spans, self._parts):
                for at in range(start, end, PART):
                    self._part(there, at, min(at + PART, end))
            if not whole:
                return
            self._parts = _parts(there, self.process)
            if not _gaps(spans, self._parts):
                return
        raise RemoteError(
            f"{there.url}: a part of the payload is gone or has another size; does another upload"
            " write there?"
        )

    def _part(self, there: Place, start: int, end: int) -> None:
        try:
            data = bytes(payload.read(payload.pieces(self.process), start, end - start))
        except (FileNotFoundError, ValueError):
            raise CorruptDumpError(
                f"{self.process}: values are gone that were there before; is it still recorded,"
                " with the option last? Copy it when it has ended"
            ) from None
        (there / name_of(start)).write(data)
        self._parts = sorted([*self._parts, (start, end)])
        self._progress(end - start)


def _spans(process: Path) -> list[Span]:
    """Return where a process folder has payload; nowhere, if it is gone."""
    try:
        return [(piece.start, piece.end) for piece in payload.pieces(process)]
    except FileNotFoundError:
        return []


def _length(spans: list[Span]) -> int:
    return sum(end - start for start, end in spans)


def _gaps(wanted: list[Span], there: list[Span]) -> list[Span]:
    """Return what of some spans is missing. Both are in order."""
    gaps = []
    for low, high in wanted:
        at = low
        for start, end in there:
            if at < min(start, high):
                gaps.append((at, min(start, high)))
            at = max(at, end) if start < high else at
        if at < high:
            gaps.append((at, high))
    return gaps


def _parts(there: Place, process: Path) -> list[Span]:
    """Return the parts of a process folder that are in a store, in order.

    One that begins inside another is removed: another upload has cut the payload in other places.

    Raises RemoteError: there are others, too, and nothing is removed.
    """
    try:
        files = [file for file in payload_files(there) if file.end > file.start]
    except FileNotFoundError:
        return []
    if _gaps([(file.start, file.end) for file in files], _spans(process)):
        raise RemoteError(
            f"{there.url} has values that are not on this machine: the run was changed here since"
            " it was uploaded. Nothing there was changed; copy it to another place"
        )
    parts: list[Span] = []
    for file in files:
        if parts and file.start < parts[-1][1]:
            (there / name_of(file.start)).remove()
        else:
            parts.append((file.start, file.end))
    return parts


def _run_in(parent: Place, run: Path) -> Place:
    """Return the place of a run in a store: its name, or name.2 … if that is another run's.

    Its marker is written if it is not there.
    """
    with own_file.open_file(run / fmt.MARKER) as stream:
        marker = stream.read()
    # every process of a run finds the same place, as the marker has the run's id
    name = str(catalog.read_marker(run).get("name", run.name))
    for number in range(1, _MOST_RUNS):
        place = parent / (name if number == 1 else f"{name}.{number}")
        file = place / fmt.MARKER
        if _holds(file, marker) or (_is_free(file) and file.create(marker)):
            return place
        if _holds(file, marker):  # another process of the run was first
            return place
    raise RemoteError(f"{parent.url} holds {_MOST_RUNS:,} runs named {name}: choose another name")


def _is_free(file: Place) -> bool:
    try:
        file.state()
    except FileNotFoundError:
        return True
    return False


def _holds(file: Place, data: bytes) -> bool:
    try:
        return file.state()[0] == len(data) and file.read(0, len(data)) == data
    except FileNotFoundError:
        return False


def _closed(process: Path) -> bool:
    """Tell whether the writer of a process folder has closed its index."""
    return not os.path.lexists(log_of(process / fmt.INDEX))


def _stamp(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(file)
        return found.st_size, found.st_mtime_ns
    return None


@contextlib.contextmanager
def _snapshot(index: Path) -> Iterator[Path]:
    """Give a copy of an index that is being written, with its log folded in, and no row that waits.

    Raises:
        DumpWriteError: there is no room for it. OSError: it was closed meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="llmdebug-upload-") as folder:
        copy = Path(folder) / index.name
        before = _stamp(index)
        try:
            for file in (index, log_of(index)):
                with own_file.open_file(file) as stream, open(Path(folder) / file.name, "wb") as to:
                    shutil.copyfileobj(stream, to)
            if _stamp(index) != before:
                raise OSError(f"{index} was closed while it was copied")
            with contextlib.closing(sqlite3.connect(copy)) as db:
                db.execute("PRAGMA journal_mode=DELETE")
                with db:
                    waiting.settle_all(db)
        except sqlite3.Error as error:
            raise DumpWriteError(f"can't copy {index} to upload it: {error}") from None
        yield copy


def _covered(index: Path) -> int | None:
    """Return the offset up to which an index covers the payload; None: it has no records yet.

    Frames beyond may still be torn.
    """
    with contextlib.closing(sqlite3.connect(index)) as db:
        if db.execute("SELECT 1 FROM main.records LIMIT 1").fetchone() is None:
            return None
        ((text,),) = db.execute("SELECT value FROM main.meta WHERE key = 'bytes'").fetchall()
        return json_of(int, text)


def follow(
    upload: Upload,
    ended: Callable[[float], bool],
    tell: Callable[[str], object] = lambda text: None,
) -> State:
    """Upload what a process records until it ends, and then the rest; return how far it came.

    ``ended(seconds)`` waits so long, or until the recording has ended, and tells whether it has.
    Errors are noted, and the round is tried again: after the end, until three had no success.
    ``tell(text)`` is called once if a round fails before the end.
    """
    pause, failures, over, told = 0.0, 0, False, False
    while True:
        over = over or ended(pause)
        begun, sent = time.monotonic(), upload.sent
        error = ""
        try:
            upload.round(over)
        except (LLMDebugError, OSError, sqlite3.Error, ValueError) as failed:
            error = " ".join(str(failed).split())
        state = upload.state(over and not error, error)
        note(upload.process, state)
        if error and not over and not told:
            told = True
            tell(
                f"{upload.process.parent.name}: nothing can be uploaded to {state.parent} now:"
                f" {error}. It is recorded on this machine, and the upload is tried again"
            )
        failures = failures + 1 if error and upload.sent == sent else 0
        if state.complete or (over and failures >= _FAILURES):
            return state
        took = time.monotonic() - begun
        pause = min(EVERY * 2**failures, _LONGEST_PAUSE) if error else max(EVERY, _SHARE * took)
        if over and failures:
            time.sleep(_AGAIN * 2.0 ** (failures - 1))


class _Program:
    """The recording process, at the other end of a pipe, and its stderr."""

    def __init__(self, stream: io.FileIO) -> None:
        self._stream, self._ended, self._lock = stream, threading.Event(), threading.Lock()
        self._stderr: int | None = None
        with contextlib.suppress(OSError):  # the program may have none
            self._stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for what packages of stores print
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self._stream.read(1)  # a word, or the end of the process
        self._ended.set()
        with self._lock:  # who reads what the program prints waits until nobody can write more
            if self._stderr is not None:
                os.close(self._stderr)
                self._stderr = None

    def ended(self, seconds: float) -> bool:
        """Wait so long, or until the recording is over; tell whether it is."""
        return self._ended.wait(seconds)

    def tell(self, text: str) -> None:
        """Print a line where the program prints its warnings; notebooks show it below the cell."""
        with self._lock, contextlib.suppress(OSError):
            if self._stderr is not None:
                os.write(self._stderr, f"llmdebug: {text}\n".encode())


def main() -> None:
    """Upload the folder that stdin names to the URL that it names, until stdin says more."""
    stdin = io.FileIO(sys.stdin.fileno(), closefd=False)  # reads no further than the line
    folder, url = json.loads(stdin.readline())
    process, program = Path(folder), _Program(stdin)
    try:
        upload = Upload(process, stores.place(url))
    except LLMDebugError as error:
        note(process, State(without_secrets(url), error=str(error)))
        return
    follow(upload, program.ended, program.tell)


def uploads_of(run: Path) -> dict[Path, State]:
    """Return how far the uploads of a run's processes are; those that were begun."""
    found = {process: state_of(process) for process in catalog.process_folders(run)}
    return {process: state for process, state in found.items() if state is not None}
