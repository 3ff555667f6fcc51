"""In a process of a launched program: wait for the first model that runs, then record."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from llmdebug_nb.launching.handover import Handover

_waiting: Waiting | None = None


def begin(package: str) -> None:
    """The program has imported ``package`` for the first time in this process."""
    global _waiting
    handover = Handover.here()
    if handover is None:
        return
    handover.reached(package)
    if _waiting is None and package == "torch":
        _waiting = Waiting(handover)
        _waiting.listen()
        os.register_at_fork(after_in_child=_waiting.forked)


class Waiting:
    """Waits for the outermost call of a module or for a `generate`, whichever comes first, and has it recorded from its beginning.

    A process that runs no model writes nothing: a launcher of others, say, or a worker that loads data.
    """

    def __init__(self, handover: Handover) -> None:
        from llmdebug_nb import determinism

        self._handover = handover
        self._orders = handover.orders()
        self._recording: Any = None
        self._undo: list[Callable[[], None]] = []
        self.enter: Any = None  # what the recording is told of the `generate` during which it begins
        self.announce: Any = None
        self.leave: Any = None
        seed = self._orders.get("seed")
        self._seeded = None if seed is None else determinism.seed_only(seed)

    def listen(self) -> None:
        from llmdebug_nb.capture import compat, generation

        self._undo = [compat.before_first_call(self._begin), lambda: generation.listeners.remove(self)]
        generation.listeners.add(self)

    def forked(self) -> None:
        """This process is a copy of one that was waiting or recording: it is on its own from here."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.abandon()
            self.listen()

    def _begin(self, model: Any) -> bool:
        """Start recording, as ``model`` is about to run. False where that is none of ours."""
        from llmdebug_nb.errors import LLMDebugError

        if self._recording is not None:
            return True
        if _loads_data() or next(model.parameters(), None) is None:
            return False
        self._stop_listening()
        try:
            self._recording = self._recorded(model)
            self._recording.start()
        except (LLMDebugError, OSError, ImportError) as error:
            self._handover.say(f"nothing was recorded: {error}")
        else:
            _at_end_of_worker(self._recording.at_exit)
        return True

    def _recorded(self, model: Any) -> Any:
        from llmdebug_nb.launching.shared import SharedRecording
        from llmdebug_nb.options import DumpOptions

        options = DumpOptions.of(**self._orders)
        # what is compiled has to be known beforehand; all else is found as it runs
        return SharedRecording(model if options.graph is not None else None, options, self._handover, self._seeded)

    def _stop_listening(self) -> None:
        while self._undo:
            self._undo.pop()()

    def follow(self, model: Any) -> Any:
        """A `generate` begins. The recording listens to the next ones itself."""
        begun = self._begin(model) and self._recording is not None and self._recording.running
        if not begun:
            return None
        tracker = self._recording.generations
        self.enter, self.announce, self.leave = tracker.enter, tracker.announce, tracker.leave
        return tracker.follow(model)


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
