"""Times of the recorded program: PyTorch's profiler runs during the requested steps.

All of our own work runs inside numbered ranges. They keep it apart from the program's work
(`program_clock.py`) and mark where a call begins or ends. The events become rows at the end of a
root call or backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import torch_profiler
from llmdebug_nb.capture.operators.kinds import METADATA, with_prefix
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.capture.timing.profile_rows import ProfilerMark, TimedStep, profile_rows
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.options import DumpOptions

_NESTED = "the program uses PyTorch's profiler itself; no times were taken meanwhile"
_OPERATORS = (
    "operators were recorded along with times: host times and gaps include the cost of the "
    "dispatch mode; kernel times do not"
)
_PARALLEL = "another thread ran a step at the same time; that step has no times"

Result = TypeVar("Result")


class Profile:
    """The times of one session. ``on``: the profiler is running."""

    def __init__(self, options: DumpOptions, sink: Sink, notes: list[str]) -> None:
        self.on = False
        self._kernels = "kernel" in options.profile
        self._host = "host" in options.profile
        self._sink, self._notes = sink, notes
        self._profiler = torch_profiler.Profiler(shapes="op" in options.profile)
        self._here = threading.local()
        self._numbers = itertools.count()
        self._marks: dict[int, list[ProfilerMark]] = {}
        self._step = TimedStep(_computes, _name_in_dump)
        self._within: tuple[object, ...] | None = None
        self._root_call: int | None = None  # the root call whose backward pass is timed
        self._owner = 0  # the thread that the profiler runs in
        self._lock = threading.RLock()

    @classmethod
    def of(cls, options: DumpOptions, sink: Sink, notes: list[str]) -> Profile | None:
        """Return None if no times are requested or none can be taken."""
        if not {"kernel", "host"} & set(options.profile):
            return None
        why = torch_profiler.trouble()
        if why is not None:
            notes.append(f"no times were taken: {why}")
            return None
        if "host" in options.profile and options.operators:
            notes.append(_OPERATORS)
        return cls(options, sink, notes)

    # -- our own work ---------------------------------------------------------------------------

    @interrupts.held
    def ours(self, work: Callable[..., Result], *args: object) -> Result:
        """Call ``work`` inside a range of our own, so its time is not counted."""
        outer = getattr(self._here, "number", None)
        number = self._here.number = next(self._numbers)
        try:
            if self.on:
                with torch_profiler.range_(number):
                    return work(*args)
            result = work(*args)
            if self.on and self._owner == threading.get_ident():
                with torch_profiler.range_(number):
                    pass  # the profiler has just started: the program continues at this mark
            return result
        finally:
            self._here.number = outer

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block, such as a compilation, from the program's time."""
        with torch_profiler.range_(next(self._numbers)) if self.on else contextlib.nullcontext():
            yield

    def begins(self, call: OpenCall, code: str | None = None) -> None:
        """Mark the beginning of a call. ``code``: the kernel's name, if it is a fused kernel."""
        self._mark(ProfilerMark(True, call, code))

    def ends(self, call: OpenCall) -> None:
        """Mark the end of a call."""
        self._mark(ProfilerMark(False, call))

    def _mark(self, mark: ProfilerMark) -> None:
        number = getattr(self._here, "number", None)
        if self.on and number is not None:
            self._marks.setdefault(number, []).append(mark)

    # -- steps ----------------------------------------------------------------------------------

    def root_begins(self, root_call: int, within: tuple[object, ...], on: bool) -> None:
        """Begin a root call.

        ``within``: the root, generation and step that call numbers count in. ``on``: the root call
        is recorded.
        """
        with self._lock:
            if self.on:  # in another thread, or an interrupt left it without an end
                if self._owner != threading.get_ident():
                    self._note(_PARALLEL)
                self.ends_here()
                return
            if within != self._within:
                self._step = TimedStep(_computes, _name_in_dump)
            self._within, self._root_call = within, root_call if on else None
            self._begin()

    def backward_begins(self) -> None:
        """Begin the backward pass of the last root call."""
        with self._lock:
            if not self.on:
                self._begin()

    def _begin(self) -> None:
        """Start the profiler, outside of our ranges.

        A range that is open when a profiler stops must never be closed under the next one.
        """
        if self._root_call is None:
            return
        if torch_profiler.enabled():
            self._note(_NESTED)
            return
        self._owner = threading.get_ident()
        self._profiler.start(self._give_way)
        self.on = True

    def ends_here(self) -> None:
        """End the root call or backward pass and write its rows."""
        with self._lock:
            if not self.on or self._owner != threading.get_ident():
                return
            self.on = False
            events, marks, self._marks = self._profiler.stop(), self._marks, {}
            rows = profile_rows(events, marks, self._step)
            if self._host:
                self._write("timings", rows.timings)
            if self._kernels:
                self._write("launches", rows.launches)

    def _write(self, table: str, rows: Iterable[Row]) -> None:
        self._sink.table(table, [[None, self._root_call, *row] for row in rows])

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _give_way(self) -> None:
        """Stop, because the program is about to start a profiler itself."""
        self._note(_NESTED)
        self.on, self._marks = False, {}


def _computes(event: str) -> bool:
    return _name_in_dump(event) not in METADATA and torch_profiler.computes(event)


def _name_in_dump(event: str) -> str:
    """Return ``Aten.mm`` for ``aten::mm``."""
    return with_prefix(event.replace("::", "."))
