"""Rounds, as msit counts them: how often a graph of the model has run before, one graph for prefill and one for decoding.

Without warm-up, round 0 is the prefill and the first decode step (token 0 and token 1), and round n is token n + 1. Where there is a warm-up, that is
round 0, round 1 is tokens 0 and 1, and round n is token n. Calls that are neither, of a model that generates nothing, are each a round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llmdebug_nb.core.errors import OptionError

_LONGEST = 500  # characters, as in msit
_LATER = ("decode", "verify")  # kinds of calls whose graph did not run in step 0


def round_of(step: int, kind: str, warm: bool, warmed: bool) -> int:
    """Return the round of a root call of ``kind`` in ``step``. ``warm``: it is a warm-up; ``warmed``: there was one before it."""
    if warm:
        return 0
    return max(step - (kind in _LATER), 0) + warmed


@dataclass(frozen=True, slots=True)
class Rounds:
    """A set of rounds: inclusive ranges; none of them means all rounds."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, spec: Any, option: str = "rounds") -> Rounds:
        """Read pairs of first and last, ``"1,3,5,7"``, or ``"all"``; nothing (``""``) is ``"0,0"``.

        Raises:
            OptionError: anything else, half a pair, or a pair that runs backwards.
        """
        if isinstance(spec, cls):
            return spec
        text = ",".join(map(str, spec)) if isinstance(spec, (list, tuple)) else str(spec)
        if text == "all":
            return cls()
        numbers = [part.strip() for part in (text or "0,0").split(",")]
        shape = "expected pairs of first and last such as 0,0 or 1,3,5,7, or all"
        if (
            len(text) > _LONGEST
            or len(numbers) % 2
            or not all(re.fullmatch(r"\d{1,9}", part) for part in numbers)
        ):
            raise OptionError(f"{option} {text[:60]!r}: {shape}")
        pairs = tuple(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True))
        backwards = next((pair for pair in pairs if pair[0] > pair[1]), None)
        if backwards is not None:
            raise OptionError(
                f"{option} {text!r}: the pair {backwards[0]},{backwards[1]} runs backwards; {shape}"
            )
        return cls(pairs)

    def __contains__(self, number: int) -> bool:
        return not self.ranges or any(low <= number <= high for low, high in self.ranges)

    @property
    def last(self) -> int | None:
        """The last step that may be in one of these rounds, or None where any may."""
        return max(high for _, high in self.ranges) + 1 if self.ranges else None

    def __str__(self) -> str:
        return ",".join(f"{low},{high}" for low, high in self.ranges) or "all"
