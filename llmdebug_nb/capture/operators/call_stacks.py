"""Where in the program an operator was called: taken as bare addresses, made into text once per place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from llmdebug_nb.core.errors import PACKAGE

_DEEP = 48  # frames looked at
_KEPT = 8  # frames kept: those of the program, innermost first
# hooks, modes and module calls are how we came to be called, not where from
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


_MODULE_CALL = torch.nn.Module._call_impl.__code__

Place = tuple[CodeType, int]
Places = tuple[Place, ...]


class CallStacks:
    """Numbers of call stacks; ``intern``: gives the number of one in words."""

    def __init__(self, intern: Callable[[list[str]], int]) -> None:
        self._intern = intern
        self._known: dict[Places, int] = {}
        self._words: dict[Place, str] = {}
        self._skipped: dict[CodeType, bool] = {}

    def here(self, around: Sequence[dict[Any, Places]] = ()) -> int:
        """Return the number of the stack of the running code, without ours and PyTorch's frames.

        ``around``: for each module call under way, outermost first, remembers the stack outside of it, which is the same
        for all that it calls.
        """
        places = self._stack(sys._getframe(1), around, len(around))
        number = self._known.get(places)
        if number is None:
            number = self._known[places] = self._intern([self._in_words(place) for place in places])
        return number

    def _stack(
        self, frame: FrameType | None, around: Sequence[dict[Any, Places]], depth: int
    ) -> Places:
        """Return the innermost places of the program from a frame outwards; the first ``depth`` modules are around it."""
        places: list[Place] = []
        skipped = self._skipped
        for _ in range(_DEEP):
            if frame is None or len(places) == _KEPT:
                break
            code = frame.f_code
            skip = skipped.get(code)
            if skip is None:
                skip = skipped[code] = code.co_filename.startswith((PACKAGE, _TORCH))
            if not skip:
                places.append((code, frame.f_lasti))
            elif code is _MODULE_CALL and depth:
                places += self._outside(frame, around, depth - 1)
                break
            frame = frame.f_back
        return tuple(places[:_KEPT])

    def _outside(self, call: FrameType, around: Sequence[dict[Any, Places]], depth: int) -> Places:
        """Return the places outside of a module call."""
        caller = call.f_back and call.f_back.f_back
        if caller is None:
            return ()
        key = id(call), caller.f_code, caller.f_lasti
        known = around[depth].get(key)
        if known is None:
            known = around[depth][key] = self._stack(caller, around, depth)
        return known

    def _in_words(self, place: Place) -> str:
        """Return ``file:line function``."""
        words = self._words.get(place)
        if words is None:
            code, instruction = place
            line = next(
                (line for start, end, line in code.co_lines() if start <= instruction < end),
                code.co_firstlineno,
            )
            words = self._words[place] = f"{code.co_filename}:{line} {code.co_name}"
        return words
