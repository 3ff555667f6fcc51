"""Watching `torch.distributed`: function modes don't see its functions, so they are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.listeners import Listeners

Function = Callable[..., object]


class CollectiveListener(Protocol):
    """Runs ``function`` as the operator of that name, and returns what it returns."""

    def collective(
        self,
        name: str,
        function: Function,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object: ...


def _wrap(name: str, function: Function) -> Function:
    @functools.wraps(function)
    def watched(*args: object, **kwargs: object) -> object:
        run = function
        for listener in listeners:
            run = functools.partial(_through, listener, name, run)
        return run(*args, **kwargs)

    return watched


def _through(
    listener: CollectiveListener, name: str, run: Function, *args: object, **kwargs: object
) -> object:
    return listener.collective(name, run, args, kwargs)


listeners: Listeners[CollectiveListener] = Listeners(lambda: pytorch.with_collectives(_wrap))
