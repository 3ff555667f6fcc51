"""The rows of gradients: hooks note a gradient, and its row is made before other work of ours."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Protocol

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.guard import Guard
from llmdebug_nb.capture.tape.native import Noted, Seen, noted
from llmdebug_nb.capture.tape.player import may_wait
from llmdebug_nb.core.kernels.overflow import overflows
from llmdebug_nb.core.options import DumpOptions

_Site = tuple[OpenCall, str, str]  # call, role, slot


class Pausing(Protocol):
    """What tells whether gradients are not recorded now: the observer."""

    paused: bool


class TensorRecorder(Protocol):
    """Makes rows of tensors, and of those that the tape saw."""

    def record_tensor(
        self, call: OpenCall, role: str, slot: str, tensor: torch.Tensor, phase: str, /
    ) -> None: ...
    def record_seen(self, call: OpenCall, role: str, leaves: list[Leaf], phase: str, /) -> None: ...


class GradientRows:
    """The gradients of one session, in the order in which they arrive, in any thread."""

    def __init__(
        self, observer: Pausing, recorder: TensorRecorder, guard: Guard, options: DumpOptions,
        alone: bool,
    ) -> None:  # fmt: skip
        """``alone``: nothing but the recorder needs the gradients."""
        self._tape: Noted[_Site] = noted(alone and may_wait(options))
        self._observer, self._recorder, self._attempt = observer, recorder, guard.attempt
        self._overflowing = options.overflow is not None
        self._waiting: deque[tuple[_Site, Seen]] = deque()  # more than one after an exception
        self.forget = self._tape.forget
        guard.before.append(self.play)

    def note(self, call: OpenCall, role: str, slot: str, gradient: torch.Tensor) -> bool:
        """Note a gradient as it is now. False: it must be recorded at once, if at all."""
        if self._observer.paused:
            return False
        return self._tape.note((call, role, slot), gradient, role == "output")

    def record(self, call: OpenCall, role: str, slot: str, gradient: torch.Tensor) -> None:
        """Make the row of a gradient now."""
        if not self._observer.paused and (not self._overflowing or overflows(gradient)):
            self._recorder.record_tensor(call, role, slot, gradient, "backward")

    def play(self) -> None:
        """Make the rows of what was noted."""
        if self._tape:
            self._waiting += self._tape.take()
            self._tape.forget()
        while self._waiting:
            self._attempt(self._play)

    def _play(self) -> None:
        record = self._recorder.record_seen
        with contextlib.suppress(IndexError):  # all are taken
            while True:
                (call, role, slot), seen = self._waiting.popleft()
                record(call, role, [(slot, seen)], "backward")
