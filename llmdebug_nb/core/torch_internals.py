"""The private parts of PyTorch that explaining needs.

Those that recording needs are in `capture/compat/`. The stages may not import each other, so these
have a home of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

import torch

# torch's functions that run in C without a Python signature (torch.nn.RNN calls them)
VF = torch._VF
# the dicts in which a module keeps its hooks
HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

# types of arguments of operators
_FRACTIONS = re.compile(r"\b(number|float)\b")
TENSOR_DICTS = ("_buffers", "_parameters")
# what a module has in dicts of its own, by the names of these
Registered = dict[str, dict[object, object]]


@functools.cache
def dispatched_operators() -> frozenset[str]:
    """Return the names of all dispatcher operators: ``aten::add.Tensor``."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def has_own_kernel(name: str) -> bool:
    """Tell whether aten has an operator of this name that is not made of others."""
    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key
    return f"aten::{name}" in dispatched_operators() and not made_of_others(
        f"aten::{name}", "CompositeImplicitAutograd"
    )


@functools.cache
def overridable_functions() -> frozenset[int]:
    """Return the ids of the functions that torch itself lists as operators."""
    functions = torch.overrides.get_overridable_functions()
    return frozenset(id(function) for several in functions.values() for function in several)


def is_tensor_method(function: object, name: str) -> bool:
    """Tell whether a function is a method of tensors in C; torch may list another object for it."""
    kinds = ("method_descriptor", "wrapper_descriptor")
    return type(function).__name__ in kinds and hasattr(torch.Tensor, name)


def schema_default(operator: str, argument: str) -> object:
    """Return the default of an argument by the schema of an aten operator; None if unknown."""
    for overload in overloads(operator)[:1]:
        for each in overload._schema.arguments:
            if each.name == argument and each.has_default_value():
                return each.default_value
    return None


def overloads(operator: str) -> list[torch._ops.OpOverload]:
    """Return the overloads of an aten operator; none if there is no such operator."""
    packet = getattr(torch.ops.aten, operator, None)
    names = getattr(packet, "overloads", list)  # `torch.ops.aten.name` is a text
    return [getattr(packet, name) for name in names()]


@functools.cache
def takes_fractions(operator: str, argument: str) -> bool:
    """Tell whether an aten operator takes a fraction for an argument, given by name or place.

    An operator that has none takes lengths, axes and counts there, if it takes numbers at all.
    """
    return any(
        argument in (each.name, str(place)) and _FRACTIONS.search(str(each.type))
        for overload in overloads(operator)
        for place, each in enumerate(overload._schema.arguments)
    )


@functools.cache
def draws(operator: str) -> bool:
    """Tell whether an aten operator draws random numbers whenever it is called in training.

    Attention and LSTMs do so only if they drop something.
    """
    return any(
        torch.Tag.nondeterministic_seeded in overload.tags
        and not {each.name for each in overload._schema.arguments} & {"dropout_p", "dropout"}
        for overload in overloads(operator)
    )


def registered(module: torch.nn.Module, names: Iterable[str] = TENSOR_DICTS) -> Registered:
    """Return copies of some dicts of a module."""
    of_module = vars(module)
    return {name: dict(of_module[name]) for name in names if name in of_module}


def register_again(module: torch.nn.Module, before: Registered) -> None:
    """Put back what `registered` returned, and remove what was added since."""
    for name, was in before.items():
        now = vars(module)[name]
        now.clear()
        now.update(was)


@functools.cache
def decompositions() -> dict[object, Callable[..., object]]:
    """Return torch's own formulas of its operators: dispatcher operator -> Python function."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table.items())


def is_fake(cls: type) -> bool:
    """Return whether tensors of a class stand for values while a program is exported or traced."""
    return cls.__name__ == "FakeTensor" and cls.__module__.startswith("torch.")
