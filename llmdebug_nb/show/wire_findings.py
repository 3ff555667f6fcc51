"""The details of a finding, as the kernel sends them to the explorer in a page; see `wire`."""

from __future__ import annotations

from typing import Literal, TypedDict

from llmdebug_nb.show.wire import Num, Which

LineState = Literal["equal", "rewritten", "guilty", "inherited"]


class SourceView(TypedDict):
    """The line of one program that makes a call. ``place``: ``file:line function``, or why none.

    ``call``: path and operator; "" if the program makes no such call. ``code``: the text of the
    line. ``frames``: the lines that called it, innermost first, up to the module's forward.
    """

    which: Which
    place: str
    call: str
    code: str
    frames: list[str]


class LinePairView(TypedDict):
    """A line of golden and that of mine that answers to it; "" for none. ``error``: relative L2."""

    state: LineState
    golden: str
    mine: str
    error: Num


class CodeLine(TypedDict):
    """A line of golden beside the line of mine that answers to it.

    Line numbers: 0, that side has no line here. ``state``: "" where nothing was recorded on the
    line; ``halted``: a program is halted here. ``error``: relative L2 of its result.
    """

    golden_line: int
    golden: str
    mine_line: int
    mine: str
    state: LineState | Literal["halted", ""]
    error: Num


class CodeView(TypedDict):
    """Golden's function beside mine's.

    ``at``: the index of the line to blame, -1 for none. ``note``: why there is no code, or what is
    left out; "" for nothing.
    """

    golden_file: str
    golden_function: str
    mine_file: str
    mine_function: str
    lines: list[CodeLine]
    at: int
    note: str


class FindingDetail(TypedDict):
    """The details of a finding. ``script`` replays the call; "" for none, and ``why`` says why.

    ``save``: the line of Python that writes the script. ``relation``: what mine's value is, of
    golden's; ``advice``: what to do; both may be "". ``sources``: golden's and mine's, or none.
    ``pairs``: the lines around them. ``listing``: their functions side by side. ``kernel``,
    ``code``: for compiled code the kernel that computes the call, and its source; "" for none.
    """

    script: str
    why: str
    save: str
    relation: str
    advice: str
    sources: list[SourceView]
    pairs: list[LinePairView]
    listing: CodeView
    kernel: str
    code: str
