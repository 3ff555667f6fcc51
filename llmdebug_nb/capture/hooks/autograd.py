"""Watching autograd's engine: when a backward pass begins and when it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners


class Listener(Protocol):
    """Who is told: ``backward()`` gives a context that lasts as long as the pass."""

    def backward(self) -> AbstractContextManager[Any]: ...


def _wrap(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if pytorch.tracing():
            return run(*args, **kwargs)
        with ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener.backward())
            return run(*args, **kwargs)

    return watched


listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_engine(_wrap))
