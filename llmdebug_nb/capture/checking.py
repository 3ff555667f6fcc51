"""A recorder that keeps no records: it is shown all calls, and may check them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.records import RootCall


class CheckingRecorder(Recorder):
    """A recorder that only checks what it is shown, wherever it runs: also in optimizers.

    It computes operators again, so their arguments are kept. It needs no source lines and no views.
    This one lets everything pass.
    """

    def may_wait(self, op: str) -> bool:
        """Return whether an operator need not be looked at before it has run."""
        return False

    def passes(self, result: object) -> bool:
        """Count a call that has ended, and return True, if its result is ordinary."""
        return True

    def record_result(self, outputs: Iterable[Leaf]) -> None:
        """The outermost call of a model has returned ``outputs``."""

    def record_read(self, value: object) -> None:
        """The program has read the number in a tensor."""

    def record(self, call: OpenCall, role: str, leaves: Iterable[Leaf]) -> None: ...
    def record_tensor(
        self, call: OpenCall, role: str, slot: str, tensor: torch.Tensor, phase: str = "forward"
    ) -> None: ...
    def record_weight(self, call: OpenCall, slot: str, tensor: torch.Tensor) -> None: ...
    def record_call(self, call: OpenCall) -> None: ...
    def add_weights(self, weights: list[torch.Tensor]) -> None: ...
    def end_call(self, calls: Iterable[RootCall]) -> None: ...
    def flush(self, calls: Iterable[RootCall] = ()) -> None: ...
