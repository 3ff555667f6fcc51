"""The session that lets an intervention change the calls of a model, and records nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.intervention import Intervention
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.root_finder import Describe
from llmdebug_nb.capture.session import EagerModules, Session
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.sink import NoSink
from llmdebug_nb.core.options import EVERY_TOKEN, DumpOptions
from llmdebug_nb.core.records import RootCall


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
            recorder=_Nothing(sink, options),
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


class _Nothing(Recorder):
    """A recorder that keeps nothing."""

    def record(self, call: OpenCall, role: str, leaves: Iterable[Leaf]) -> None: ...
    def record_tensor(
        self, call: OpenCall, role: str, slot: str, tensor: torch.Tensor,
        phase: str = "forward",
    ) -> None: ...  # fmt: skip
    def may_wait(self, op: str) -> bool:
        return False

    def passes(self, result: object) -> bool:
        return True

    def record_result(self, outputs: Iterable[Leaf]) -> None: ...
    def record_read(self, value: object) -> None: ...
    def record_weight(self, call: OpenCall, slot: str, tensor: torch.Tensor) -> None: ...
    def record_call(self, call: OpenCall) -> None: ...
    def add_weights(self, weights: list[torch.Tensor]) -> None: ...
    def end_call(self, calls: Iterable[RootCall]) -> None: ...
    def flush(self, calls: Iterable[RootCall] = ()) -> None: ...
