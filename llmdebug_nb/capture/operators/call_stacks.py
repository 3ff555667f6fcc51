"""Numbers the places in the program where operators are called.

A stack is taken as bare code positions, and made into text once per place.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compat.pytorch import MODULE_CALL
from llmdebug_nb.capture.source_lines import code_at, named
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.core.records import Frame

if TYPE_CHECKING:
    from llmdebug_nb.capture.recorder import Recorder

_KEPT = 8  # frames of the program that are kept, innermost first
# frames of hooks, modes and module calls are no part of the program
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_runners: set[CodeType] = set()  # code of ours that runs the program
_ELSEWHERE, _MODULE_CALL, _RUNNER = range(3)  # what code is, if it is not of the program


def ends_stacks(runner: CodeType) -> None:
    """Count the callers of this code as no part of the program.

    IPython's call of a magic holds the whole text of the cell, prompts in it included.
    """
    _runners.add(runner)


class _Kinds(dict[int, int]):
    """What code is, by its id: to hash code takes as long as a kernel.

    Code of the program has the id of the first code that is equal to it: a cell that runs again is
    compiled again. ``of(code)`` decides it once. ``codes``: those first ones, by id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[int, CodeType] = {}
        self._first: dict[tuple[CodeType, str], int] = {}  # equal code may stand in two files
        self._alive: dict[int, weakref.ref[CodeType]] = {}

    def of(self, code: CodeType) -> int:
        known, kind = id(code), _ELSEWHERE
        if not code.co_filename.startswith((PACKAGE, _TORCH)):
            kind = self._first.setdefault((code, code.co_filename), known)
            if kind == known:
                self.codes[known] = code
        elif code is MODULE_CALL:
            kind = _MODULE_CALL
        elif code in _runners:
            kind = _RUNNER
        self._alive[known] = weakref.ref(code, lambda _: self._forget(known))
        self[known] = kind
        return kind

    def _forget(self, known: int) -> None:
        """Forget code that is gone: another one may get its id."""
        self.pop(known, None)
        self._alive.pop(known, None)


class CallStacks:
    """Numbers call stacks.

    ``intern(frames, code, inside)`` returns the number of a stack in text form. ``keep(code,
    line)`` is told of each line that stands in one. ``kinds``: of code by id. ``numbers``: of
    stacks, see `_stack`. ``lines``: texts by id of code and instruction.
    """

    def __init__(
        self,
        intern: Callable[[list[str], list[str], int], int],
        keep: Callable[[CodeType, int], None] = lambda code, line: None,
    ) -> None:
        self._intern, self._keep = intern, keep
        self.numbers: dict[tuple[int, ...], int] = {}
        self.lines: dict[tuple[int, int], tuple[str, str]] = {}
        self.kinds = _Kinds()

    @classmethod
    def of(cls, recorder: Recorder) -> CallStacks:
        """Return the call stacks that a recorder keeps, with the functions in them."""
        return cls(recorder.sources.stack_number, recorder.sources.keep_function)

    def current(self) -> int:
        """Return the number of the current stack, without our own and PyTorch's frames."""
        stack = self._stack(sys._getframe(1))
        number = self.numbers.get(stack)
        if number is None:
            inside, *places = stack
            lines = [self._line(*place) for place in zip(places[::2], places[1::2], strict=True)]
            frames, code = [text for text, _ in lines], [code for _, code in lines]
            number = self.numbers[stack] = self._intern(frames, code, inside)
        return number

    def innermost(self) -> str:
        """Return the innermost place in the program as text, "" if there is none."""
        return self.innermost_line()[0]

    def innermost_line(self, outside: CodeType | None = None) -> tuple[str, str]:
        """Return the innermost place in the program, and the code there; "" if there is none.

        ``outside``: what runs the program; its callers are no part of it.
        """
        frame: FrameType | None = sys._getframe(1)
        kinds = self.kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            kind = kinds.of(code) if kind is None else kind
            if kind > _RUNNER:
                return self._line(kind, frame.f_lasti)
            frame = None if kind == _RUNNER or code is outside else frame.f_back
        return "", ""

    def _stack(self, frame: FrameType | None) -> tuple[int, ...]:
        """Return the innermost places of the program as ids of code and instructions in it.

        Before them stands how many of them lie within the last module call. A module of PyTorch
        has no place in the program: the module around it counts.
        """
        kinds = self.kinds
        places: list[int] = []
        inside = 0
        while frame is not None and len(places) < 2 * _KEPT:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = kinds.of(code)
            if kind > _RUNNER:
                places += kind, frame.f_lasti
            elif kind == _MODULE_CALL:
                inside = inside or len(places) // 2
            elif kind == _RUNNER:
                break
            frame = frame.f_back
        return (inside or len(places) // 2, *places)

    def _line(self, known: int, instruction: int) -> tuple[str, str]:
        """Return ``file:line function``, and the code there."""
        line = self.lines.get((known, instruction))
        if line is None:
            code = self.kinds.codes[known]
            lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
            number = next(lines, None) or code.co_firstlineno
            frame = Frame(named(code.co_filename), number, code.co_name)
            self._keep(code, number)
            line = str(frame), code_at(code.co_filename, number)
            self.lines[known, instruction] = line
        return line
