"""Signatures and docstrings that list the options of a recording."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from llmdebug_nb.core.options import DumpKeywords, DumpOptions, describe

Function = TypeVar("Function", bound=Callable[..., object])


class _Annotation(str):
    """The source text of an annotation, which signatures show without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _without_quotes(annotation: object) -> object:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Annotation(text) if isinstance(text, str) else annotation


def shows_options(**defaults: object) -> Callable[[Function], Function]:
    """Show the options in the signature and docstring of a function that has ``**options``.

    Notebooks complete and document them from there. ``defaults``: those that the function changes.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [
            parameter.replace(annotation=_without_quotes(parameter.annotation))
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names = {parameter.name for parameter in own}
        options = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(each.name, each.default),
                annotation=_without_quotes(DumpKeywords.__annotations__[each.name]),
            )
            for each in fields(DumpOptions)
            if each.name not in names
        ]
        shown = signature.replace(
            parameters=[*own, *options],
            return_annotation=_without_quotes(signature.return_annotation),
        )
        function.__signature__ = shown  # type: ignore[attr-defined]  # read by `inspect`
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n{describe(**defaults)}\n"
        return function

    return decorate
