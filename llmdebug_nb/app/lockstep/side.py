"""One of two programs in lockstep: its run, whose values are held, or made again when asked for."""

from __future__ import annotations

import threading
import weakref
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmdebug_nb.app.live_models import remember_roots, remember_run
from llmdebug_nb.app.lockstep.events import (
    End,
    Event,
    Play,
    Playing,
    Program,
    Puts,
    Value,
    record_of,
)
from llmdebug_nb.app.lockstep.window import Held, Place, Window
from llmdebug_nb.app.scratch import Scratch
from llmdebug_nb.capture.versions import versions
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.errors import CaptureError, TensorLookupError
from llmdebug_nb.core.kernels.raw import from_bytes
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node, Record
from llmdebug_nb.store import reader
from llmdebug_nb.store.format import payload_dtype
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.shorten import shorten
from llmdebug_nb.store.writer import Writer, create_run

if TYPE_CHECKING:
    import torch

CallAt = tuple[int, int, str, int]  # generation, step, path, number
_FINGERPRINT = AT["fingerprint"]


class Ended(NamedTuple):
    """A recorded call that has ended, with its inputs and outputs that have values."""

    end: End
    records: list[Record]

    @property
    def at(self) -> CallAt:
        end = self.end
        return end.generation, end.step, end.path, end.number


class _Rows(Writer):
    """Writes the rows of a run. ``known``: the modules that it has by now."""

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self.known: list[Node] = []

    def nodes(self, nodes: Iterable[Node], start: int) -> None:
        added = [*nodes]
        self.known += added
        super().nodes(added, start)


