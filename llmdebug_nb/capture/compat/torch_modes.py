"""Internals of PyTorch's function and dispatch modes, and of the dispatcher itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from llmdebug_nb.capture.compat.pytorch import Undo
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.torch_internals import overloads

P = ParamSpec("P")
R = TypeVar("R")
TorchDispatchMode = _python_dispatch.TorchDispatchMode
Mode = TorchFunctionMode | TorchDispatchMode
OpOverload = torch._ops.OpOverload
# of tensors that function modes need not see
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


class Untraced:
    """A dispatch mode under which nothing is ever compiled: torch need not hide it from Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def hidden_from_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch compiles nothing of, nor of what it calls."""
    hidden: Callable[P, R] = torch._compile._disable_dynamo(function, recursive=True)
    return hidden


def kernel_of(operator: Callable[..., object]) -> Callable[..., object]:
    """Return what calling an operator of the dispatcher calls: one frame of Python less."""
    is_usual = type(operator) is OpOverload
    return operator._op if is_usual else operator  # type: ignore[attr-defined, no-any-return]


def out_of_sight(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call work that function and dispatch modes and `torch.func` transforms don't see.

    Only a function that no interrupt cuts short may call it; others call `run_unseen`. All three
    guards are in C: a handler of a signal that raises leaves none of them on.
    """
    functions, dispatched = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
    with functions, dispatched, torch._C._DisableFuncTorch():
        return work(*args, **kwargs)


def no_subclass_sees(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call work that no Tensor subclass sees, where no mode or transform is on: it costs less.

    Only a function that no interrupt cuts short may call it.
    """
    with torch._C.DisableTorchFunction():
        return work(*args, **kwargs)


@interrupts.unbroken
def run_unseen(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call our own work, which uses tensors, where no mode or transform sees it."""
    return out_of_sight(work, *args, **kwargs)


_functions, _dispatched = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


class _Observed(threading.local):
    """``here``: torch tells us of the operators of this thread, our own among them."""

    here = False


observed = _Observed()


def watched() -> bool:
    """Return whether any mode or transform, the program's or ours, would see our own operators."""
    return bool(_functions() or _dispatched() or observed.here or _transform() is not None)


def may_compile() -> bool:
    """Return whether Dynamo looks at what this thread runs, and may run operators to compile it."""
    ask = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return ask is None or ask() is not None


# what to ask, and the answers where this thread runs outside of autograd's engine, TorchScript
# traces nothing, and no transform wraps tensors; all in C, where no handler of a signal can run
UNWATCHED: tuple[tuple[Callable[[], object], object], ...] = (
    (torch._C._current_graph_task_id, -1),
    (torch._C._get_tracing_state, None),
    (_transform, None),
)
# how many function modes there are, and the context in which they see nothing
FUNCTION_MODES: tuple[Callable[[], int], Callable[[], object]] = (
    _functions,
    torch._C.DisableTorchFunction,
)


def push_mode(mode: Mode) -> bool:
    """Put a mode at the bottom of this thread's stack; return False if it is on it already.

    Modes are taken off from the top: at the bottom, ours never gets in the way of the program's.
    Pushed directly, it leaves alone the flags by which the program's modes remember each other.
    """
    if _is_pushed(mode):
        return False
    with _modes_removed(mode, None) as home:
        home._push_mode(mode)
    return True


def pop_mode(mode: Mode) -> bool:
    """Take a mode off this thread's stack, at any depth; return False if it isn't on it."""
    if not _is_pushed(mode):
        return False
    with _modes_removed(mode, mode) as home:
        home._pop_mode()
    return True


def _is_pushed(mode: Mode) -> bool:
    return any(mode is other for other in _stack_of(mode)[0])


@contextmanager
def _modes_removed(like: Mode, below: Mode | None) -> Iterator[ModuleType]:
    """Take the program's modes above ``below`` (None: all) off the stack; then put them back."""
    stack, home = _stack_of(like)
    above = []
    while stack and stack[-1] is not below and getattr(stack[-1], "_mode_key", None) is None:
        above.append(stack.pop())
        home._pop_mode()
    try:
        yield home
    finally:
        for other in reversed(above):
            home._push_mode(other)


def _stack_of(mode: Mode) -> tuple[list[Mode], ModuleType]:
    """Return the modes of that kind on this thread's stack, and the module that keeps them."""
    if isinstance(mode, TorchFunctionMode):
        modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return modes, overrides
    return list(_python_dispatch._get_current_dispatch_mode_stack()), _python_dispatch


def wrapper(cls: type, like: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of a class without memory of its own, in the place and shape of another."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(),
        dtype=dtype, device=like.device, layout=like.layout, requires_grad=False,
    )  # fmt: skip


def operator(name: str, overload: str) -> torch._ops.OpOverload | None:
    """Return an operator by the dispatcher's name of it, ``aten::add`` and ``Tensor``, or None."""
    space, _, bare = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), bare, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def overload(name: str) -> torch._ops.OpOverload | None:
    """Return the aten operator of a name (``add.Tensor``, ``mm``), or None."""
    base, _, kind = name.partition(".")
    return operator(f"aten::{base}", kind)


