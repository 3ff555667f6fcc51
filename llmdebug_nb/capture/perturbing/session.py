"""The session that lets an intervention change the calls of a model, and records nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from llmdebug_nb.capture.checking import CheckingRecorder
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.root_finder import Describe
from llmdebug_nb.capture.session import EagerModules, Session
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.sink import NoSink
from llmdebug_nb.core.options import EVERY_TOKEN, DumpOptions


class PerturbedSession:
    """Follows the calls of models. ``start`` hooks them, ``abandon`` takes every hook off."""

    def __init__(self, models: Sequence[nn.Module], mode: str, describe: Describe) -> None:
        """Raises CaptureError: a model can't be followed."""
        options = DumpOptions.of(
            mode=mode, tokens=EVERY_TOKEN, phase="forward", stats_only=True, sources=False,
            force_eager=True,
        )  # fmt: skip
        sink = NoSink()
        self._parts = Parts.build(
            options, sink, 0, restricted=bool(models), operators=True,
            recorder=CheckingRecorder(sink, options),
        )  # fmt: skip
        source = EagerModules(self._parts, models, describe, any_model=not models)
        self._session = Session(self._parts, source)
        self.start, self.abandon = self._session.start, self._session.abandon

    def intervene(self, intervention: Intervention | None) -> None:
        """Let an intervention change the operators that run from now on."""
        self._parts.observer.substitution = intervention

    def problem(self) -> str:
        """Return the first error of our own work; "" if there is none."""
        return next(iter(self._parts.guard.problems), "")
