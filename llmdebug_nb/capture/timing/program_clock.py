"""From what the profiler saw in a root call to rows: host time of modules and operators, gaps between operators, and kernels.

Times are those of the *program's clock*: it stands while work of ours is under way, which the profiler sees as marks. So what recording costs is
in no duration and in no gap; what is left of it is the call of a hook itself.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmdebug_nb.capture.compat.torch_profiler import Event

OURS = "recording"  # the level of the row that says how long our own work took meanwhile
_GRAPH = re.compile(r"^graph_\d+_")


@dataclass(frozen=True, slots=True)
class Said:
    """What one of our marks means: a ``call`` of a module or operator ``begins`` or ends here; or, where it is a fused kernel's, of ``code``."""

    begins: bool
    call: Any
    code: str | None = None


@dataclass
class Timed:
    """``timings`` and ``launches``: rows as `records.TIMING` and `LAUNCH` have them, without ``id`` and ``root_call``."""

    timings: list[list[Any]] = field(default_factory=list)
    launches: list[list[Any]] = field(default_factory=list)


class Clock:
    """The program's clock, in nanoseconds: it goes while none of the ``stands`` (intervals, may overlap) is under way, and ``shows`` so much at ``base``."""

    def __init__(self, stands: Iterable[tuple[int, int]], base: int, shows: int = 0) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before = [0]  # how long it stood in all earlier ones
        for start, end in sorted(stands):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
                continue
            self._starts.append(start)
            self._ends.append(end)
        for start, end in zip(self._starts, self._ends, strict=True):
            self._before.append(self._before[-1] + end - start)
        self._base = 0
        self._base = self(base) - shows

    def __call__(self, moment: int) -> int:
        at = bisect.bisect_right(self._starts, moment)
        stood = self._before[at]
        if at and moment < self._ends[at - 1]:
            stood -= self._ends[at - 1] - moment
        return moment - stood - self._base

    def stands(self, moment: int) -> bool:
        """Tell whether work of ours is under way."""
        at = bisect.bisect_right(self._starts, moment)
        return bool(at) and moment < self._ends[at - 1]

    @property
    def stood(self) -> int:
        return self._before[-1]


@dataclass
class _Open:
    """An event that encloses what comes next. ``row``: of the operator that it is. ``kernel``: place of its row among the launches."""

    event: Event
    row: int | None = None
    kernel: int | None = None


@dataclass
class Step:
    """What is known of a step so far: ``counts``: how often each operator was called; ``modules``: sequence number of an autograd node -> the
    module that made it; ``end``: when, on the program's clock, its last call was over. ``computes(name)``: an operator is a kernel of the CPU;
    ``named("aten::mm")``: how it is called in a dump.
    """

    computes: Callable[[str], bool]
    named: Callable[[str], str]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    modules: dict[int, str] = field(default_factory=dict)
    end: int = 0


def timed(events: Sequence[Event], said: Mapping[int, Sequence[Said]], step: Step) -> Timed:
    """Make rows of the events (by start) of a root call, or of a backward pass; ``step`` goes on.

    ``said``: what each mark means; where the first mark ends, the program begins.
    """
    marks = [event for event in events if event.kind == "mark"]
    if not marks:
        return Timed()
    clock = Clock(((mark.start, mark.end) for mark in marks), marks[0].end, step.end)
    reading = _Reading(clock, said, step)
    threads: dict[int, list[Event]] = {}
    for event in events:
        if event.kind != "device" and event.start >= marks[0].start:
            threads.setdefault(event.thread, []).append(event)
    first = marks[0].thread
    for thread in sorted(
        threads, key=lambda one: (one != first, one)
    ):  # forward before what its nodes do
        reading.thread(threads[thread], step.end if thread == first else None)
    for event in events:
        if event.kind == "device":
            reading.device(event)
    last = max(mark.end for mark in marks)
    found = reading.result()
    found.timings.append(["", 0, reading.phase, OURS, "", 0, step.end, clock.stood, None])
    step.end = max(step.end, clock(last))
    return found


