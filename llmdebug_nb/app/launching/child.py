"""In a process of a launched program: wait for the first model that runs, then record."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from llmdebug_nb.app.launching.handover import Handover

_waiting: Waiting | None = None


def begin(package: str) -> None:
    """The program has imported ``package`` for the first time in this process."""
    global _waiting
    handover = Handover.here()
    if handover is None:
        return
    handover.reached(package)
    if _waiting is None:
        _waiting = Waiting(handover)
        os.register_at_fork(after_in_child=_waiting.forked)
    _waiting.begin(package)


class Waiting:
    """Waits for the outermost call of a module or for a `generate`, whichever comes first, and has it recorded from its beginning.

    A process that runs no model writes nothing: a launcher of others, say, or a worker that loads data.
    """

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self._orders = handover.orders()
        self._recording: Any = None
        self._undo: list[Callable[[], None]] = []
        self._packages: list[str] = []
        self.enter: Any = (
            None  # what the recording is told of the `generate` during which it begins
        )
        self.announce: Any = None
        self.leave: Any = None
        self._seeded: Any = None

    def begin(self, package: str) -> None:
        """A package is there now, whose models may run. ONNX Runtime is recorded by means of torch, which is imported then."""
        seed = self._orders.get("seed")
        if package == "torch" and seed is not None:
            from llmdebug_nb.core import determinism

            self._seeded = determinism.seed_only(seed)
        self._packages.append(package)
        if self._recording is None:
            self._listen(package)

    def _listen(self, package: str) -> None:
        if package == "torch":
            from llmdebug_nb.capture import generation
            from llmdebug_nb.capture.compat import pytorch

            self._undo.append(pytorch.before_first_call(self._runs))
            self._hear(generation.listeners)
        else:
            from llmdebug_nb.capture.compat import onnxruntime_api

            self._hear(onnxruntime_api.listeners)

    def _hear(self, listeners: Any) -> None:
        listeners.add(self)
        self._undo.append(functools.partial(listeners.remove, self))

    def forked(self) -> None:
        """This process is a copy of one that was waiting or recording: it is on its own from here."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.abandon()
            for package in self._packages:
                self._listen(package)

    def _runs(self, model: Any) -> bool:
        """A module is about to run: record, unless it is none of ours."""
        return self._recording is not None or (
            not _loads_data() and next(model.parameters(), None) is not None and self._start(model)
        )

    def _start(self, model: Any) -> bool:
        """Start recording, as ``model`` is about to run. Always true: what could not start is said, and not tried again."""
        from llmdebug_nb.app.launching.shared import SharedRecording
        from llmdebug_nb.core.errors import LLMDebugError
        from llmdebug_nb.core.options import DumpOptions

        self._stop_listening()
        try:
            options = DumpOptions.of(**self._orders)
            # what is compiled has to be known beforehand; all else is found as it runs
            given = model if options.graph is not None else None
            self._recording = SharedRecording(given, options, self._handover, self._seeded)
            self._recording.start()
        except (LLMDebugError, OSError, ImportError) as error:
            self._handover.say(f"nothing was recorded: {error}")
        else:
            _at_end_of_worker(self._recording.at_exit)
        return True

    def _stop_listening(self) -> None:
        while self._undo:
            self._undo.pop()()

    def follow(self, model: Any) -> Any:
        """A `generate` begins. The recording listens to the next ones itself."""
        if not self._runs(model) or not self._is_on:
            return None
        tracker = self._recording.generations
        self.enter, self.announce, self.leave = tracker.enter, tracker.announce, tracker.leave
        return tracker.follow(model)

    def ran(self, session: Any, *given: Any) -> Any:
        """A session of ONNX Runtime is run for the first time; ``given`` ends with what runs it as the program wants it."""
        return self._told(session, "ran", *given)

    def ran_unseen(self, session: Any, *given: Any) -> Any:
        return self._told(session, "ran_unseen", *given)

    def _told(self, session: Any, how: str, *given: Any) -> Any:
        if _loads_data() or self._orders.get("graph"):  # which is of what `torch.compile` compiles
            return given[-1]()
        if self._recording is None:
            self._start(session)
        if not self._is_on:
            return given[-1]()
        return getattr(self._recording.sessions, how)(session, *given)

    @property
    def _is_on(self) -> bool:
        return self._recording is not None and self._recording.running


def _loads_data() -> bool:
    """Tell whether this process is a worker of a DataLoader: a model that it runs prepares data."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _at_end_of_worker(stop: Callable[[], None]) -> None:
    """A process of `multiprocessing` ends without `atexit`."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, stop, exitpriority=0)
