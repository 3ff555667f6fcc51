"""Rounds, as msit counts them: how often a graph of the model has run before.

A model has one graph for prefill and one for decoding. Without warm-up, round 0 is the prefill and
the first decode (tokens 0 and 1), and round n is token n + 1. With a warm-up, that is round 0,
round 1 is tokens 0 and 1, and round n is token n. Each call of a model that does not generate is
a round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmdebug_nb.core.errors import OptionError

_LONGEST = 500  # characters, as in msit
_LATER = ("decode", "verify")  # kinds of calls whose graph does not run in step 0


def round_of(step: int, kind: str, warm: bool, warmed: bool) -> int:
    """Return the round of a root call of ``kind`` in ``step``.

    ``warm``: the call is a warm-up; ``warmed``: a warm-up came before it.
    """
    if warm:
        return 0
    return max(step - (kind in _LATER), 0) + warmed


@dataclass(frozen=True, slots=True)
class Rounds:
    """A set of rounds: inclusive ranges; no ranges mean all rounds."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, spec: object, option: str = "rounds") -> Rounds:
        """Read pairs of first and last, ``"1,3,5,7"``, or ``"all"``; ``""`` is ``"0,0"``.

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
        """The last step that these rounds may include, or None if there is no end."""
        return max(high for _, high in self.ranges) + 1 if self.ranges else None

    def __str__(self) -> str:
        return ",".join(f"{low},{high}" for low, high in self.ranges) or "all"