def names_of(schema: torch.FunctionSchema) -> tuple[str | None, ...]:
    """Return the names of the arguments of an operator that may be given by position."""
    return tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)


def given_by_name(
    schema: torch.FunctionSchema, args: Iterable[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by their names in the schema of its operator."""
    return dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)


def returns_view(schema: torch.FunctionSchema) -> bool:
    """Tell whether an operator returns a view of what it is given."""
    aliases = (each.alias_info for each in schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def draws(
    operator: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]
) -> bool:
    """Tell whether a call draws random numbers; attention does if it drops something."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    schema = operator._schema  # type: ignore[attr-defined]
    optional = any(each.name == "dropout_p" for each in schema.arguments)
    return not optional or given_by_name(schema, args, kwargs).get("dropout_p", 0.0) != 0.0


def agreed_names(operator: str) -> tuple[str | None, ...]:
    """Return the names of an aten operator's arguments on which all its overloads agree.

    None in the place of others; empty if there is no such operator.
    """
    schemas = [each._schema for each in overloads(operator)]
    known = [
        names_of(schema)
        for schema in schemas  # those without tensors are TorchScript's, for numbers and texts
        if any("Tensor" in str(argument.type) for argument in schema.arguments)
    ]
    return tuple(
        places[0] if all(name == places[0] for name in places) else None
        for places in zip(*known, strict=False)
    )


def is_composite(operator: torch._ops.OpOverload[..., Any]) -> bool:
    """Return whether the dispatcher decomposes an operator outside of inference mode.

    Those of TorchScript (``prim::device``) it does not know.
    """
    key = "CompositeImplicitAutograd"
    name = operator.name()  # type: ignore[no-untyped-call]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return bool(operator._can_decompose() and has_kernel(name, key))
    except RuntimeError:
        return False


def with_fast_paths(our_mode: type) -> Undo:
    """Let `nn.MultiheadAttention` and its kin take their fused path under modes of that class.

    They choose by `overrides.has_torch_function`, which says yes under any function mode.
    Return how to undo it.
    """
    original = overrides.has_torch_function

    def ask(arguments: Iterable[object]) -> bool:
        modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not all(isinstance(mode, our_mode) for mode in modes):
            return bool(original(arguments))
        return any(_overrides(type(argument)) for argument in arguments)

    overrides.has_torch_function = ask  # type: ignore[assignment]

    def undo() -> None:
        overrides.has_torch_function = original

    return undo


def _overrides(cls: type) -> bool:
    own = getattr(cls, "__torch_function__", None)
    usual = (torch.Tensor, torch.nn.Parameter)
    return (
        own is not None and cls not in usual and own is not torch._C._disabled_torch_function_impl
    )
