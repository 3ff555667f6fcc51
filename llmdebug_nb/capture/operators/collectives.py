"""Watching `torch.distributed`: function modes don't see its functions, so they are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch, torch_distributed
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.listeners import Listeners

Args = tuple[object, ...]
Kwargs = Mapping[str, object]
Function = Callable[..., object]


class CollectiveListener(Protocol):
    """Receives the calls of collectives: the observer of a session."""

    @property
    def guarded(self) -> Guarded: ...
    def begin_collective(
        self, name: str, function: Function, args: Args, kwargs: Kwargs
    ) -> OpenCall | None: ...
    def end_collective(self, call: OpenCall, result: object) -> None: ...
    def leave_collective(self, call: OpenCall) -> None: ...
    def forget_versions(self) -> None: ...
    def end_wait(self, work: object) -> None: ...


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
    """Run a collective and record it. Inputs are recorded first, since it may write to them.

    What it writes to later is recorded when the program waits for it (`_waited`).
    """
    if pytorch.tracing():
        return run(*args, **kwargs)
    call = listener.guarded(listener.begin_collective, name, run, args, kwargs)
    try:
        result = run(*args, **kwargs)
    except BaseException:
        if call is not None:
            listener.leave_collective(call)
        raise
    finally:
        listener.forget_versions()
    if call is not None:
        listener.guarded(listener.end_collective, call, result)
    return result


def _waited(work: object) -> None:
    for listener in listeners:
        listener.guarded(listener.end_wait, work)


listeners: Listeners[CollectiveListener] = Listeners(
    lambda: torch_distributed.with_collectives(_wrap, _waited)
)