class _Reading:
    """Goes through the events of each thread in time, and keeps what is open."""

    def __init__(self, clock: Clock, said: Mapping[int, Sequence[Said]], step: Step) -> None:
        self.clock, self.said, self.step = clock, said, step
        self.rows: list[list[Any]] = []
        self.launches: list[tuple[int, list[Any]]] = []  # with the place of the operator's row
        self.dropped: set[int] = set()
        self.operators: dict[
            int, int
        ] = {}  # id of an event -> the row of the operator that it is in
        self.given: dict[int, str | None] = {}  # id of an event -> what it was given
        self.calls: list[tuple[Said, int]] = []
        self.open: list[_Open] = []
        self.number = -1  # of the thread
        self.last: int | None = None  # when its last operator was over

    def thread(self, events: Sequence[Event], base: int | None) -> None:
        self.open, self.calls, self.last = [], [], base
        self.number += 1
        for event in events:
            while self.open and self.open[-1].event.end <= event.start:
                self.open.pop()
            if event.kind == "mark":
                for said in self.said.get(event.mark, ()):
                    self._told(said, self.clock(event.start))
            elif event.kind in ("node", "frame") or not ("::" in event.name or self._launch):
                self.open.append(_Open(event))
            elif not self.clock.stands(event.start):
                self.open.append(self._operator(event))

    # -- calls ----------------------------------------------------------------------------------------

    def _told(self, said: Said, now: int) -> None:
        if said.begins:
            self.calls.append((said, now))
            return
        for at in range(len(self.calls) - 1, -1, -1):
            begun, start = self.calls[at]
            if begun.call is said.call:
                del self.calls[at:]  # those inside it that have no end raised
                if begun.code is None and said.call.level == "module":
                    self._row(
                        said.call.path,
                        said.call.number,
                        "module",
                        said.call.op,
                        start,
                        now - start,
                        None,
                    )
                return

    def _row(
        self,
        path: str,
        number: int,
        level: str,
        op: str,
        start: int,
        duration: int,
        gap: int | None,
    ) -> int:
        self.rows.append([path, number, self.phase, level, op, self.number, start, duration, gap])
        return len(self.rows) - 1

    @property
    def phase(self) -> str:
        return "backward" if any(_of_autograd(one.event) for one in self.open) else "forward"

    @property
    def _module(self) -> str:
        """The module that runs; in a backward pass, that which made the node."""
        if self.calls:
            return self.calls[-1][0].call.module or ""
        nodes = (one.event.sequence for one in reversed(self.open) if _of_autograd(one.event))
        return next(
            (self.step.modules[number] for number in nodes if number in self.step.modules), ""
        )

    @property
    def _launch(self) -> Said | None:
        """The fused kernel that runs."""
        return next((said for said, _ in reversed(self.calls) if said.code is not None), None)

    # -- operators ------------------------------------------------------------------------------------

    def _operator(self, event: Event) -> _Open:
        around = next((one.row for one in reversed(self.open) if one.row is not None), None)
        start, end = self.clock(event.start), self.clock(event.end)
        if event.sequence >= 0:
            self.step.modules[event.sequence] = self._module
        if around is None:
            around = self._outermost(event, start, end)
        self.operators[event.id] = around
        self.given[event.id] = _json(event)
        opened = _Open(event, around)
        if self.step.computes(event.name) or "::" not in event.name:
            self._kernel(opened, around, start, end)
        return opened

    def _outermost(self, event: Event, start: int, end: int) -> int:
        """Make the row of an operator that is in no other; return its place."""
        op = self.step.named(event.name) if "::" in event.name else f"Kernel.{_bare(event.name)}"
        path = f"{self._module}/{op}"
        number = self.step.counts[self.phase, path]
        self.step.counts[self.phase, path] += 1
        gap = None if self.last is None else max(0, start - self.last)
        self.last = end
        return self._row(path, number, "op", op, start, end - start, gap)

    def _kernel(self, opened: _Open, row: int, start: int, end: int) -> None:
        """A kernel that others are part of is one; an operator that calls itself, as a mode has it do, is the innermost."""
        name, launch = opened.event.name, self._launch
        outer = next((one for one in reversed(self.open) if one.kernel is not None), None)
        if outer is not None and outer.event.name != name:
            return
        if outer is not None and outer.kernel is not None:
            self.dropped.add(outer.kernel)
        opened.kernel = len(self.launches)
        code = launch.code if launch is not None else None
        self.launches.append(
            (
                row,
                [
                    *self._site(row),
                    _bare(name),
                    code,
                    "cpu",
                    0,
                    start,
                    end - start,
                    _json(opened.event),
                    None,
                ],
            )
        )

    def _site(self, row: int) -> tuple[str, int, str, str]:
        """Return path, number, phase and name of the operator that launches: the recorded one, if there is one, else the outermost."""
        for said, _ in reversed(self.calls):
            if said.code is None and said.call.level != "module":
                return said.call.path, said.call.number, said.call.phase, said.call.op
        path, number, phase, _, op = self.rows[row][:5]
        return path, number, phase, op

    def device(self, event: Event) -> None:
        """A kernel on a device: it belongs to the operator that launched it."""
        row = self.operators.get(event.launched_by)
        if row is None:
            return
        path, number, phase, _, op = self.rows[row][:5]
        self.dropped.update(
            at for at, (of, launch) in enumerate(self.launches) if of == row and launch[6] == "cpu"
        )
        when = self.clock(event.start), event.end - event.start
        given = self.given.get(event.launched_by)
        self.launches.append(
            (
                row,
                [
                    path,
                    number,
                    phase,
                    op,
                    event.name,
                    None,
                    event.device,
                    event.stream,
                    *when,
                    given,
                    None,
                ],
            )
        )

    def result(self) -> Timed:
        """Return the rows in order of their start."""
        launches = [row for at, (_, row) in enumerate(self.launches) if at not in self.dropped]
        return Timed(
            sorted(self.rows, key=lambda row: (row[6], row[3] != "module", -row[7])),
            sorted(launches, key=lambda row: row[8]),
        )


def _of_autograd(event: Event) -> bool:
    return event.kind == "node" or event.name.startswith("autograd::")


def _json(event: Event) -> str | None:
    return json.dumps(event.inputs) if event.inputs else None


def _bare(name: str) -> str:
    """Return the name of a kernel without the number of its graph."""
    return _GRAPH.sub("", name, count=1)
