"""Times of the program while it is recorded: PyTorch's profiler runs in the steps that are asked for.

All work of ours is under a range of its own, by which it is told from the program's (`timing.py`), and which says which call begins or
ends there. What the profiler saw becomes rows when the root call is over, or the backward pass that follows it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llmdebug_nb.capture.compat import torch_profiler
from llmdebug_nb.capture.operators.kinds import METADATA, with_prefix
from llmdebug_nb.capture.timing.program_clock import Said, Step, timed
from llmdebug_nb.core.options import DumpOptions

_NESTED = "the program uses PyTorch's profiler itself: no times were taken meanwhile"
_OPERATORS = "operators were recorded while times were taken: host times and gaps are too long by what a mode costs, kernels are not"
_PARALLEL = "another thread ran a step meanwhile: no times were taken of that"


class Sink(Protocol):
    def table(self, name: str, rows: Any) -> None: ...


class Profile:
    """The times of one session. ``on``: the profiler runs now."""

    def __init__(self, options: DumpOptions, sink: Sink, notes: list[str]) -> None:
        self.on = False
        self._kernels = "kernel" in options.profile
        self._host = "host" in options.profile
        self._sink, self._notes = sink, notes
        self._profiler = torch_profiler.Profiler(shapes="op" in options.profile)
        self._here = threading.local()
        self._numbers = itertools.count()
        self._said: dict[int, list[Said]] = {}
        self._step = Step(_computes, _named)
        self._within: Any = None
        self._root_call: int | None = None  # whose backward pass is timed
        self._owner = 0
        self._lock = threading.RLock()

    @classmethod
    def of(cls, options: DumpOptions, sink: Sink, notes: list[str]) -> Profile | None:
        """Return None where no times are asked for, or none can be taken."""
        if not {"kernel", "host"} & set(options.profile):
            return None
        why = torch_profiler.trouble()
        if why is not None:
            notes.append(f"no times were taken: {why}")
            return None
        if "host" in options.profile and options.operators:
            notes.append(_OPERATORS)
        return cls(options, sink, notes)

    # -- our own work ---------------------------------------------------------------------------------

    def ours(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do work of ours, which is none of the program's."""
        outer = getattr(self._here, "number", None)
        number = self._here.number = next(self._numbers)
        try:
            if self.on:
                with torch_profiler.range_(number):
                    return work(*args)
            result = work(*args)
            if self.on and self._owner == threading.get_ident():
                with torch_profiler.range_(number):
                    pass  # it has just begun: where this mark is, the program goes on
            return result
        finally:
            self._here.number = outer

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What runs in here is none of the program's work either: it is compiled, say."""
        with torch_profiler.range_(next(self._numbers)) if self.on else contextlib.nullcontext():
            yield

    def begins(self, call: Any, code: str | None = None) -> None:
        """A call begins here, of a module or operator; or, with its ``code``, of a fused kernel."""
        self._says(Said(True, call, code))

    def ends(self, call: Any) -> None:
        self._says(Said(False, call))

    def _says(self, said: Said) -> None:
        number = getattr(self._here, "number", None)
        if self.on and number is not None:
            self._said.setdefault(number, []).append(said)

    # -- steps ----------------------------------------------------------------------------------------

    def root_begins(self, root_call: int, within: Any, on: bool) -> None:
        """A root call begins. ``within``: what calls are numbered within. ``on``: it is recorded."""
        with self._lock:
            if self.on:  # of another thread, or left without an end by an interrupt
                if self._owner != threading.get_ident():
                    self._note(_PARALLEL)
                self.ends_here()
                return
            if within != self._within:
                self._step = Step(_computes, _named)
            self._within, self._root_call = within, root_call if on else None
            self._begin()

    def backward_begins(self) -> None:
        """A backward pass begins: that of the last root call."""
        with self._lock:
            if not self.on:
                self._begin()

    def _begin(self) -> None:
        """Start the profiler, inside of no range of ours: what is open when it stops must never be closed under the next one."""
        if self._root_call is None:
            return
        if torch_profiler.enabled():
            self._note(_NESTED)
            return
        self._owner = threading.get_ident()
        self._profiler.start(self._gives_way)
        self.on = True

    def ends_here(self) -> None:
        """The root call or backward pass is over: make rows of what was seen."""
        with self._lock:
            if not self.on or self._owner != threading.get_ident():
                return
            self.on = False
            events, said, self._said = self._profiler.stop(), self._said, {}
            found = timed(events, said, self._step)
            if self._host:
                self._sink.table(
                    "timings", [[None, self._root_call, *row] for row in found.timings]
                )
            if self._kernels:
                self._sink.table(
                    "launches", [[None, self._root_call, *row] for row in found.launches]
                )

    def _note(self, said: str) -> None:
        if said not in self._notes:
            self._notes.append(said)

    def _gives_way(self) -> None:
        """The program is about to use the profiler itself."""
        self._note(_NESTED)
        self.on, self._said = False, {}


def _computes(event: str) -> bool:
    return _named(event) not in METADATA and torch_profiler.computes(event)


def _named(event: str) -> str:
    """Return ``Aten.mm`` for ``aten::mm``, as operators are called in a dump."""
    return with_prefix(event.replace("::", "."))
