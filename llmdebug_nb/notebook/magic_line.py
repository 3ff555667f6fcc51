"""Reads the line of a magic, and shows its errors and the output of its command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from IPython.core.error import UsageError
from IPython.core.magic_arguments import ArgDecorator, parse_argstring

from llmdebug_nb.core.errors import LLMDebugError, nearest


class declared(ArgDecorator):
    """Gives a magic the arguments that a function adds to a parser, as it does for a command."""

    def __init__(self, declare: Callable[[argparse.ArgumentParser], None]) -> None:
        self._declare = declare

    def add_to_parser(self, parser: argparse.ArgumentParser, _: object) -> None:
        self._declare(parser)


@contextmanager
def one_line() -> Iterator[None]:
    """Turn our own errors into one readable line instead of a traceback."""
    try:
        yield
    except LLMDebugError as error:
        raise UsageError(str(error)) from None


def write(stream: str, text: str) -> None:
    """Show a command's output, of ``stdout`` or ``stderr``, as the cell's."""
    print(text, end="", file=getattr(sys, stream), flush=True)


def parse(magic: Callable[..., object], line: str) -> argparse.Namespace:
    """Parse the line of a magic. Raises UsageError, which names the nearest known option."""
    try:
        args: argparse.Namespace = parse_argstring(magic, line)
    except UsageError as error:
        raise UsageError(with_nearest(str(error), long_options(magic))) from None
    for name, value in vars(args).items():
        plain = [_unquoted(one) for one in value] if isinstance(value, list) else _unquoted(value)
        setattr(args, name, plain)
    return args


def with_nearest(error: str, options: Iterable[str]) -> str:
    """Return argparse's error; of an unknown option, with the nearest known one."""
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", error)
    return error + (nearest(unknown[1], options) if unknown else "")


def long_options(magic: Callable[..., object]) -> dict[str, argparse.Action]:
    """Return the options of a magic that begin with two dashes."""
    actions = magic.parser._actions  # type: ignore[attr-defined]  # IPython puts it there
    return {
        name: action
        for action in actions
        for name in action.option_strings
        if name.startswith("--")
    }


def _unquoted(value: object) -> object:
    """Remove the quotes around a word; IPython leaves them."""
    quoted = re.fullmatch(r"(['\"])(.*)\1", value, re.S) if isinstance(value, str) else None
    return quoted[2] if quoted else value
