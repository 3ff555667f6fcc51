"""The text of functions: the lines of a program in which a line that was recorded stands."""

from __future__ import annotations

import inspect
import linecache
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmdebug_nb.core import constants
from llmdebug_nb.core.places import found

_LAMBDA = "<lambda>"


class Function(NamedTuple):
    """The text of a function, or a part of it. ``file``: as a `Frame` names it.

    ``line``: the number of the first of ``lines``, which have no line breaks. ``name``: may have
    the class before it.
    """

    file: str
    line: int
    name: str
    lines: tuple[str, ...]

    def __contains__(self, line: object) -> bool:
        return isinstance(line, int) and self.line <= line < self.line + len(self.lines)

    def at(self, line: int) -> str:
        """Return a line without the space around it; "" for one that is not part of it."""
        return self.lines[line - self.line].strip() if line in self else ""


def block(lines: Sequence[str], first: int, name: str) -> tuple[str, ...]:
    """Return the lines of the function that begins on line ``first``, with its decorators.

    ``lines``: of the whole file, each with its line break. Empty if no function of that name
    begins there: the file has changed since it ran, or can't be read.
    """
    try:
        found_lines = inspect.getblock(list(lines[max(first - 1, 0) :]))
    except (tokenize.TokenError, SyntaxError):
        return ()
    begins = r"\blambda\b" if name == _LAMBDA else rf"\bdef\s+{re.escape(name)}\b"
    if not any(re.search(begins, line) for line in found_lines):
        return ()
    return tuple(line.rstrip("\n") for line in found_lines)


def first_line(lines: Sequence[str], line: int, name: str) -> int | None:
    """Return the line on which the function of this name begins that ``line`` is part of."""
    begins = re.compile(rf"\s*(?:async\s+)?def\s+{re.escape(name)}\b")
    above = range(min(line, len(lines)), max(line - constants.FUNCTION_LINES, 0), -1)
    return next((number for number in above if begins.match(lines[number - 1])), None)


def function_at(file: str, line: int, name: str, near: Path | None = None) -> Function | None:
    """Return the function of a line from a file on this machine, None if it can't be read.

    ``file``: as a `Frame` names it. ``near``: see `places.found`.
    """
    own = name.rpartition(".")[2]
    there = found(file, near)
    lines = linecache.getlines(there) if there is not None else []
    first = first_line(lines, line, own)
    text = () if first is None else block(lines, first, own)
    if first is None or not text:
        return None
    return Function(file, first, name, text[: constants.FUNCTION_LINES])
