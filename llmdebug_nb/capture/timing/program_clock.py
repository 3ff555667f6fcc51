"""The program's clock, which stops while our own work runs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class Clock:
    """The program's clock, in nanoseconds.

    It is stopped during ``pauses`` (intervals that may overlap) and shows ``shows`` at ``base``.
    """

    def __init__(self, pauses: Iterable[tuple[int, int]], base: int, shows: int = 0) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._paused = [0]  # the total length of all earlier pauses
        for start, end in sorted(pauses):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
                continue
            self._starts.append(start)
            self._ends.append(end)
        for start, end in zip(self._starts, self._ends, strict=True):
            self._paused.append(self._paused[-1] + end - start)
        self._base = 0
        self._base = self(base) - shows

    def __call__(self, moment: int) -> int:
        """Return what the clock shows at a moment."""
        index = bisect.bisect_right(self._starts, moment)
        paused = self._paused[index]
        if index and moment < self._ends[index - 1]:
            paused -= self._ends[index - 1] - moment
        return moment - paused - self._base

    def is_paused(self, moment: int) -> bool:
        """Tell whether our own work runs at a moment."""
        index = bisect.bisect_right(self._starts, moment)
        return bool(index) and moment < self._ends[index - 1]

    @property
    def total_pause(self) -> int:
        return self._paused[-1]
