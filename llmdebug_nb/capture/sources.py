"""Where in the program an operator was called: taken as bare addresses, made into text once per place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch

_DEEP = 48  # frames looked at
_KEPT = 8  # frames kept: those of the program, innermost first
# hooks, modes and module calls are how we came to be called, not where from
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


_MODULE_CALL = torch.nn.Module._call_impl.__code__

Place = tuple[CodeType, int]


class Sources:
    """Numbers of call stacks; ``intern``: gives the number of one in words."""

    def __init__(self, intern: Callable[[list[str]], int]) -> None:
        self._intern = intern
        self._known: dict[tuple[Place, ...], int] = {}
        self._skipped: dict[CodeType, bool] = {}

    def here(self, around: dict[Any, tuple[Place, ...]] | None = None) -> int:
        """Return the number of the stack of the running code, without ours and PyTorch's frames.

        ``around``: remembers the outer part of the stack, which is the same for all that one module call calls.
        """
        places, frame = self._places(sys._getframe(1), _MODULE_CALL)
        if frame is not None:
            if around is None:
                outer, _ = self._places(frame)
            else:
                caller = frame.f_back and frame.f_back.f_back
                key = caller and (id(frame), caller.f_code, caller.f_lasti)
                known = around.get(key)
                outer = around[key] = known if known is not None else self._places(frame)[0]
            places = (places + outer)[:_KEPT]
        number = self._known.get(places)
        if number is None:
            number = self._known[places] = self._intern([_words(*place) for place in places])
        return number

    def _places(
        self, frame: FrameType | None, until: CodeType | None = None
    ) -> tuple[tuple[Place, ...], FrameType | None]:
        """Return the innermost places of the program from a frame outwards, and the frame of code ``until`` if it came first."""
        places: list[Place] = []
        skipped = self._skipped
        for _ in range(_DEEP):
            if frame is None or len(places) == _KEPT:
                return tuple(places), None
            code = frame.f_code
            if code is until:
                return tuple(places), frame
            skip = skipped.get(code)
            if skip is None:
                skip = skipped[code] = code.co_filename.startswith((_OURS, _TORCH))
            if not skip:
                places.append((code, frame.f_lasti))
            frame = frame.f_back
        return tuple(places), None


def _words(code: CodeType, instruction: int) -> str:
    """Return a place as ``file:line function``."""
    line = next(islice(code.co_positions(), instruction // 2, None))[0]
    return f"{code.co_filename}:{line} {code.co_name}"
