"""The modes that see operators, on the stack of each thread that runs recorded root calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llmdebug_nb.capture.compat import torch_modes
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.operators.kinds import OperatorFilter, OperatorKinds
from llmdebug_nb.capture.operators.modes import ApiMode, AtenMode, CheckMode, OperatorListener
from llmdebug_nb.capture.operators.tape_modes import NotingApiMode, NotingMode


class _ThreadModes(threading.local):
    """The modes of one thread: a mode remembers what it was put on.

    ``pushed``, ``popped``: those put on the stack, or taken off it, for the current root call.
    ``observed``: those taken off it where torch tells of the operators.
    """

    def __init__(self, make: Callable[[], list[torch_modes.Mode]]) -> None:
        self.modes = make()
        self.pushed: list[torch_modes.Mode] = []
        self.popped: list[torch_modes.Mode] = []
        self.observed: list[NotingMode] = []


class OperatorModes:
    """The modes that report operator calls to one listener."""

    def __init__(
        self, listener: OperatorListener, levels: tuple[str, ...], apis: tuple[str, ...]
    ) -> None:
        """Raises EmptyDumpError for an operator that does not exist."""
        self.wanted = wanted = OperatorFilter(apis)
        wanted.refuse_unknown(levels)
        self.kinds = OperatorKinds(wanted)
        self._listener = listener
        classes = [cls for level, cls in _MODES.items() if level in levels]
        if listener.passing is not None:
            classes = [CheckMode if cls is AtenMode else cls for cls in classes]
        self._here = _ThreadModes(lambda: [self._mode(cls) for cls in classes])
        self._functions = "api" in levels

    def _mode(self, cls: type[ApiMode] | type[AtenMode]) -> torch_modes.Mode:
        player = self._listener.player
        if player is not None and player.operators is not None:
            if cls is not AtenMode:
                return NotingApiMode(self._listener, self.kinds, player)
            if not player.keeps:  # what an operator writes to must be kept before it runs
                return NotingMode(self._listener, self.kinds, player)
        return cls(self._listener, self.kinds)

    def open(self) -> None:
        if self._functions:
            _fast_paths.add(self)

    def close(self) -> None:
        if self._functions:
            _fast_paths.remove(self)

    def begin_root_call(self, recording: bool, noting: bool) -> None:
        """Let a root call of this thread be seen if it is recorded. ``noting``: on the tape."""
        here = self._here
        here.pushed = self.push() if recording else []
        here.popped = [] if recording else self.pop()
        if recording and noting:
            here.observed = [mode for mode in here.modes if isinstance(mode, NotingMode)]
            for mode in here.observed:
                if mode.observe():
                    torch_modes.pop_mode(mode)

    def end_root_call(self, resting: bool) -> None:
        """Put the thread's stack back as it was, but leave the modes off if ``resting``."""
        here = self._here
        self._unobserve()
        if resting:  # the recording may have been stopped from another thread
            self.pop()
        elif here.pushed:
            self.pop(here.pushed)
        elif here.popped:
            self.push()

    def _unobserve(self) -> None:
        """Put what torch stood for back on the stack."""
        observed = self._here.observed
        while observed:  # an exception that comes in between leaves it for the next time
            observed[-1].unobserve()
            torch_modes.push_mode(observed[-1])
            observed.pop()

    def push(self) -> list[torch_modes.Mode]:
        """Put the modes on this thread's stack; return those that were not on it before.

        Other threads that do work for this one, as in a backward pass, have those on its stack.
        """
        self._unobserve()
        return [mode for mode in self._here.modes if torch_modes.push_mode(mode)]

    def pop(self, modes: list[torch_modes.Mode] | None = None) -> list[torch_modes.Mode]:
        """Take modes (default: all) off this thread's stack; return those that were on it."""
        self._unobserve()
        return [
            mode
            for mode in (self._here.modes if modes is None else modes)
            if torch_modes.pop_mode(mode)
        ]


_MODES: dict[str, type[ApiMode] | type[AtenMode]] = {"api": ApiMode, "aten": AtenMode}
_fast_paths: Listeners[OperatorModes] = Listeners(lambda: torch_modes.with_fast_paths(ApiMode))
