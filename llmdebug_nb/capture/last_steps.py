"""The option ``last``: only the last steps of a recording are kept, and those before an alarm.

The ring is on the disk, so a program that is killed leaves its last steps, too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from llmdebug_nb.capture.alarms import Alarms
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.moments import Alarm, Signal
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import RootCall


class Ring:
    """The steps that may still be dropped, and what keeps them.

    ``size``: how many are kept. ``steps``: how many there were. ``running``: index of the root call
    under way, by thread: its step stays meanwhile, as another thread may outrun it.
    """

    def __init__(
        self, size: int, alarms: Alarms, recorders: Sequence[Recorder], guarded: Guarded
    ) -> None:
        self.alarms, self._guarded = alarms, guarded
        self.size, self.steps = size, 0
        self.running: dict[int, int] = {}
        self._recorders = recorders
        self._waiting: deque[list[RootCall]] = deque()
        self._raised: list[Alarm] = []
        self._kept = 0
        self._unplaced: list[RootCall] = []  # after the last one with rows
        self._with_rows: set[int] = set()  # calls, by index, since the last turn
        self._taken = -1  # index of the last call here
        self._latest: tuple[int, int] | None = None  # generation and step of the last recorded call
        for recorder in recorders:
            recorder.watch = self._look

    def _look(self, rows: list[Row]) -> None:
        self.alarms.look(rows)
        self._with_rows.update(row[AT["root_call"]] for row in rows)

    def turn(self, calls: Sequence[RootCall]) -> None:
        """Take note that root calls were committed.

        Calls of which nothing was recorded belong to the next one that has rows.
        """
        fresh = [call for call in calls if call.index > self._taken]  # others were renumbered
        self._taken = max((call.index for call in fresh), default=self._taken)
        group: list[RootCall] = []
        for call in (*self._unplaced, *fresh):
            group.append(call)
            if call.index in self._with_rows:
                self._add(group)
                group = []
        self._unplaced = group
        self._with_rows.clear()
        self._judge()
        dropped = self._dropped()
        for recorder in self._recorders:
            oldest = self._waiting[0][-1].index if self._waiting else 0
            recorder.forget([call.index for call in dropped], oldest)

    def _dropped(self) -> list[RootCall]:
        """Take out the oldest steps, so that no more are left than are kept."""
        over, running = len(self._waiting) - self.size, set(self.running.values())
        old = [self._waiting[i] for i in range(over)]
        gone = [step for step in old if running.isdisjoint(call.index for call in step)]
        self._waiting = deque(step for step in self._waiting if step not in gone)
        return [call for step in gone for call in step]

    def _add(self, calls: list[RootCall]) -> None:
        step = calls[-1].generation, calls[-1].step
        if step != self._latest:
            self._latest = step
            self._waiting.append(calls)
            self.steps += 1
        elif self._waiting:  # else an alarm has kept the step
            self._waiting[-1] += calls

    def _judge(self) -> None:
        """Keep all that is there for good if something went wrong."""
        if not self._waiting:
            return
        first, now = self._waiting[0][-1], self._waiting[-1][-1]
        sink = self._recorders[0].sink
        reasons = self.alarms.raised(now.generation, now.step)
        if reasons:
            self._guarded(sink.tell, now.generation, now.step)
        reasons += self._heard_of(self._guarded(sink.heard) or ())
        if not reasons:
            return
        alarm = Alarm(now.generation, now.step, first.step, "; ".join(reasons))
        self._raised.append(alarm)
        self._kept += len(self._waiting)
        self._waiting.clear()
        for recorder in self._recorders:
            recorder.sink.note({"alarms": [asdict(each) for each in self._raised]})
        text = f"step {now.step}: {alarm.reason}; the steps from {first.step} on are kept"
        print(f"llmdebug: {printable(text)}", file=sys.stderr)

    def _heard_of(self, signals: Iterable[Signal]) -> Iterator[str]:
        """Tell the alarms of other processes, but for those of steps that are kept already."""
        kept = max(((each.generation, each.step) for each in self._raised), default=(-1, -1))
        fresh = {each.sender: each for each in signals if (each.generation, each.step) > kept}
        for each in fresh.values():
            yield f"rank {each.rank} raised an alarm in its step {each.step}"

    def notes(self) -> list[str]:
        """Say what was kept."""
        kept = self._kept + len(self._waiting)
        if kept == self.steps:
            return []
        count = len(self._raised)
        alarms = f" and those before {count:,} alarm{'s' * (count > 1)}" if count else ""
        return [f"of {self.steps:,} steps, the last {self.size:,}{alarms} are kept"]
