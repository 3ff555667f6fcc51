"""The only home of PyTorch and Transformers internals; each use says what happens without it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_of(tensor: torch.Tensor) -> Any:
    """Return a hashable, weak handle of the tensor's storage, or None where it has none (sparse, wrapped).

    As long as the handle lives, no other storage can take its address; it doesn't keep the memory.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the in-place version counter, or None where torch keeps none (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether `torch.compile` wraps the module: hooks inside it would be traced or never fire."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def hooked_kwargs() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose *global* pre-hook is running.

    Global pre-hooks are not given them; they are read from the frame of `Module._call_impl`.
    Empty where the frame looks different.
    """
    frame = call_frame()
    kwargs = frame.f_locals.get("kwargs") if frame is not None else None
    return dict(kwargs) if isinstance(kwargs, dict) else {}


def with_generation_mixin(wrap: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Call ``wrap(GenerationMixin)`` now, or as soon as the program imports transformers; return how to undo it."""
    name = "transformers.generation.utils"
    undo: list[Callable[[], None]] = []
    if name in sys.modules:
        undo.append(wrap(sys.modules[name].GenerationMixin))
    else:
        finder = _AfterImport(name, lambda module: undo.insert(0, wrap(module.GenerationMixin)))
        sys.meta_path.insert(0, finder)
        undo.append(finder.remove)

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``then(module)`` right after the module of that name was imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, then = spec.loader.exec_module, self._then

            def exec_module(module: Any) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def in_backward() -> bool:
    """Tell whether this thread runs inside autograd's engine: a forward call there is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


def tracing() -> bool:
    """Tell whether the program is being traced or compiled: then values don't exist, and hooks would be traced too."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def call_frame() -> FrameType | None:
    """Return the innermost running frame of torch's module call, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Tell whether ``frame`` is on this thread's stack; None counts as running."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return frame is None or here is frame


def unseen() -> AbstractContextManager[Any]:
    """Return a context in which function and dispatch modes of the program do not see our own reductions."""
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    if not functions and not dispatches:
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    if functions:
        stack.enter_context(torch._C.DisableTorchFunction())
    if dispatches:
        stack.enter_context(_disable_current_modes())
    return stack