class Side:
    """``number``: 0 for golden, 1 for mine. ``ran``: how often the program ran.

    ``whole``: bytes of all its values.
    ``grafts``: what mine went on with, by call; it does so whenever it runs again.
    ``settled``: the comparison is over, so the program does not stay halted between two values.
    ``last``: the id of the last tensor that belongs to the run, if it was stopped there.
    """

    def __init__(
        self, number: int, name: str, program: Program, options: DumpOptions, window: Window
    ) -> None:
        self.number, self.name, self.program, self.window = number, name, program, window
        self.ran = self.whole = 0
        self._unsteady: set[int] = set()  # offsets of values that were other ones
        # of each value that was made the first time, in order: its record, and its place
        self._ids, self._offsets = array("q"), array("q")
        self.settled = False
        self.last: int | None = None
        self.grafts: dict[CallAt, Puts] = {}
        self._lock = threading.RLock()
        self._playing: Playing | None = None
        self._position = -1  # the last record whose values this run of the program made
        self._open: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
        self._scratch = Scratch("lockstep")
        details = {"options": options.as_json(), "environment": versions()}
        try:
            self.folder: Path = create_run(self._scratch.path, name, details)
            self._rows = _Rows(self.folder)
        except BaseException:
            self.remove()
            raise

    # -- the first time -------------------------------------------------------------------------

    def begin(self, waits: bool, strictly: bool) -> None:
        """Begin to run the program; its rows are written. ``waits``: see `Play`.

        ``strictly``: it computes nothing beyond the call that was asked for.
        """
        ahead = 0 if strictly else self.window.ahead
        self._playing, self.ran = self.program.play(Play(ahead, waits=waits), self._rows), 1

    def ended(self) -> Ended | None:
        """Run on to the end of the next recorded call; return it, None at the end of the program.

        Raises CaptureError: the program failed.
        """
        while (event := self._next()) is not None:
            if isinstance(event, Value):
                if event.data is not None:
                    self._ids.append(event.id)
                    self._offsets.append(event.offset)
                    self.whole = event.end
                    self._hold(event, event.offset)
                row = event.row
                if row[AT["phase"]] == "forward" and row[AT["role"]] in ("input", "output"):
                    self._open[row[AT["root_call"]], row[AT["path"]], row[AT["call"]]].append(row)
                continue
            rows = self._open.pop((event.root_call, event.path, event.number), [])
            records = [record_of(row, event.generation, event.step) for row in rows]
            if not event.path:
                self._open.clear()
            return Ended(event, records)
        return None

    def go_on(self, puts: Puts, at: CallAt) -> None:
        """Let the program go on after a call that waits. ``puts``: with these outputs."""
        if puts:
            self.grafts[at] = puts
        if self._playing is not None:
            self._playing.reply(puts)

    def rest(self) -> None:
        """Stop the program where it is halted: no hook is on, and no thread is left."""
        with self._lock:
            playing, self._playing = self._playing, None
            if playing is not None:
                playing.stop()

    def _next(self) -> Event | None:
        """Return the next event of the program."""
        if self._playing is None:
            return None
        event = self._playing.next()
        if event is None:
            self._playing = None
        return event

    # -- values ---------------------------------------------------------------------------------

    @property
    def unsteady(self) -> int:
        """How many values were other ones when the program ran again."""
        return len(self._unsteady)

    def peek(self, record: Record) -> torch.Tensor:
        """Return the values of a record if they are held. Raises TensorLookupError."""
        held = self._held(record)
        if held is None:
            raise TensorLookupError(f"the values of {record.site} are not held any more")
        return self._tensor(record, held)

    def load(self, record: Record) -> torch.Tensor:
        """Return the values of a record; run the program again if they are not held.

        Raises TensorLookupError: it does not give them a second time.
        """
        with self._lock:
            held = self._held(record)
            if held is None:
                try:
                    held = self._made_again(record)
                except CaptureError as error:
                    raise TensorLookupError(f"{record.site}: {error}") from None
                finally:
                    if self.settled:
                        self.rest()
            return self._tensor(record, held)

    def _held(self, record: Record) -> Held | None:
        offset, length = _place(record)
        if not length:
            return Held(b"", record.summary.fingerprint)
        return self.window.get(Place(self.number, offset))

    def _hold(self, event: Value, offset: int) -> Held:
        held = Held(event.data or b"", event.row[_FINGERPRINT])
        ahead = 0 if self._playing is None else self._playing.ahead
        self.window.hold(Place(self.number, offset), held, ahead)
        return held

    def _made_again(self, record: Record) -> Held:
        """Run the program on, or once more, up to the record that has these values first."""
        offset, _ = _place(record)
        at = bisect_left(self._offsets, offset)
        wanted = self._ids[at]
        if self._playing is None or self._position >= wanted:
            self._run_again(record, offset)
        while (event := self._next()) is not None:
            if isinstance(event, End):
                self._graft_again(event)
            elif event.data is not None:
                self._position = event.id
                known = bisect_left(self._ids, event.id)
                if known == len(self._ids) or self._ids[known] != event.id:
                    continue  # the first time it was the same as an earlier one, by chance
                held = self._hold(event, self._offsets[known])
                if event.id == wanted:
                    return held
                if event.id > wanted:
                    break
        self.rest()
        raise self._is_unsteady(record)

    def _run_again(self, record: Record, offset: int) -> None:
        """Begin to run the program again; what it makes shortly before a place is held, too."""
        self.rest()
        if self.program.why_once:
            raise TensorLookupError(
                f"{record.site}: {self.program.why_once}, so its values can't be made again;"
                " give a program that leaves them alone, or a larger window"
            )
        first = bisect_left(self._offsets, offset - self.window.limit // 2)
        how = Play(self.window.ahead, self._ids[first], waits=bool(self.grafts))
        self._playing = self.program.play(how, None)
        self.ran, self._position = self.ran + 1, -1

    def _graft_again(self, end: End) -> None:
        if end.waits and self._playing is not None:
            at = end.generation, end.step, end.path, end.number
            self._playing.reply(self.grafts.get(at, {}))

    def _is_unsteady(self, record: Record) -> TensorLookupError:
        self._unsteady.add(_place(record)[0])
        return TensorLookupError(
            f"{record.site}: {self.name} does not repeat itself: run again, it gives other values"
        )

    def _tensor(self, record: Record, held: Held) -> torch.Tensor:
        """Raises TensorLookupError: the program gave other values the first time."""
        dtype = payload_dtype(record.kept, record.summary.dtype)
        known = record.summary.fingerprint
        try:
            if known and held.fingerprint and known != held.fingerprint:
                raise ValueError
            return from_bytes(held.data, dtype, record.payload_shape)
        except ValueError:
            raise self._is_unsteady(record) from None

    # -- the run --------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The modules that are known by now."""
        return self._rows.known

    def opened(self) -> Run:
        """Return the run; its folder is deleted when nobody holds it any more. Call it once."""
        if self.last is not None:
            shorten(self.folder, self.last)
        run = reader.with_values(self.folder, self.load)
        weakref.finalize(run, self.remove)
        return run

    def remove(self) -> None:
        """Remove the run's folder."""
        self._scratch.remove()

    def remember(self, roots: list[tuple[str, torch.nn.Module]]) -> None:
        """Remember that this process recorded the run. ``roots``: its models, by path."""
        remember_run(self.folder)
        remember_roots(self.folder, roots)


def _place(record: Record) -> tuple[int, int]:
    """Return offset and length of the values of a record."""
    _, offset, length = map(int, str(record.payload).split(","))
    return offset, length
