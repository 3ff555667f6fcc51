"""The rows of a profile: host times of modules and operators, gaps between operators, and kernels.

All times are on the program's clock. It is stopped while our own work runs, which the profiler sees
as marks, so recording adds nothing to a duration or gap except the call of a hook itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat.torch_profiler import Event
from llmdebug_nb.capture.timing.program_clock import Clock
from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.paths import bounded

OURS = "recording"  # the level of the row with the total time of our own work
_GRAPH = re.compile(r"^graph_\d+_")


@dataclass(frozen=True, slots=True)
class ProfilerMark:
    """What a mark in the profile means: ``call`` begins or ends there.

    ``code``: the kernel's name, if the call is that of a fused kernel.
    """

    begins: bool
    call: OpenCall
    code: str | None = None


@dataclass
class ProfileRows:
    """Rows in the order of `columns.TIMINGS` and `LAUNCHES`, without ``id`` and ``root_call``."""

    timings: list[Row] = field(default_factory=list)
    launches: list[Row] = field(default_factory=list)


@dataclass
class _Enclosing:
    """An event that encloses the following ones.

    ``row``: index of its operator's row. ``kernel``: index of its row among the launches.
    """

    event: Event
    row: int | None = None
    kernel: int | None = None


@dataclass
class TimedStep:
    """The state of a step across its root calls and backward passes.

    ``computes(name)``: whether an operator is a CPU kernel itself.
    ``named("aten::mm")``: the operator's name in a dump.
    ``counts``: number of calls of each operator so far, by phase and path.
    ``modules``: sequence number of an autograd node -> path of the module that created it.
    ``end``: end of the last call, on the program's clock.
    """

    computes: Callable[[str], bool]
    named: Callable[[str], str]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    modules: dict[int, str] = field(default_factory=dict)
    end: int = 0


def profile_rows(
    events: Sequence[Event], marks: Mapping[int, Sequence[ProfilerMark]], step: TimedStep
) -> ProfileRows:
    """Turn the events of one root call or backward pass into rows, and update ``step``.

    ``events``: ordered by start. ``marks``: meaning of each mark, by its number. The program's
    clock starts at the end of the first mark.
    """
    pauses = [event for event in events if event.kind == "mark"]
    if not pauses:
        return ProfileRows()
    clock = Clock(((pause.start, pause.end) for pause in pauses), pauses[0].end, step.end)
    reader = _EventReader(clock, marks, step)
    threads: dict[int, list[Event]] = {}
    for event in events:
        if event.kind != "device" and event.start >= pauses[0].start:
            threads.setdefault(event.thread, []).append(event)
    first = pauses[0].thread  # the forward pass comes before the backward pass of its nodes
    for thread in sorted(threads, key=lambda number: (number != first, number)):
        reader.read_thread(threads[thread], step.end if thread == first else None)
    for event in events:
        if event.kind == "device":
            reader.read_device_kernel(event)
    rows = reader.rows()
    ours = ["", 0, reader.phase, OURS, "", 0, step.end, clock.total_pause, None]
    rows.timings.append(ours)
    step.end = max(step.end, clock(max(pause.end for pause in pauses)))
    return rows


class _EventReader:
    """Reads the events of each thread in order of time and tracks the open ones."""

    def __init__(
        self, clock: Clock, marks: Mapping[int, Sequence[ProfilerMark]], step: TimedStep
    ) -> None:
        self._clock, self._marks, self._step = clock, marks, step
        self._timings: list[Row] = []
        self._launches: list[tuple[int, Row]] = []  # each with the index of its operator's row
        self._dropped: set[int] = set()  # indices of launches
        self._row_of: dict[int, int] = {}  # id of an event -> index of its operator's row
        self._inputs: dict[int, str | None] = {}  # id of an event -> its inputs, as JSON
        self._calls: list[tuple[ProfilerMark, int]] = []  # open calls, each with its start
        self._open: list[_Enclosing] = []
        self._thread = -1
        self._previous_end: int | None = None  # of the thread's last operator

    def read_thread(self, events: Sequence[Event], base: int | None) -> None:
        """Read the events of one thread. ``base``: the end of the step so far."""
        self._open, self._calls, self._previous_end = [], [], base
        self._thread += 1
        for event in events:
            while self._open and self._open[-1].event.end <= event.start:
                self._open.pop()
            if event.kind == "mark":
                for mark in self._marks.get(event.mark, ()):
                    self._read_mark(mark, self._clock(event.start))
            elif event.kind in ("node", "frame") or not ("::" in event.name or self._fused_kernel):
                self._open.append(_Enclosing(event))
            elif not self._clock.is_paused(event.start):
                self._open.append(self._read_operator(event))

    def _read_mark(self, mark: ProfilerMark, now: int) -> None:
        if mark.begins:
            self._calls.append((mark, now))
            return
        call = mark.call
        for index in range(len(self._calls) - 1, -1, -1):
            begun, start = self._calls[index]
            if begun.call is call:
                del self._calls[index:]  # calls inside that have no end raised an error
                if begun.code is None and call.level == "module":
                    row = (call.path, call.number, "module", call.op, start, now - start)
                    self._add_timing(*row, gap=None)
                return

    def _add_timing(
        self, path: str, number: int, level: str, op: str, start: int, duration: int,
        gap: int | None,
    ) -> int:  # fmt: skip
        """Add a row and return its index."""
        row = [path, number, self.phase, level, op, self._thread, start, duration, gap]
        self._timings.append(row)
        return len(self._timings) - 1

    @property
    def phase(self) -> str:
        return "backward" if any(_is_autograd(one.event) for one in self._open) else "forward"

    @property
    def _module(self) -> str:
        """The running module; in a backward pass, the module that created the autograd node."""
        if self._calls:
            return self._calls[-1][0].call.module or ""
        modules = self._step.modules
        nodes = (one.event.sequence for one in reversed(self._open) if _is_autograd(one.event))
        return next((modules[number] for number in nodes if number in modules), "")

    @property
    def _fused_kernel(self) -> ProfilerMark | None:
        """The fused kernel that runs."""
        return next((mark for mark, _ in reversed(self._calls) if mark.code is not None), None)

    # -- operators ------------------------------------------------------------------------------

    def _read_operator(self, event: Event) -> _Enclosing:
        row = next((one.row for one in reversed(self._open) if one.row is not None), None)
        start, end = self._clock(event.start), self._clock(event.end)
        if event.sequence >= 0:
            self._step.modules[event.sequence] = self._module
        if row is None:
            row = self._add_operator(event, start, end)
        self._row_of[event.id] = row
        self._inputs[event.id] = _inputs_json(event)
        enclosing = _Enclosing(event, row)
        if self._step.computes(event.name) or "::" not in event.name:
            self._add_cpu_kernel(enclosing, row, start, end)
        return enclosing

    def _add_operator(self, event: Event, start: int, end: int) -> int:
        """Add the row of an outermost operator and return its index."""
        is_operator = "::" in event.name
        op = self._step.named(event.name) if is_operator else f"Kernel.{_kernel_name(event.name)}"
        path, counts = bounded(f"{self._module}/{op}"), self._step.counts
        number = counts[self.phase, path]
        counts[self.phase, path] += 1
        gap = None if self._previous_end is None else max(0, start - self._previous_end)
        self._previous_end = end
        return self._add_timing(path, number, "op", op, start, end - start, gap)

    def _add_cpu_kernel(self, enclosing: _Enclosing, row: int, start: int, end: int) -> None:
        """Add a kernel that no other kernel encloses.

        An operator that calls itself, as it does under a mode, counts once: the innermost call.
        """
        event, fused = enclosing.event, self._fused_kernel
        outer = next((one for one in reversed(self._open) if one.kernel is not None), None)
        if outer is not None and outer.event.name != event.name:
            return
        if outer is not None and outer.kernel is not None:
            self._dropped.add(outer.kernel)
        enclosing.kernel = len(self._launches)
        code = fused.code if fused is not None else None
        where = [*self._site(row), _kernel_name(event.name), code, "cpu", 0]
        launch = [*where, start, end - start, _inputs_json(event), None]
        self._launches.append((row, launch))

    def _site(self, row: int) -> tuple[str, int, str, str]:
        """Return path, number, phase and name of the operator that launches a kernel.

        This is the innermost recorded operator, or else the outermost operator.
        """
        for mark, _ in reversed(self._calls):
            call = mark.call
            if mark.code is None and call.level != "module":
                return call.path, call.number, call.phase, call.op
        path, number, phase, _, op = self._timings[row][:5]
        return path, number, phase, op

    def read_device_kernel(self, event: Event) -> None:
        """Add a kernel on a device, in place of the CPU kernels of its operator."""
        row = self._row_of.get(event.launched_by)
        if row is None:
            return
        path, number, phase, _, op = self._timings[row][:5]
        on_cpu = (
            index
            for index, (owner, launch) in enumerate(self._launches)
            if owner == row and launch[6] == "cpu"
        )
        self._dropped.update(on_cpu)
        start, duration = self._clock(event.start), event.end - event.start
        where = [path, number, phase, op, event.name, None, event.device, event.stream]
        launch = [*where, start, duration, self._inputs.get(event.launched_by), None]
        self._launches.append((row, launch))

    def rows(self) -> ProfileRows:
        """Return the rows in order of their start."""
        kept = [row for at, (_, row) in enumerate(self._launches) if at not in self._dropped]
        return ProfileRows(
            sorted(self._timings, key=lambda row: (row[6], row[3] != "module", -row[7])),
            sorted(kept, key=lambda row: row[8]),
        )


def _is_autograd(event: Event) -> bool:
    return event.kind == "node" or event.name.startswith("autograd::")


def _inputs_json(event: Event) -> str | None:
    return json.dumps(event.inputs) if event.inputs else None


def _kernel_name(name: str) -> str:
    """Return the name of a kernel without the number of its graph."""
    return _GRAPH.sub("", name, count=1)
