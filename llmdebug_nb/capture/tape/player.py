"""Plays the tape of a root call: the calls that hooks only noted are recorded, in their order.

What the hooks saw is kept until somebody needs it: other work of ours that records, or the end of
the root call. Rows are committed then anyway, so a program that crashes loses nothing by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import nn

from llmdebug_nb.capture.calls import Leaf, OpenCall, ThreadState
from llmdebug_nb.capture.guard import Guard
from llmdebug_nb.capture.name_filter import NameFilter
from llmdebug_nb.capture.tape.native import Event, Tape, tape
from llmdebug_nb.core.kernels.fingerprint import ALGORITHM
from llmdebug_nb.core.options import DumpOptions


def may_wait(options: DumpOptions) -> bool:
    """Return whether calls may be recorded after they have ended.

    Values are written at once, and some options look at a call while it runs.
    """
    now = not options.stats_only or options.overflow or options.logits or options.time in (1, 2)
    return not now and options.fingerprint == ALGORITHM and "forward" in options.phases


class PlayedModule(Protocol):
    """The module of an event."""

    path: str
    module: nn.Module
    selected: bool


class CallListener(Protocol):
    """Receives calls: the observer of a session."""

    names: NameFilter
    backward: bool

    @property
    def thread(self) -> ThreadState: ...
    def open_module(
        self, path: str, module: nn.Module, selected: bool, recomputed: bool
    ) -> OpenCall: ...


class Player:
    """Plays one tape to a listener.

    ``record(call, role, leaves)``: records leaves of the tape. ``attempt(work, *args)`` keeps our
    errors in.
    """

    def __init__(
        self,
        played: Tape[PlayedModule],
        listener: CallListener,
        record: Callable[[OpenCall, str, list[Leaf]], None],
        attempt: Callable[..., object],
    ) -> None:
        self.tape, self._listener = played, listener
        self._record, self._attempt = record, attempt
        self._owner: int | None = None
        self._state: dict[str, object] = {}  # of that thread

    @classmethod
    def of(
        cls,
        listener: CallListener,
        record: Callable[[OpenCall, str, list[Leaf]], None],
        guard: Guard,
    ) -> Player | None:
        """Return the player of a new tape, which plays before all other work of ours, or None."""
        made = tape(listener.backward)
        if made is None:
            return None
        player = cls(made, listener, record, guard.attempt)
        guard.before = player.play
        return player

    def open(self) -> None:
        """Note calls of this thread from now on, unless those of another one are noted."""
        if self._owner is None:
            self._owner = threading.get_ident()
            self._state = vars(self._listener.thread)
            self.tape.open()

    def shut(self) -> None:
        """Play what is on the tape and note no more calls of this thread."""
        if self._owner == threading.get_ident():
            self.tape.shut()
            self.play()
            self._owner = None

    def play(self) -> None:
        """Record what is on the tape, if it is of this thread."""
        if self.tape and self._owner == threading.get_ident():
            self._play()

    def play_for_owner(self) -> None:
        """Record what is on the tape as in the thread that it is of."""
        if not self.tape or self._owner == threading.get_ident():
            self.play()
            return
        here = vars(self._listener.thread)
        own = here.copy()
        here.update(self._state)
        try:
            self._play()
        finally:
            here.clear()
            here.update(own)

    def _play(self) -> None:
        events = iter(self.tape.take())
        while not self._attempt(self._play_events, events):  # one raised: go on behind it
            pass

    def _play_events(self, events: Iterator[Event[PlayedModule]]) -> bool:
        listener, record = self._listener, self._record
        leave = listener.thread.leave
        for module, is_end, leaves in events:
            if not is_end:
                call = listener.open_module(module.path, module.module, module.selected, False)
                if leaves and call.recorded:
                    record(call, "input", leaves)
            else:
                ended = leave(module.path)
                if ended is not None and ended.recorded:
                    if leaves:
                        record(ended, "output", leaves)
                    if leaves is not None:
                        listener.names.end(ended)
        return True
