"""The nouns of code beside code: golden's function beside mine's, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmdebug_nb.source.lines import LineState


@dataclass(frozen=True, slots=True)
class ListedLine:
    """A line of golden beside the line of mine that answers to it.

    ``golden_line``, ``mine_line``: their numbers; 0 if that side has no line here. ``golden``,
    ``mine``: their texts. ``state``: of mine's line; "" if nothing is known of it. ``error``: the
    relative L2 error of its results; None if nothing could be measured.
    """

    golden_line: int
    golden: str
    mine_line: int
    mine: str
    state: LineState | Literal[""] = ""
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Golden's function beside mine's.

    Files and functions are "" on a side that has none. ``at``: the index of the line to blame, -1
    for none. ``note``: why there is no code, or what is left out; "" for nothing.
    """

    golden_file: str = ""
    golden_function: str = ""
    mine_file: str = ""
    mine_function: str = ""
    lines: tuple[ListedLine, ...] = ()
    at: int = -1
    note: str = ""
