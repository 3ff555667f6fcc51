"""Module level: hooks on the modules of a root, there only while a step that was asked for runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


def _silent(*_: Any) -> None:
    """What a hook becomes in a copy of the model."""


def _silence() -> Callable[..., None]:
    return _silent


class _Hook:
    """A hook that stays behind: copying or pickling a model in the block copies none of the session.

    It never raises, and is deaf while the program is traced.
    """

    def __init__(self, guarded: Callable[..., Any], function: Callable[..., None]) -> None:
        self._guarded, self._function = guarded, function

    def __call__(self, _: Any, *given: Any) -> None:
        if not pytorch.tracing():
            self._guarded(self._function, *given)

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return _silent

    def __reduce__(self) -> tuple[Any, ...]:
        return _silence, ()


class Host(Protocol):
    """What a watch needs of its session."""

    thread: Any
    observer: Any

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def leave(self, watch: Watch) -> None: ...
    def guarded(self, work: Callable[..., Any], *args: Any) -> Any: ...
    def recomputes(self) -> bool: ...


class Watch:
    """One module under observation.

    ``entry``: calls of it from outside the root's other modules begin a root call; its hooks then stay
    for the whole session. ``kept``: the filters ask for it. ``counted``: its calls count, for the ids of those that are kept.
    ``fused``: it is part of a module that takes a faster path only as long as none of its parts has hooks.
    ``hooked``: what has the hooks: the module, and what `torch.compile` made of it.
    """

    def __init__(
        self, session: Host, root: nn.Module, module: nn.Module, path: str, names: tuple[str, ...]
    ) -> None:
        self.session, self.root, self.module, self.path, self.names = (
            session,
            root,
            module,
            path,
            names,
        )
        self.op = type(module).__name__
        self.hooked: list[nn.Module] = [module]
        self.kept = self.counted = self.entry = self.fused = False
        self._handles: list[RemovableHandle | _Shared | _Around] = []

    def attach(self) -> None:
        if self._handles:
            return
        before, after = (_Hook(self.session.guarded, work) for work in (self._enter, self._leave))
        if self.fused:
            self._handles = [_Shared(self.module, before, after)]
            return
        for module in self.hooked:
            if pytorch.is_compiled_in_place(module):
                self._handles.append(_Around(module, before, after))
                continue
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            # always: else a call that raises, and whose error is caught further out, would seem to go on
            self._handles.append(
                module.register_forward_hook(after, with_kwargs=True, always_call=True)
            )

    def detach(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def begin_late(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do what the hook would have done: hooks added while a call's pre-hooks run fire from the next call on."""
        self._enter(args, kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self.session
        if pytorch.in_backward():
            if session.recomputes():
                session.observer.begin_module(self.path, self.op, self.kept, args, kwargs, True)
            return
        if self.entry:
            session.enter(self, args, kwargs)
        if session.thread.on:
            session.observer.begin_module(self.path, self.op, self.kept, args, kwargs, False)

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The module has run, or (where the hook is always called) has raised."""
        session = self.session
        backward = pytorch.in_backward()
        try:
            if session.thread.on or backward:
                call = session.thread.leave(self.path)
                raised = output is None and sys.exc_info()[0] is not None
                if call is not None and not raised:
                    session.observer.end_module(call, output)
        finally:
            if self.entry and not backward:
                session.leave(self)


class _Around:
    """What hooks do, around a module that `module.compile()` compiled together with its hooks."""

    def __init__(self, module: nn.Module, before: _Hook, after: _Hook) -> None:
        original: Any = module._compiled_call_impl
        self._module, self._original = module, original

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args, kwargs)
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                after(module, args, kwargs, result)
            return result

        self._call = vars(module)["_compiled_call_impl"] = call

    def remove(self) -> None:
        if vars(self._module).get("_compiled_call_impl") is self._call:
            vars(self._module)["_compiled_call_impl"] = self._original


class _Shared:
    """Hooks on one module by way of global ones, which `nn.TransformerEncoderLayer` and its kin don't look for."""

    _watched: dict[int, list[_Shared]] = {}  # noqa: RUF012 - one table for the process, as global hooks are
    _handles: list[Any] = []  # noqa: RUF012

    def __init__(self, module: nn.Module, before: _Hook, after: _Hook) -> None:
        self._module, self._before, self._after = module, before, after
        cls = type(self)
        cls._watched.setdefault(id(module), []).append(self)
        if not cls._handles:
            cls._handles += [
                nn.modules.module.register_module_forward_pre_hook(cls._all_before),
                nn.modules.module.register_module_forward_hook(cls._all_after, always_call=True),
            ]

    @classmethod
    def _all_before(cls, module: nn.Module, args: Any) -> None:
        for shared in cls._watched.get(id(module), ()):
            shared._before(module, args, pytorch.hooked_kwargs())

    @classmethod
    def _all_after(cls, module: nn.Module, args: Any, output: Any) -> None:
        for shared in cls._watched.get(id(module), ()):
            shared._after(module, args, {}, output)

    def remove(self) -> None:
        cls = type(self)
        here = cls._watched.get(id(self._module), [])
        if self in here:
            here.remove(self)
        if not here:
            cls._watched.pop(id(self._module), None)
        if not cls._watched:
            while cls._handles:
                cls._handles.pop().remove()


def find_fused(root: nn.Module) -> set[int]:
    """Return the ids of the modules that may only be hooked by global hooks."""
    layers = [module for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return {id(module) for layer in layers for module in layer.modules()}


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


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers by name; offloaded ones from where `accelerate` keeps them."""
    own = {**module._parameters, **module._buffers}
    kept = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    found = {}
    for name, tensor in own.items():
        if tensor is not None and tensor.is_meta and kept is not None:
            tensor = kept[name]
        if tensor is not None:
            found[name] = tensor
    return found


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own plain attributes by name: numbers, flags, texts and None, and whether it is training."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_")
    }
