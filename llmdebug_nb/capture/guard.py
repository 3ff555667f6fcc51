"""The guard between our own work and the program: our errors never reach the program."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.masking import masked

if TYPE_CHECKING:
    from llmdebug_nb.capture.timing.profiler import Profile

T = TypeVar("T")


class Guarded(Protocol):
    """Calls ``work(*args)``; returns None if that raised or if nothing is being recorded."""

    def __call__(self, work: Callable[..., T], /, *args: object) -> T | None: ...


class Guard:
    """Runs our own work on behalf of one session.

    ``active``: the session records; otherwise `run` does nothing. ``problems``: errors of our own
    work, with their count. ``run``: a `Guarded`; its time is not counted as the program's.
    ``before``: done before all other work.
    """

    def __init__(self, profile: Profile | None) -> None:
        self.active = False
        self.problems: Counter[str] = Counter()
        self.before: Callable[[], None] | None = None
        self._pid = os.getpid()  # a forked child must not write to our files
        self.run: Guarded = (
            self._run if profile is None else functools.partial(profile.ours, self._run)
        )

    @interrupts.held
    def _run(self, work: Callable[..., T], /, *args: object) -> T | None:
        if not self.active or os.getpid() != self._pid:
            return None
        if self.before is not None:
            self.before()
        hidden = torch_modes.out_of_sight if torch_modes.watched() else torch_modes.no_subclass_sees
        result = hidden(self.attempt, work, *args)
        if interrupts.waiting:
            interrupts.deliver()
        return result

    @interrupts.held
    def catch_up(self) -> None:
        """Do what comes before all other work."""
        if self.active and self.before is not None and os.getpid() == self._pid:
            self.before()
        if interrupts.waiting:
            interrupts.deliver()

    def attempt(self, work: Callable[..., T], /, *args: object) -> T | None:
        """Do a part of our own work, inside of `run`; return None if it raised."""
        try:
            return work(*args)
        except Exception as error:  # the program must go on; the dump reports the problem
            if interrupts.is_of_handler(error):  # a timeout of the program, say
                raise
            first_line = str(error).partition("\n")[0]
            self.problems[f"{type(error).__name__} while recording: {masked(first_line)}"] += 1
            return None
