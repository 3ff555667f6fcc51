"""Ways to hook one module: by its own hooks, around its compiled call, or by global hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import nn

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.core.torch_internals import HOOK_DICTS

Args = tuple[object, ...]


class Handle(Protocol):
    """A hook that can be taken off."""

    def remove(self) -> None: ...


class Left:
    """What a copy of a model has in place of a hook. It goes with the first call.

    A model that is pickled has a callable of Python's own there: who loads it needs no package of
    ours.
    """

    def __call__(self, module: nn.Module, *given: object) -> None:
        if len(given) > 2 or torch.compiler.is_compiling():
            return  # behind a call that raised, torch goes through the hooks one by one
        for of_kind in [vars(module).get(name) or {} for name in HOOK_DICTS]:
            for number in [n for n, hook in of_kind.items() if isinstance(hook, Left)]:
                for name in HOOK_DICTS:
                    vars(module).get(name, {}).pop(number, None)

    def __deepcopy__(self, _: object) -> Left:
        return Left()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hook:
    """A hook that copies of a model leave behind: copying or pickling one copies no session.

    It never raises, and does nothing while the program is traced.
    """

    def __init__(
        self,
        guarded: Guarded,
        function: Callable[..., None],
        passes: Callable[..., bool] | None = None,
    ) -> None:
        """``passes``: is asked first. If it returns True, it has done all there is to do.

        It is asked without the module.
        """
        self._guarded, self._function, self._passes = guarded, function, passes

    def __call__(self, module: nn.Module, *args: object) -> None:
        if torch.compiler.is_compiling():  # Dynamo looks into this call, but not into C
            return
        if self._passes is not None and self._passes(*args):
            return
        if not pytorch.tracing():
            self._guarded(self._function, *args)

    def __deepcopy__(self, _: object) -> Left:
        return Left()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return Left().__reduce__()


def hook(module: nn.Module, before: Hook, after: Hook) -> list[Handle]:
    """Call ``before`` and ``after`` around each call of a module."""
    if pytorch.is_compiled_in_place(module):
        return [AroundCompiled(module, before, after)]
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        # always_call: otherwise a call that raises would stay open if the program catches the error
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


class AroundCompiled:
    """Hooks around a module that `module.compile()` compiled together with its own hooks."""

    def __init__(self, module: nn.Module, before: Hook, after: Hook) -> None:
        def wrap(compiled: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                before(module, args, kwargs)
                result = None
                try:
                    result = compiled(*args, **kwargs)
                finally:
                    after(module, args, kwargs, result)
                return result

            return call

        self.remove = pytorch.wrap_compiled_call(module, wrap)


class SharedHook:
    """Hooks on one module by global hooks: `nn.TransformerEncoderLayer` stays on its fast path.

    That layer and its kin leave the path if they find hooks on one of their modules.
    """

    _by_module: ClassVar[dict[int, list[SharedHook]]] = {}  # global hooks serve the whole process
    _handles: ClassVar[list[Handle]] = []

    def __init__(self, module: nn.Module, before: Hook, after: Hook) -> None:
        self._module, self._before, self._after = module, before, after
        cls = type(self)
        cls._by_module.setdefault(id(module), []).append(self)
        if not cls._handles:
            cls._handles += [
                nn.modules.module.register_module_forward_pre_hook(cls._before_all),
                nn.modules.module.register_module_forward_hook(cls._after_all, always_call=True),
            ]

    @classmethod
    def _before_all(cls, module: nn.Module, args: Args) -> None:
        for shared in cls._by_module.get(id(module), ()):
            shared._before(module, args, pytorch.hooked_kwargs())

    @classmethod
    def _after_all(cls, module: nn.Module, args: Args, output: object) -> None:
        for shared in cls._by_module.get(id(module), ()):
            shared._after(module, args, {}, output)

    def remove(self) -> None:
        cls = type(self)
        hooks = cls._by_module.get(id(self._module), [])
        if self in hooks:
            hooks.remove(self)
        if not hooks:
            cls._by_module.pop(id(self._module), None)
        if not cls._by_module:
            while cls._handles:
                cls._handles.pop().remove()
