"""Numbers the places in the program where operators are called.

A stack is taken as bare code positions, and made into text once per place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from llmdebug_nb.capture.calls import OpenCall, OuterStacks
from llmdebug_nb.capture.compat.pytorch import MODULE_CALL
from llmdebug_nb.capture.source_lines import code_at, named
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.core.records import Frame

if TYPE_CHECKING:
    from llmdebug_nb.capture.recorder import Recorder

_DEPTH = 48  # frames looked at
_KEPT = 8  # frames of the program that are kept, innermost first
# frames of hooks, modes and module calls are no part of the program
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_runners: set[CodeType] = set()  # code of ours that runs the program

Place = tuple[CodeType, int]


def ends_stacks(runner: CodeType) -> None:
    """Count the callers of this code as no part of the program.

    IPython's call of a magic holds the whole text of the cell, prompts in it included.
    """
    _runners.add(runner)


class Stack(NamedTuple):
    """The innermost places of the program, and how many of them lie within the last module call."""

    places: tuple[Place, ...]
    inside: int


class _IsProgram(dict[CodeType, bool]):
    """Whether code is part of the program, decided once."""

    def __missing__(self, code: CodeType) -> bool:
        known = self[code] = not code.co_filename.startswith((PACKAGE, _TORCH))
        return known


class CallStacks:
    """Numbers call stacks.

    ``intern(frames, code, inside)`` returns the number of a stack in text form. ``keep(code,
    line)`` is told of each line that stands in one.
    """

    def __init__(
        self,
        intern: Callable[[list[str], list[str], int], int],
        keep: Callable[[CodeType, int], None] = lambda code, line: None,
    ) -> None:
        self._intern, self._keep = intern, keep
        self._numbers: dict[Stack, int] = {}
        self._lines: dict[Place, tuple[str, str]] = {}
        self._is_program = _IsProgram()

    @classmethod
    def of(cls, recorder: Recorder) -> CallStacks:
        """Return the call stacks that a recorder keeps, with the functions in them."""
        return cls(recorder.stack_number, recorder.keep_function)

    def current(self, open_calls: Sequence[OpenCall]) -> int:
        """Return the number of the current stack, without our own and PyTorch's frames.

        The stack outside of a module call is the same for all that it calls, so it is remembered
        with the call.
        """
        modules = [_outer_stacks(call) for call in open_calls if call.level == "module"]
        stack = self._stack(sys._getframe(1), modules, len(modules))
        number = self._numbers.get(stack)
        if number is None:
            lines = [self._line(place) for place in stack.places]
            frames, code = [text for text, _ in lines], [code for _, code in lines]
            number = self._numbers[stack] = self._intern(frames, code, stack.inside)
        return number

    def innermost(self) -> str:
        """Return the innermost place in the program as text, "" if there is none."""
        return self.innermost_line()[0]

    def innermost_line(self, outside: CodeType | None = None) -> tuple[str, str]:
        """Return the innermost place in the program, and the code there; "" if there is none.

        ``outside``: what runs the program; its callers are no part of it.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_program[frame.f_code]:
            frame = None if frame.f_code is outside else frame.f_back
        return ("", "") if frame is None else self._line((frame.f_code, frame.f_lasti))

    def _stack(self, frame: FrameType | None, modules: Sequence[OuterStacks], depth: int) -> Stack:
        """Return the innermost places of the program, from a frame inside ``depth`` modules.

        A module of PyTorch has no place in the program: the module around it counts.
        """
        places: list[Place] = []
        inside: int | None = None
        for _ in range(_DEPTH):
            if frame is None or len(places) == _KEPT:
                break
            code = frame.f_code
            if self._is_program[code]:
                places.append((code, frame.f_lasti))
            elif code in _runners:
                break
            elif code is MODULE_CALL:
                if inside is None and places:
                    inside = len(places)
                if depth:
                    outside = self._outside(frame, modules, depth - 1)
                    inside = outside.inside if inside is None else inside
                    places += outside.places
                    break
            frame = frame.f_back
        inside = len(places) if inside is None else inside
        return Stack(tuple(places[:_KEPT]), min(inside, _KEPT))

    def _outside(self, call: FrameType, modules: Sequence[OuterStacks], depth: int) -> Stack:
        """Return the places outside of a module call."""
        caller = call.f_back and call.f_back.f_back
        if caller is None:
            return Stack((), 0)
        key = id(call), caller.f_code, caller.f_lasti
        stack = modules[depth].get(key)
        if stack is None:
            stack = modules[depth][key] = self._stack(caller, modules, depth)
        return stack

    def _line(self, place: Place) -> tuple[str, str]:
        """Return ``file:line function``, and the code there."""
        known = self._lines.get(place)
        if known is None:
            code, instruction = place
            lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
            line = next(lines, None) or code.co_firstlineno
            frame = Frame(named(code.co_filename), line, code.co_name)
            self._keep(code, line)
            known = self._lines[place] = str(frame), code_at(code.co_filename, line)
        return known


def _outer_stacks(call: OpenCall) -> OuterStacks:
    if call.outer_stacks is None:
        call.outer_stacks = {}
    return call.outer_stacks
