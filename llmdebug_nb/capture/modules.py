"""Module level: hooks on the modules of a root, there only while a step that was asked for runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from llmdebug_nb.capture import compat
from llmdebug_nb.capture.walk import arguments, leaves, scalar_text

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


def _silent(*_: Any) -> None:
    """What a hook becomes in a copy of the model."""


def _silence() -> Callable[..., None]:
    return _silent


class _Hook:
    """A hook that stays behind: copying or pickling a model in the block copies none of the session."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if not compat.tracing():
            self._function(*args)

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return _silent

    def __reduce__(self) -> tuple[Any, ...]:
        return _silence, ()


class Host(Protocol):
    """What a watch needs of its session."""

    roles: tuple[str, ...]
    recorder: Any
    thread: Any

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def leave(self, watch: Watch) -> None: ...
    def guarded(self, work: Callable[..., None], *args: Any) -> None: ...


class Watch:
    """One module under observation.

    ``entry``: calls of it from outside the root's other modules begin a root call; its hooks then stay
    for the whole session. ``kept``: the filters ask for it.
    """

    def __init__(self, session: Host, root: nn.Module, module: nn.Module, path: str, kept: bool) -> None:
        self.session, self.root, self.module, self.path, self.kept = session, root, module, path, kept
        self.op = type(module).__name__
        self.entry = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        if not self._handles:
            self._handles = [
                self.module.register_forward_pre_hook(_Hook(self.before), with_kwargs=True),
                self.module.register_forward_hook(_Hook(self.after), with_kwargs=True, always_call=self.entry),
            ]

    def detach(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to run. Never raises."""
        self.session.guarded(self._enter, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The module has run, or (entries only) has raised. Never raises."""
        self.session.guarded(self._leave, output)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self.session
        if self.entry:
            session.enter(self, args, kwargs)
        if self.kept and session.thread.on:
            call = session.thread.number(self.path)
            if "input" in session.roles:
                self._observe(call, "input", arguments(args, kwargs))

    def _leave(self, output: Any) -> None:
        session = self.session
        try:
            if self.kept and session.thread.on:
                call = session.thread.finish(self.path)
                raised = output is None and sys.exc_info()[0] is not None
                if call is not None and "output" in session.roles and not raised:
                    self._observe(call, "output", leaves(output))
        finally:
            if self.entry:
                session.leave(self)

    def _observe(self, call: int, role: str, found: Any) -> None:
        recorder, root_call = self.session.recorder, self.session.thread.root_call
        for slot, leaf in found:
            if isinstance(leaf, torch.Tensor):
                recorder.tensor(root_call, self.path, call, role, slot, self.op, leaf)
            else:
                recorder.scalar(root_call, self.path, call, role, slot, *scalar_text(leaf))


def find_entries(root: nn.Module) -> list[nn.Module]:
    """Return the modules whose outermost call begins a root call: the root, its children, and an encoder.

    Encoder-decoder models run their encoder alone before the first decoder call, and some programs
    call `model.model` instead of `model`.
    """
    entries = [root, *root.children()]
    config = getattr(root, "config", None)
    get_encoder: Callable[[], torch.nn.Module] | None = getattr(root, "get_encoder", None)
    if get_encoder is not None and getattr(config, "is_encoder_decoder", False):
        entries.append(get_encoder())
    return entries
