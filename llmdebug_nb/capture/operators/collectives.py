"""Watching `torch.distributed`: its functions take no part in function modes, so they are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners


class Listener(Protocol):
    """Who is told: runs ``function`` as the operator of that name, and returns what it returns."""

    def collective(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any: ...


def _wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        run = function
        for listener in listeners:
            run = functools.partial(_through, listener, name, run)
        return run(*args, **kwargs)

    return watched


def _through(
    listener: Listener, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return listener.collective(name, run, args, kwargs)


listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_collectives(_wrap))
