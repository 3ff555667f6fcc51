"""Plays the tape of a root call: the calls that hooks only noted are recorded, in their order.

What the hooks saw is kept until somebody needs it: other work of ours that records, or the end of
the root call. Rows are committed then anyway, so a program that crashes loses nothing by it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from torch import nn

from llmdebug_nb.capture.calls import Leaf, OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.guard import Guard
from llmdebug_nb.capture.name_filter import NameFilter
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.capture.operators.kinds import Operator
from llmdebug_nb.capture.operators.view_chains import arguments_text
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.signatures import Signatures, argument_of
from llmdebug_nb.capture.tape.native import (
    Event,
    Known,
    Means,
    Now,
    Outputs,
    Tape,
    ViewEvent,
    ViewKey,
    player_in_c,
    tape,
)
from llmdebug_nb.capture.walk import scalar_text
from llmdebug_nb.core.kernels.fingerprint import ALGORITHM
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import View


def may_wait(options: DumpOptions) -> bool:
    """Return whether calls may be recorded after they have ended.

    Some options look at a call while it runs.
    """
    now = options.overflow is not None or options.logits or options.time in (1, 2)
    return not now and options.fingerprint == ALGORITHM and "forward" in options.phases


class PlayedModule(Protocol):
    """The module of an event."""

    path: str
    module: nn.Module
    selected: bool


class CallListener(Protocol):
    """Receives calls: the observer of a session."""

    names: NameFilter
    signatures: Signatures
    backward: bool
    records_modules: bool

    @property
    def thread(self) -> ThreadState: ...
    def open_module(
        self, path: str, module: nn.Module, selected: bool, recomputed: bool
    ) -> OpenCall: ...
    def open_operator(
        self, operator: Operator, level: str, recomputed: bool
    ) -> OpenCall | None: ...
    def record_operator(self, call: OpenCall, stack: int | None) -> None: ...
    def end_operator(self, call: OpenCall, outputs: object) -> None: ...


class Player:
    """Plays one tape to a listener.

    ``attempt(work, *args)`` keeps our errors in. ``operators``: what is known of those that are
    noted, by id; None: none are. ``keeps``: values are kept; what has new ones is played at once.
    """

    def __init__(
        self,
        played: Tape[PlayedModule],
        listener: CallListener,
        recorder: Recorder,
        attempt: Callable[..., object],
    ) -> None:
        self.tape, self._listener = played, listener
        self._recorder, self._attempt = recorder, attempt
        self._waiting: deque[Event[PlayedModule]] = deque()  # some stay if an exception comes
        self._lock = threading.RLock()  # the owner waits for a thread that plays in its place
        self.operators: dict[int, Known] | None = None
        self.keeps = False
        self._views: dict[ViewKey, View] = {}  # of the root call
        self._functions: list[OpenCall | None] = []  # those that are open; None: not recorded
        self._owner: int | None = None
        self._state: dict[str, object] = {}  # of that thread
        self._playing = False
        self._in_c = player_in_c()
        self._means = Means(
            OpenCall, listener.signatures.of, self._views, _view, scalar_text, argument_of, {}, {},
            listener.records_modules, listener.backward,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        listener: CallListener,
        recorder: Recorder,
        guard: Guard,
        options: DumpOptions,
        stacks: CallStacks | None,
    ) -> Player | None:
        """Return the player of a new tape, which plays before all other work of ours.

        None: there is no tape, or the options need more than it keeps. Operators are not noted if
        only some calls are wanted, as which ones is found out when the tape is played.
        """
        values = recorder.values
        plays = may_wait(options) and (options.stats_only or values.may_be_packed)
        made = tape(listener.backward, options.stats_only) if plays else None
        if made is None:
            return None
        player = cls(made, listener, recorder, guard.attempt)
        guard.before = player.play
        recorder.weights.share(made)
        if not options.stats_only:
            player.keeps = True
            made.keep(values.contents, _player_of(guard))
        if listener.names.selects_all and not options.layers and not options.types:
            player._note_operators(stacks, options.roles)
        return player

    def _note_operators(self, stacks: CallStacks | None, roles: Collection[str]) -> None:
        self.operators = {}
        kinds, numbers, lines = None, {}, {}
        if stacks is not None:
            kinds, numbers, lines = stacks.kinds, stacks.numbers, stacks.lines
        looks = "input" in roles, "output" in roles
        clock = pytorch.autograd_clock if self._listener.backward else None
        self.tape.watch(self.operators, kinds, numbers, lines, clock, *looks)

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
            self._views.clear()
            self._functions.clear()
            self._owner = None

    def end_operator(self, outputs: object) -> None:
        """End the operator that the tape has left open."""
        open_calls = self._listener.thread.open_calls
        if open_calls and open_calls[-1].level == "aten":
            self._listener.end_operator(open_calls[-1], outputs)

    def end_function(self, outputs: object, raised: bool) -> None:
        """End the function that was noted last, whose end could not be noted."""
        call = self._functions.pop() if self._functions else None
        if call is not None and raised:
            self._listener.thread.leave(call.path)
        elif call is not None:
            self._listener.end_operator(call, outputs)

    def play(self) -> None:
        """Record what is on the tape, if it is of this thread."""
        if self._owner == threading.get_ident():
            with self._lock:
                self._play()

    def play_for_owner(self) -> None:
        """Record what is on the tape as in the thread that it is of."""
        if not (self.tape or self._waiting) or self._owner == threading.get_ident():
            self.play()
            return
        here = vars(self._listener.thread)
        with self._lock:
            own = here.copy()
            here.update(self._state)
            try:
                self._play()
            finally:
                self._state.update((name, here[name]) for name in [*self._state])
                here.clear()
                here.update(own)

    def _play(self) -> None:
        if self._playing:  # a finalizer runs: events that wait would come inside the one at hand
            return
        self._playing = True
        try:
            if self.tape:
                self._waiting += self.tape.take()
            while self._waiting:  # one raised: go on behind it
                count = len(self._waiting)
                self._attempt(self._play_events)
                if len(self._waiting) == count:
                    self._waiting.popleft()
        finally:
            self._playing = False

    def _play_events(self) -> None:
        while self._waiting:
            left = self._play_in_c()
            if left is not None:
                self._play_event(left)

    def _play_in_c(self) -> Event[PlayedModule] | None:
        """Let C play what waits, as far as it can. Return the event that is next."""
        now = self._now()
        if now is None or self._in_c is None:
            return self._waiting.popleft()
        return self._recorder.pack(functools.partial(self._in_c, self._means, now))

    def _now(self) -> Now | None:
        """Return what C plays, None if it can't."""
        thread = self._listener.thread
        counts = thread.counts()
        if counts is None or not self._recorder.packs or not self._listener.names.selects_all:
            return None
        root_call, root = thread.root_call, thread.root
        return Now(self._waiting, thread.open_calls, self._functions, counts, root_call, root)

    def _play_event(self, event: Event[PlayedModule]) -> None:
        if len(event) == 5:
            self._play_operator(*event)
        elif len(event) == 1:
            self._end_function(event[0])
        elif len(event) == 4:
            self._play_views(event)
        else:
            self._play_module(*event)

    def _play_module(self, module: PlayedModule, is_end: bool, leaves: list[Leaf] | None) -> None:
        listener, record = self._listener, self._recorder.record_seen
        if not is_end:
            call = listener.open_module(module.path, module.module, module.selected, False)
            if leaves and call.recorded:
                record(call, "input", leaves)
            return
        ended = listener.thread.leave(module.path)
        if ended is not None and ended.recorded:
            if leaves:
                record(ended, "output", leaves)
            if leaves is not None:
                listener.names.end(ended)

    def _play_operator(
        self,
        operator: Operator,
        stack: int | None,
        inputs: list[Leaf],
        outputs: Outputs,
        level: str | None,
    ) -> None:
        """Record an operator, but for outputs that follow: see `end_operator`, `end_function`."""
        listener, record = self._listener, self._recorder.record_seen
        call = listener.open_operator(operator, level or "aten", False)
        if level is not None:
            self._functions.append(call)
        if call is None:
            return
        if call.recorded:
            listener.record_operator(call, stack)
            record(call, "input", inputs)
        if outputs is False:
            return
        listener.thread.leave(call.path)
        if outputs is not None and call.recorded:
            record(call, "output", outputs)
            listener.names.end(call)

    def _end_function(self, outputs: list[Leaf] | None) -> None:
        """Record the end of the function that was opened last."""
        call = self._functions.pop()
        if call is None:
            return
        self._listener.thread.leave(call.path)
        if outputs is not None and call.recorded:
            self._recorder.record_seen(call, "output", outputs)
            self._listener.names.end(call)

    def _play_views(self, event: ViewEvent) -> None:
        operator, source, args, views = event
        for part, (base, result) in enumerate(views):
            key = operator.name, source, repr(args), part if len(views) > 1 else None
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _view(operator, source, args, key[-1])
            self._recorder.add_view(view, base, result)


def _player_of(guard: Guard) -> Callable[[], object]:
    """Return what plays now. It does not hold the guard: the tape can't be collected."""
    there = weakref.ref(guard)

    def play() -> None:
        now = there()
        if now is not None:
            now.catch_up()

    return play


def _view(operator: Operator, source: str, args: tuple[object, ...], part: int | None) -> View:
    return View(operator.name, source, arguments_text(args, {}, part))
