"""The part inside a launched process: it waits for the first model that runs, then records."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.launching.handover import CHECK, Handover

if TYPE_CHECKING:
    from torch import nn

    from llmdebug_nb.app.launching.shared import SharedRecording
    from llmdebug_nb.app.launching.shared_check import SharedCheck
    from llmdebug_nb.app.live_models import Model
    from llmdebug_nb.core.determinism import Switched

_starter: RecordingStarter | None = None


def begin(package: str) -> None:
    """Prepare recording; called when the process has imported ``package``."""
    global _starter
    handover = Handover.here()
    if handover is None:
        return
    handover.note_import(package)
    if _starter is None:
        _starter = RecordingStarter(handover)
        os.register_at_fork(after_in_child=_starter.after_fork)
    _starter.begin(package)


class RecordingStarter:
    """Starts the recording, or the check, at the first outermost call of a model.

    That is a module, a `generate`, or a model of a runtime.

    A process that runs no model, such as a launcher or a data loader, writes nothing.
    """

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self._options = handover.options()
        self._check = self._options.pop(CHECK, None)  # in place of recording
        self._recording: SharedRecording | SharedCheck | None = None
        self._undo: list[Callable[[], None]] = []
        self._packages: list[str] = []
        # those of the recording's tracker, for the `generate` during which recording starts
        self.enter: Callable[..., Any] | None = None
        self.announce: Callable[..., Any] | None = None
        self.leave: Callable[..., Any] | None = None
        self._seeded: Switched | None = None

    def begin(self, package: str) -> None:
        """Wait for models of a package that is now imported; once, however often this is called."""
        if package in self._packages:
            return
        seed = self._options.get("seed")
        if package == "torch" and seed is not None:
            from llmdebug_nb.core import determinism

            self._seeded = determinism.seed_all(seed, mode=True)
        self._packages.append(package)
        if self._recording is None:
            self._listen(package)

    def _listen(self, package: str) -> None:
        if package == "torch":
            from llmdebug_nb.capture import generation
            from llmdebug_nb.capture.compat import pytorch

            self._undo.append(pytorch.before_first_call(self._before_call))
            # enter, announce and leave are there when they are first called
            listener: Any = self
            generation.listeners.add(listener)
            self._undo.append(functools.partial(generation.listeners.remove, listener))
        else:
            import torch  # noqa: F401  recording needs it; its own `begin` comes before ours is half there

            from llmdebug_nb.capture.runtimes import RUNTIMES

            source = next(each.source for each in RUNTIMES if each.package == package)
            if source is not None:
                self._undo.append(source().listeners.wait(self._before_run))

    def after_fork(self) -> None:
        """In a forked child: drop the parent's recording and wait anew."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.abandon()
            for package in self._packages:
                self._listen(package)

    def _before_call(self, model: nn.Module) -> bool:
        """Start recording before a module runs; return True if no further call must be watched."""
        if self._recording is not None:
            return True
        if _in_data_loader() or next(model.parameters(), None) is None:
            return False
        self._start(model)
        return True

    def _start(self, model: Model) -> None:
        """Start recording. If that fails, report it once and don't try again."""
        from llmdebug_nb.core import collector
        from llmdebug_nb.core.errors import LLMDebugError

        self._stop_listening()
        try:
            with collector.paused():  # it would go through all that the program has made
                self._recording = self._made(model)
                self._recording.begin()
        except (LLMDebugError, OSError, ImportError) as error:
            verb = "recorded" if self._check is None else "checked"
            self._handover.say(f"nothing was {verb}: {error}")
        else:
            _at_end_of_worker(self._recording.at_exit)

    def _made(self, model: Model) -> SharedRecording | SharedCheck:
        if self._check is not None:
            from llmdebug_nb.app.errcheck import CheckOptions
            from llmdebug_nb.app.launching.shared_check import SharedCheck

            return SharedCheck(self._handover, CheckOptions.of(**self._check))
        from llmdebug_nb.app.launching.shared import SharedRecording
        from llmdebug_nb.core.options import DumpOptions

        options = DumpOptions.of(**self._options)
        # only a model that is compiled must be known in advance
        models = model if options.graph is not None else None
        return SharedRecording(models, options, self._handover, self._seeded)

    def _stop_listening(self) -> None:
        while self._undo:
            self._undo.pop()()

    # -- a listener of generations ---------------------------------------------------------------

    def follow(self, model: nn.Module) -> nn.Module | None:
        """Start recording at a `generate`; the recording itself listens to later ones."""
        recording = self._running() if self._before_call(model) else None
        if recording is None:
            return None
        tracker = recording.generations
        self.enter, self.announce, self.leave = tracker.enter, tracker.announce, tracker.leave
        root: nn.Module | None = tracker.follow(model)
        return root

    # -- models of runtimes ----------------------------------------------------------------------

    def _before_run(self, model: Model) -> None:
        """Start recording before a runtime runs a model. The recording listens to that run, too."""
        # graph is for code that `torch.compile` compiled
        unwanted = self._options.get("graph") or self._check is not None or _in_data_loader()
        if self._recording is None and not unwanted:
            self._start(model)

    def _running(self) -> SharedRecording | SharedCheck | None:
        recording = self._recording
        return recording if recording is not None and recording.running else None


def _in_data_loader() -> bool:
    """True in a worker of a DataLoader, whose models only prepare data."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _at_end_of_worker(stop: Callable[[], None]) -> None:
    """Call ``stop`` at the end of a process of `multiprocessing`, which skips `atexit`."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, stop, exitpriority=0)
