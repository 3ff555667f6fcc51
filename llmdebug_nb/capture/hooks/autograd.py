"""Watching autograd's engine: when a backward pass begins and when it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners


class BackwardListener(Protocol):
    """Follows backward passes.

    ``backward(outputs)`` returns a context that lasts as long as the pass of these tensors.
    """

    def backward(self, outputs: Sequence[object]) -> AbstractContextManager[None]: ...


def _wrap(run: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(run)
    def watched(*args: object, **kwargs: object) -> object:
        if pytorch.tracing():
            return run(*args, **kwargs)
        with ExitStack() as stack:
            outputs = args[0] if args and isinstance(args[0], (tuple, list)) else ()
            for listener in listeners:
                stack.enter_context(listener.backward(outputs))
            return run(*args, **kwargs)

    return watched


listeners: Listeners[BackwardListener] = Listeners(lambda: pytorch.with_engine(_wrap))
