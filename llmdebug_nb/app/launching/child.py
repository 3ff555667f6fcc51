"""The part inside a launched process: it waits for the first model that runs, then records."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llmdebug_nb.app.launching.handover import CHECK, Handover

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, RunOptions
    from openvino import InferRequest
    from torch import nn

    from llmdebug_nb.app.launching.shared import SharedRecording
    from llmdebug_nb.app.launching.shared_check import SharedCheck
    from llmdebug_nb.app.live_models import Model
    from llmdebug_nb.capture.compat.llamacpp_api import Llama
    from llmdebug_nb.capture.compat.onnxruntime_api import Feed
    from llmdebug_nb.core.determinism import Switched

T = TypeVar("T")
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

    That is a module, a `generate`, a session of ONNX Runtime, a compiled model of OpenVINO
    or a ``Llama`` of llama.cpp.

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

            from llmdebug_nb.capture.compat import llamacpp_api, onnxruntime_api, openvino_api

            apis = llamacpp_api, onnxruntime_api, openvino_api
            listeners: Any = {api.PACKAGE: api.listeners for api in apis}[package]
            listeners.add(self)
            self._undo.append(functools.partial(listeners.remove, self))

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

    # -- a listener of ONNX Runtime --------------------------------------------------------------

    def ran(
        self,
        session: InferenceSession,
        names: Sequence[str] | None,
        feed: Feed,
        options: RunOptions | None,
        own: Callable[[], list[object]],
    ) -> list[object]:
        """Start recording at a run of a session. ``own()`` runs it unrecorded."""
        recording = self._recording_of(session)
        if recording is None:
            return own()
        listener = recording.listener("onnxruntime")
        outputs: list[object] = listener.ran(session, names, feed, options, own)
        return outputs

    def ran_unseen(
        self, session: InferenceSession, feed: Feed | None, own: Callable[[], object]
    ) -> object:
        """Start recording at a run of a session whose values can't be seen."""
        recording = self._recording_of(session)
        if recording is None:
            return own()
        unseen: object = recording.listener("onnxruntime").ran_unseen(session, feed, own)
        return unseen

    def _recording_of(self, session: Model) -> SharedRecording | None:
        """Return the recording, started if necessary; None if the session is not recorded."""
        # graph is for code that `torch.compile` compiled
        if _in_data_loader() or self._options.get("graph") or self._check is not None:
            return None
        if self._recording is None:
            self._start(session)
        recording: Any = self._running()  # a check has returned above
        return recording  # type: ignore[no-any-return]

    # -- a listener of OpenVINO ------------------------------------------------------------------

    def infers(self, request: InferRequest, own: Callable[[], T]) -> T:
        """Start recording at a run of a compiled model."""
        recording = self._recording_of(request)
        if recording is None:
            return own()
        result: T = recording.listener("openvino").infers(request, own)
        return result

    def resets(self, request: InferRequest) -> None:
        """Do nothing: a recording that has started listens itself."""

    # -- a listener of llama.cpp -----------------------------------------------------------------

    def computes(self, llama: Llama) -> None:
        """Start recording as a ``Llama`` first computes; the recording then listens itself."""
        recording = self._recording_of(llama)
        if recording is not None:
            recording.listener("llama_cpp").computes(llama)

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
