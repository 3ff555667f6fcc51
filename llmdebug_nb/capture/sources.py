"""Where in the program an operator was called: taken as bare addresses, made into text once per place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType

import torch

_DEEP = 48  # frames looked at
_KEPT = 8  # frames kept: those of the program, innermost first
# hooks, modes and module calls are how we came to be called, not where from
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Sources:
    """Numbers of call stacks; ``intern``: gives the number of one in words."""

    def __init__(self, intern: Callable[[list[str]], int]) -> None:
        self._intern = intern
        self._known: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._skipped: dict[CodeType, bool] = {}

    def here(self) -> int:
        """Return the number of the stack of the running code, without ours and PyTorch's frames."""
        frame, places = sys._getframe(1), []
        frames = []
        for _ in range(_DEEP):
            code = frame.f_code
            skipped = self._skipped.get(code)
            if skipped is None:
                skipped = self._skipped[code] = code.co_filename.startswith((_OURS, _TORCH))
            if not skipped:
                places.append((code, frame.f_lasti))
                frames.append(frame)
                if len(places) == _KEPT:
                    break
            if frame.f_back is None:
                break
            frame = frame.f_back
        key = tuple(places)
        number = self._known.get(key)
        if number is None:
            words = [f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in frames]
            number = self._known[key] = self._intern(words)
        return number
