"""Internals of PyTorch and Transformers, used only here. Docstrings name the effect of a lack."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node as AutogradNode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

Function = Callable[..., object]
Undo = Callable[[], None]

# -- storages -------------------------------------------------------------------------------------


def storage_number(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one lives."""
    number: int = storage._cdata
    return number


def storage_numbers(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """Return the numbers of the storages of tensors; None if one has no storage."""
    try:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def reserve_storage_number(storage: torch.UntypedStorage) -> int:
    """Return the number of a storage and keep it from others until `release_storage_numbers`.

    The memory is not kept.
    """
    number: int = storage._weak_ref()  # type: ignore[no-untyped-call, assignment]
    return number


# releases a number that `reserve_storage_number` returned, once per call of it
release_storage_number: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


def release_storage_numbers(numbers: Iterable[int]) -> None:
    """Release numbers that `reserve_storage_number` returned."""
    for number in numbers:
        release_storage_number(number)


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a hashable, weak handle of a tensor's storage; None if it has no storage (sparse).

    While the handle lives, no other storage can take its address; it doesn't keep the memory.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same storage."""
    try:
        return storage_number(a.untyped_storage()) == storage_number(b.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return False


def size_of(tensor: torch.Tensor) -> int:
    """Return the element count of a tensor; for a traced one, the count the tracer expects."""
    number: Any = tensor.numel()
    return number if type(number) is int else int(number.node.hint or 0)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the in-place version counter, or None if torch keeps none (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


# -- devices --------------------------------------------------------------------------------------

# functions of CUDA that return the stream of a device, the number of the current device, and
# whether the current stream captures a graph; absent in builds without CUDA
CUDA_STATE: tuple[Callable[..., object], ...] = tuple(
    getattr(torch._C, name)
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_isCurrentStreamCapturing")
    if hasattr(torch._C, name)
)

# -- modules --------------------------------------------------------------------------------------

MODULE_CALL = torch.nn.Module._call_impl.__code__


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own parameters and buffers by name."""
    return {**module._parameters, **module._buffers}


def parameters_in(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters that modules own; `parameters()` makes a list of all parts first."""
    each = (module._parameters.values() for module in modules)
    return [parameter for own in each for parameter in own if parameter is not None]


def children_in(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module | None]:
    """Return what lies directly in modules; `children()` leaves out what comes twice."""
    return [child for module in modules for child in module._modules.values()]


def offloaded_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a module that `accelerate` keeps elsewhere; else nothing."""
    return getattr(getattr(module, "_hf_hook", None), "weights_map", None) or {}


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` wraps a module: hooks in it would be traced or never fire.

    `torch.compiler.disable` wraps one too, so that it is never compiled.
    """
    context = type(getattr(module, "dynamo_ctx", None)).__name__
    is_wrapped = type(module).__name__ == "OptimizedModule" and context != "DisableContext"
    return is_compiled_in_place(module) or is_wrapped


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called, which compiles a module's hooks as well."""
    return getattr(module, "_compiled_call_impl", None) is not None


def wrap_compiled_call(module: torch.nn.Module, wrap: Callable[[Function], Function]) -> Undo:
    """Put ``wrap(call)`` in place of the compiled call of a module; return how to undo it."""
    original: Any = module._compiled_call_impl
    call = vars(module)["_compiled_call_impl"] = wrap(original)

    def undo() -> None:
        if vars(module).get("_compiled_call_impl") is call:
            vars(module)["_compiled_call_impl"] = original

    return undo


def compiled_parts(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's attributes that are compiled functions.

    They bypass hooks and modes. One that `torch.compiler.disable` returned is not compiled, though
    it is wrapped in the same way.
    """
    attributes = {**vars(type(module)), **vars(module)}
    return [
        name
        for name, value in attributes.items()
        if callable(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not getattr(value, "_torchdynamo_disable", False)
    ]


def compiled_root(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    wraps = type(module).__name__ == "OptimizedModule"
    return getattr(module, "_orig_mod", module) if wraps else module


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers that distribute it over ranks: its paths stay the same."""
    while type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        module = module.module  # type: ignore[assignment]
    return module


def force_eager() -> Undo:
    """Run compiled code eagerly; return how to undo it. Nothing is compiled anew afterwards."""
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


# -- running calls --------------------------------------------------------------------------------


_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return whether this thread runs inside autograd's engine.

    A forward call there is a recomputation by a checkpoint.
    """
    return _graph_task() != -1


def tracing() -> bool:
    """Return whether the program is being traced or compiled: there are no values to record."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def module_call_frame() -> FrameType | None:
    """Return the innermost running frame of torch's module call, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame


def hooked_kwargs() -> dict[str, object]:
    """Return the keyword arguments of the module call whose *global* pre-hook is running.

    Global pre-hooks do not receive them; they are read from the frame of `Module._call_impl`.
    Empty if that frame looks different.
    """
    frame = module_call_frame()
    kwargs = frame.f_locals.get("kwargs") if frame is not None else None
    return dict(kwargs) if isinstance(kwargs, dict) else {}


def in_model() -> bool:
    """Return whether a module with parameters, its own or of submodules, is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None:
            return True
        frame = frame.f_back
    return False


def is_running(frame: FrameType | None) -> bool:
    """Return whether a frame is on this thread's stack; None counts as running."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return frame is None or here is frame


def before_first_call(callback: Callable[[torch.nn.Module], bool]) -> Undo:
    """Call ``callback(module)`` before modules run, until it returns True; return how to undo it.

    It runs before `Module.__call__`, which then finds all hooks that the callback adds: they see
    this very call.
    """
    original = torch.nn.Module.__call__
    done = False

    def call(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        if not done and not tracing() and callback(self):
            undo()
        return original(self, *args, **kwargs)

    def undo() -> None:
        nonlocal done
        done = True
        if torch.nn.Module.__call__ is call:  # otherwise somebody has wrapped it since
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    return undo


# -- imports --------------------------------------------------------------------------------------


def with_generation_mixin(wrap: Callable[[Any], Undo]) -> Undo:
    """Call ``wrap(GenerationMixin)`` once transformers is imported; return how to undo it."""
    return with_module("transformers.generation.utils", lambda module: wrap(module.GenerationMixin))


def with_module(name: str, wrap: Callable[[Any], Undo]) -> Undo:
    """Call ``wrap(module)`` as soon as the module of that name is imported, or now if it is.

    Return how to undo it.
    """
    undo: list[Undo] = []
    if sys.modules.get(name) is not None:  # None: importing it is forbidden
        undo.append(wrap(sys.modules[name]))
    else:
        finder = _AfterImport(name, lambda module: undo.insert(0, wrap(module)))
        sys.meta_path.insert(0, finder)
        undo.append(finder.remove)

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``callback(module)`` right after the module of that name was imported."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name, self._callback = name, callback

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, callback = spec.loader.exec_module, self._callback

            def exec_module(module: ModuleType) -> None:
                load(module)
                callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# -- autograd -------------------------------------------------------------------------------------


def with_engine(wrap: Callable[[Function], Function]) -> Undo:
    """Put ``wrap(run)`` in place of the function by which `backward` and `grad` run the engine.

    Return how to undo it. If torch has no such function, backward passes go unnoticed: gradients of
    modules are still recorded, operators of the backward pass are not.
    """
    name = "_engine_run_backward"
    original = getattr(torch.autograd, name, None)
    if original is None:
        return lambda: None
    setattr(torch.autograd, name, wrap(original))
    return lambda: setattr(torch.autograd, name, original)


# this thread's count of autograd nodes: the sequence number of the next one
autograd_clock: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def clock_of(node: AutogradNode) -> int:
    """Return a node's sequence number; the accumulator of a leaf counts as older than all."""
    return -1 if node.name() == "torch::autograd::AccumulateGrad" else int(node._sequence_nr())


def running_node() -> AutogradNode | None:
    """Return the autograd node that runs in this thread, or None."""
    node: AutogradNode | None = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return node


is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of `torch.func`


def accumulator_of(leaf: torch.Tensor) -> AutogradNode | None:
    """Return the node that adds up the gradient of a leaf; None if `torch.func` wraps it."""
    return None if is_wrapped(leaf) else torch.autograd.graph.get_gradient_edge(leaf).node


def is_hooked(handle: RemovableHandle) -> bool:
    """Return whether the object that a hook was put on still exists."""
    return handle.hooks_dict_ref() is not None


is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of `torch.func`


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that transforms of `torch.func` wrap; of a batch, all of it."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
