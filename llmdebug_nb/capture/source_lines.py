"""Lines of the program, as a person names them, and the code that stands there.

The code goes into the dump, so that it can be quoted where the program's files are not.
"""

from __future__ import annotations

import inspect
import linecache
from types import CodeType
from typing import NamedTuple

from torch import nn

from llmdebug_nb.capture.compat.ipython import cell_of
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import Frame

LONGEST_LINE = 200  # characters of a line: more than any style allows
_DECORATORS = 20  # lines between the first decorator of a function and its `def`


def named(file: str) -> str:
    """Return the name of a file in a dump; ``cell 3`` for the code of a notebook's cell."""
    cell = cell_of(file)
    return shown(file) if cell is None else f"cell {cell}"


def code_at(file: str, line: int) -> str:
    """Return the line of code, "" if it can't be read. ``file``: not yet `named`.

    A secret that stands in it is masked.
    """
    return masked(linecache.getline(file, line).strip())[:LONGEST_LINE]


def code_of(frame: str) -> str:
    """Return the line of code of a frame as text, "" if it can't be read."""
    read = Frame.read(frame)
    return "" if read is None else code_at(read.file, read.line)


def place_of(frame: str) -> str:
    """Return the text of a frame with its file `named`."""
    read = Frame.read(frame)
    return frame if read is None else str(read._replace(file=named(read.file)))


class Forward(NamedTuple):
    """The forward of a module. ``first``: its first line, whose text is ``line``."""

    first: Frame
    line: str
    code: CodeType


def forward_of(module: nn.Module) -> Forward | None:
    """Return a module's forward, its own if it was given one; None if it has none in Python."""
    own, of_class = vars(module).get("forward"), getattr(type(module), "forward", None)
    return _forward(own) or _forward(of_class)


def _forward(forward: object) -> Forward | None:
    if forward is None or forward is nn.Module.forward or not callable(forward):
        return None
    try:
        function = inspect.unwrap(forward)
        code, name = function.__code__, own_name(function.__qualname__)
    except (AttributeError, ValueError):
        return None
    file, first = code.co_filename, code.co_firstlineno
    below = range(first, first + _DECORATORS)
    is_def = (n for n in below if code_at(file, n).startswith(("def ", "async def ")))
    line = next(is_def, first)
    return Forward(Frame(named(file), line, name), code_at(file, line), code)


def own_name(qualified: str) -> str:
    """Return the name of a function, with its class, without what it was defined in."""
    return qualified.rpartition("<locals>.")[2]
