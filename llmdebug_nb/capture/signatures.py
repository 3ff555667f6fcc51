"""The parameter names of modules and functions: what arguments given by position are called."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

from torch import nn

Parameters = tuple[str | None, ...]  # by position; None: the parameter has no certain name

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = re.compile(r"kwargs\.((?:\\\.|[^.])+)")


def parameters_of(function: Callable[..., object]) -> Parameters:
    """Return the names of the parameters that can be given by position; those of ``*args`` not.

    A function without a readable signature (one in C, say) has none.
    """
    try:
        signature = inspect.signature(function)
    except Exception:  # code of the program computes some signatures, and may raise anything
        return ()
    return tuple(name for name, each in signature.parameters.items() if each.kind in _BY_POSITION)


class Signatures:
    """The parameters of `forward` of modules, read once for each class."""

    def __init__(self) -> None:
        self._known: dict[object, Parameters] = {}

    def of(self, module: nn.Module) -> Parameters:
        """Return the parameters of a module's forward. A module may have a forward of its own."""
        own = vars(module).get("forward")
        key = type(module) if own is None else own
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = parameters_of(module.forward)
        return known


@functools.lru_cache(4096)  # slots of functions and classes: a program uses a few hundred
def argument_of(slot: str, parameters: Parameters) -> str | None:
    """Return the name of the argument that a slot is or is a part of, or None.

    ``1.0`` is the name of parameter 1, ``kwargs.mask`` is ``mask``.
    """
    by_keyword = _KEYWORD.match(slot)
    if by_keyword is not None:
        return by_keyword[1].replace("\\.", ".")
    place = slot.partition(".")[0]
    at = int(place) if place.isdecimal() else len(parameters)
    return parameters[at] if at < len(parameters) else None
