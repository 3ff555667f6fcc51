"""The interface of what changes a program while it runs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.hooks.handles import Handle

Args = tuple[object, ...]
Kwargs = Mapping[str, object]


class Intervention(Protocol):
    """Changes calls where they are recorded, so a recording shows what it does.

    ``problem``: the first error of its own; the program's own value stays then. What a class does
    not define changes nothing.
    """

    problem: Exception | None = None

    def hook(self, module_at: Callable[[str], nn.Module | None]) -> list[Handle]:
        """Hook the modules that are concerned. Hooks of a recording must come after these."""

    def operator_inputs(
        self, thread: ThreadState, name: str, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        """Return the arguments of an operator that is about to be called."""
        return args, kwargs

    def run(
        self, call: OpenCall, func: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        """Run an operator, and return its result."""
        return func(*args, **kwargs)
