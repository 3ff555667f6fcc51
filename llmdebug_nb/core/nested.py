"""Values inside the arguments and results of operators, which may be lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

T = TypeVar("T")


def mapped(value: T, change: Callable[[object], object]) -> T:
    """Return a value with ``change(leaf)`` in place of all that is no list, tuple or mapping.

    Containers are copied, never written to.
    """
    other: object
    if isinstance(value, (list, tuple)):
        parts = [mapped(each, change) for each in value]
        other = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, Mapping):
        other = {name: mapped(each, change) for name, each in value.items()}
    else:
        other = change(value)
    return cast(T, other)
