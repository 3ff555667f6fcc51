"""The only home of PyTorch and Transformers internals; each use says what happens without it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def number_of(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has as long as this one lives."""
    number: int = storage._cdata
    return number


def hold_number(storage: torch.UntypedStorage) -> int:
    """Return the number of a storage, which no other one gets until it was let go. The memory is not kept."""
    number: int = storage._weak_ref()  # type: ignore[no-untyped-call, assignment]
    return number


def let_go(numbers: Iterable[int]) -> None:
    """Give up what `hold_number` holds; as often as it was called."""
    for number in numbers:
        torch.UntypedStorage._free_weak_ref(number)  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> Any:
    """Return a hashable, weak handle of the tensor's storage, or None where it has none (sparse, wrapped).

    As long as the handle lives, no other storage can take its address; it doesn't keep the memory.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    try:
        return number_of(a.untyped_storage()) == number_of(b.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return False


def size_of(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor has; of one that is only traced, what they are expected to be."""
    number: Any = tensor.numel()
    return number if type(number) is int else int(number.node.hint or 0)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the in-place version counter, or None where torch keeps none (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether `torch.compile` wraps the module: hooks inside it would be traced or never fire."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Tell whether `module.compile()` was called, which compiles the hooks of a module as well."""
    return getattr(module, "_compiled_call_impl", None) is not None


def hooked_kwargs() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose *global* pre-hook is running.

    Global pre-hooks are not given them; they are read from the frame of `Module._call_impl`.
    Empty where the frame looks different.
    """
    frame = call_frame()
    kwargs = frame.f_locals.get("kwargs") if frame is not None else None
    return dict(kwargs) if isinstance(kwargs, dict) else {}


def before_first_call(then: Callable[[torch.nn.Module], bool]) -> Callable[[], None]:
    """Have ``then(module)`` called before modules run, until it returns True; return how to undo it.

    It comes before `Module.__call__`, which then finds all hooks that it adds: they see this very call.
    """
    original = torch.nn.Module.__call__
    done = False

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not done and not tracing() and then(self):
            undo()
        return original(self, *args, **kwargs)

    def undo() -> None:
        nonlocal done
        done = True
        if torch.nn.Module.__call__ is call:  # else somebody has wrapped it since
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
    return undo


def with_generation_mixin(wrap: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Call ``wrap(GenerationMixin)`` now, or as soon as the program imports transformers; return how to undo it."""
    return with_module("transformers.generation.utils", lambda module: wrap(module.GenerationMixin))


def with_module(name: str, wrap: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Call ``wrap(module)`` now, or as soon as the program imports the module of that name; return how to undo it."""
    undo: list[Callable[[], None]] = []
    if sys.modules.get(name) is not None:  # None: it is not to be imported
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


def in_model() -> bool:
    """Tell whether the running code is called by a module that has parameters, or holds one that has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None:
            return True
        frame = frame.f_back
    return False


def is_running(frame: FrameType | None) -> bool:
    """Tell whether ``frame`` is on this thread's stack; None counts as running."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return frame is None or here is frame


class unseen:
    """Function and dispatch modes and transforms of `torch.func` do not see what is done in here."""

    def __enter__(self) -> None:
        guards = (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._DisableFuncTorch(),
        )
        self._guards: tuple[Any, ...] = guards
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def watched() -> bool:
    """Tell whether a mode or transform, the program's or ours, would see our own reductions."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


# -- autograd ---------------------------------------------------------------------------------------


def with_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put ``wrap(run)`` in place of what `backward` and `grad` call to run the engine; return how to undo it.

    Where torch has no such function, backward passes go unnoticed: gradients of modules are still
    recorded, operators of the backward pass are not.
    """
    name = "_engine_run_backward"
    original = getattr(torch.autograd, name, None)
    if original is None:
        return lambda: None
    setattr(torch.autograd, name, wrap(original))
    return lambda: setattr(torch.autograd, name, original)


def autograd_clock() -> int:
    """Return this thread's count of autograd nodes: the next one made gets this sequence number."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def clock_of(node: Any) -> int:
    """Return a node's sequence number; an accumulator of a leaf counts as older than all."""
    return -1 if node.name() == "torch::autograd::AccumulateGrad" else int(node._sequence_nr())


def running_node() -> Any:
    """Return the autograd node that runs in this thread, or None."""
    return torch._C._current_autograd_node()  # type: ignore[attr-defined]


def accumulator_of(leaf: torch.Tensor) -> Any:
    """Return the node that adds up the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def is_hooked(handle: Any) -> bool:
    """Tell whether what a hook was put on still exists."""
    return handle.hooks_dict_ref() is not None


is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of `torch.func`


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func` transforms have wrapped: all of a batch, say."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv",
)  # fmt: skip


def with_collectives(
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Put ``wrap(name, function)`` in place of the functions of `torch.distributed`; return how to undo it."""
    home = torch.distributed
    if not home.is_available():
        return lambda: None
    originals = {name: getattr(home, name) for name in COLLECTIVES if hasattr(home, name)}
    for name, function in originals.items():
        setattr(home, name, wrap(name, function))

    def undo() -> None:
        for name, function in originals.items():
            setattr(home, name, function)

    return undo


# -- modes ------------------------------------------------------------------------------------------


def has_mode(mode: Any) -> bool:
    """Tell whether a function or dispatch mode is on this thread's stack."""
    return any(mode is other for other in _stack_of(mode)[0])


def push_mode(mode: Any) -> bool:
    """Put a mode at the bottom of this thread's stack; False where it is on it.

    Modes are taken off from the top: at the bottom, ours is in the way of none that the program puts on before or
    after. Pushed directly, it also leaves the flags alone by which the program's modes remember each other.
    """
    if has_mode(mode):
        return False
    with _without(mode, None) as home:
        home._push_mode(mode)
    return True


def pop_mode(mode: Any) -> bool:
    """Take a mode off this thread's stack, wherever in it it is; False where it isn't."""
    if not has_mode(mode):
        return False
    with _without(mode, mode) as home:
        home._pop_mode()
    return True


@contextmanager
def _without(kind: Any, below: Any) -> Iterator[Any]:
    """Take the program's modes of that kind off this thread's stack down to ``below`` (None: all), and put them back."""
    stack, home = _stack_of(kind)
    above = []
    while stack and stack[-1] is not below and getattr(stack[-1], "_mode_key", None) is None:
        above.append(stack.pop())
        home._pop_mode()
    try:
        yield home
    finally:
        for other in reversed(above):
            home._push_mode(other)


def _stack_of(mode: Any) -> tuple[list[Any], Any]:
    """Return the modes of that kind on this thread's stack, and the module that keeps them."""
    from torch import overrides
    from torch.utils import _python_dispatch as dispatch

    if isinstance(mode, overrides.TorchFunctionMode):
        return overrides._get_current_function_mode_stack(), overrides  # type: ignore[no-untyped-call]
    return dispatch._get_current_dispatch_mode_stack(), dispatch


def is_composite(func: Any) -> bool:
    """Tell whether the dispatcher would take an operator apart, had inference mode not kept it whole."""
    key = "CompositeImplicitAutograd"
    return bool(
        func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    )


def with_fast_paths(ours: type) -> Callable[[], None]:
    """Let `nn.MultiheadAttention` and its kin take their fused path under function modes of class ``ours``; return how to undo it.

    They ask `torch.overrides.has_torch_function`, which says yes under any function mode, before they choose.
    """
    original = torch.overrides.has_torch_function

    def ask(arguments: Any) -> bool:
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not all(isinstance(mode, ours) for mode in modes):
            return bool(original(arguments))
        return any(_overrides(type(argument)) for argument in arguments)

    torch.overrides.has_torch_function = ask  # type: ignore[assignment]

    def undo() -> None:
        torch.overrides.has_torch_function = original

    return undo


def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    plain = (torch.Tensor, torch.nn.Parameter)
    return (
        own is not None and kind not in plain and own is not torch._C._disabled_torch_function_impl
    )


def force_eager() -> Callable[[], None]:
    """Have compiled code run eagerly; return how to undo it. What is compiled stays compiled."""
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def compiled_parts(module: torch.nn.Module) -> list[str]:
    """Return the names of compiled functions that a module holds as attributes: they run past hooks and modes."""
    held = {**vars(type(module)), **vars(module)}
    return [
        name
        for name, value in held.items()
        if callable(value) and hasattr(value, "_torchdynamo_orig_callable")
    ]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers that spread it over ranks: its paths are those that it has without them."""
    while type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        module = module.module  # type: ignore[assignment]
    return module


def compiled_root(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    return (
        getattr(module, "_orig_mod", module)
        if type(module).__name__ == "OptimizedModule"
        else module
    )
