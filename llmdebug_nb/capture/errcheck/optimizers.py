"""Optimizer steps as calls: their operators run inside them; parameters are their result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from llmdebug_nb.capture.calls import ThreadState
from llmdebug_nb.capture.errcheck.checker import Checker
from llmdebug_nb.capture.guard import Guarded


class OptimizerSteps:
    """Opens a call for each step of any optimizer, between `start` and `stop`."""

    def __init__(
        self, thread: ThreadState, guarded: Guarded, checker: Checker, records: bool
    ) -> None:
        """``records``: gradients and parameters are checked as those of modules are."""
        self._thread, self._guarded = thread, guarded
        self._checker, self._records = checker, records
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        before = register_optimizer_step_pre_hook(self._before)
        after = register_optimizer_step_post_hook(self._after)
        self._undo = [before.remove, after.remove]

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._guarded(self._begin, optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._guarded(self._end, optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        call = self._thread.enter(name, name, "module", name, False)
        call.selected = True
        if self._records:
            given = [(f"{slot}.grad", each.grad) for slot, each in _parameters(optimizer)]
            self._checker.record(call, "input", given)

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        call = self._thread.leave(type(optimizer).__name__)
        if call is not None and self._records:
            self._checker.record(call, "output", list(_parameters(optimizer)))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that have a gradient, with their places in the optimizer's groups."""
    for group, settings in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(settings["params"]):
            if parameter.grad is not None:
                yield f"{group}.{number}", parameter
