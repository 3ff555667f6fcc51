"""The line of the program that runs now."""

from __future__ import annotations

from types import CodeType
from typing import NamedTuple

from llmdebug_nb.capture.kept_sources import KeptSources
from llmdebug_nb.capture.operators.call_stacks import CallStacks
from llmdebug_nb.core.function_text import Function
from llmdebug_nb.core.records import Frame


class Here(NamedTuple):
    """A line of the program. ``function``: the one that it is in; None if it can't be read."""

    frame: Frame
    function: Function | None


def here(outside: CodeType | None = None) -> Here | None:
    """Return the innermost line of the program on this thread's stack; None if there is none.

    ``outside``: what runs the program; its callers are no part of it.
    """
    kept = KeptSources(wanted=True)
    stacks = CallStacks(lambda frames, code, inside: 0, kept.keep_function)
    frame = Frame.read(stacks.innermost_line(outside)[0])
    if frame is None:
        return None
    functions = [
        Function(frame.file, first, name, tuple(text.split("\n")))
        for _, first, name, text in kept.functions
    ]
    return Here(frame, next((each for each in functions if frame.line in each), None))
