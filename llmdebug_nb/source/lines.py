"""A call's line in one program, and the lines of two programs that answer to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import Frame

# equal: within noise. rewritten: computed otherwise, equal in effect. guilty: its inputs agree and
# its result does not. inherited: it follows from a guilty line.
LineState = Literal["equal", "rewritten", "guilty", "inherited"]


@dataclass(frozen=True, slots=True)
class Source:
    """A call in one of the two programs, and the line that makes it.

    ``path``, ``op``: as in its run. ``file``, ``line``: the line that calls the operator, or where
    the module's forward begins; None if unknown. ``code``: the text of that line, "" if unknown.
    ``frames``: the call stack, innermost first, up to the module's forward. ``lacks``: the program
    does not make the call there; then the line is the last one before the place where it would
    stand, and ``op`` is "".
    """

    path: str
    op: str
    file: str | None = None
    line: int | None = None
    code: str = ""
    frames: tuple[Frame, ...] = ()
    lacks: bool = False

    def __str__(self) -> str:
        """Return ``file:line function``, or the path if the line is unknown."""
        if self.file is None:
            return printable(self.path) or "(root)"
        function = f" {self.frames[0].function}" if self.frames else ""
        return printable(f"{self.file}:{self.line}{function}")


@dataclass(frozen=True, slots=True)
class LinePair:
    """A line of golden and the line of mine that answers to it; None on one side: it has none.

    ``error``: the relative L2 error between their results; None if nothing could be measured.
    """

    golden: Source | None
    mine: Source | None
    error: float | None
    state: LineState
