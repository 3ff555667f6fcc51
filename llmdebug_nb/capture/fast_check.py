"""Calls that pass a check: their results are ordinary, so they are only counted.

A check runs between two operators of the program, where every function that it calls costs several
times what it costs in a loop. Here is all that the usual call needs: no operator of torch runs, so
nothing need be hidden from modes, and no tensor is kept. All other calls go the way of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.checking import CheckingRecorder
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.operators.forward_operators import ForwardOperators


class Passing:
    """Lets calls pass that the check of one session finds ordinary.

    An error in here never reaches the program: the call does not pass then.
    """

    def __init__(
        self, check: CheckingRecorder, thread: ThreadState, forwards: ForwardOperators,
        modules: bool, backward: bool,
    ) -> None:  # fmt: skip
        """``modules``: outputs of modules are checked. ``backward``: gradients are followed."""
        self.may_wait = check.may_wait
        self._passes, self._thread, self._forwards = check.passes, thread, forwards
        self._modules, self._backward = modules, backward

    def open(
        self, path: str, op: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> bool:
        """Open the call of a module in a forward pass; False: it is to be opened as all others."""
        thread = self._thread
        if not thread.recording or pytorch.in_backward() or pytorch.tracing():
            return False
        if self._modules and self._backward and torch.is_grad_enabled():
            return False  # its gradients are checked
        call = OpenCall(path, op, "module", path, thread.count(path), thread.root_call)
        call.selected = True
        if self._modules:
            call.recorded, call.arguments = True, (args, kwargs)
        thread.open_calls.append(call)
        return True

    def close(
        self, path: str, args: tuple[object, ...], kwargs: Mapping[str, object], output: object
    ) -> bool:
        """Close the innermost call if it is that of ``path``, and passes."""
        calls = self._thread.open_calls
        if len(calls) < 2 or calls[-1].path != path or pytorch.in_backward():
            return False
        call = calls[-1]
        try:
            if call.recorded and (call.since is not None or not self._passes(output)):
                return False
        except Exception:
            return False
        calls.pop()
        return True

    def follows(self) -> bool:
        """Return whether an operator that runs now is in the forward pass of a module."""
        return bool(self._thread.open_calls) and not pytorch.in_backward()

    def operator(self, name: str, result: object) -> bool:
        """Count the call of an operator that has ended, if it passes."""
        try:
            if not self._passes(result):
                return False
        except Exception:
            return False
        thread = self._thread
        module = thread.open_calls[-1].module
        path = f"{module or ''}/{name}"
        number = thread.count(path)
        if self._backward and self._forwards.has_new_node():
            self._forwards.add(OpenCall(path, name, "aten", module, number, thread.root_call))
        return True
