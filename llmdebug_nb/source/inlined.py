"""The lines of a function, with those of its helpers where they are called.

One program computes in one function what the other one has in several. Several lines of the other
function then answer to one line, which calls a helper: the helper's lines stand behind it.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from llmdebug_nb.core.function_text import Function
from llmdebug_nb.core.records import Record
from llmdebug_nb.source.lines import Source
from llmdebug_nb.source.listed_code import Code, Frames, Program

# a call stack, and the line of the other program's function that computes the same
Use: TypeAlias = tuple[Frames, int]
Trail: TypeAlias = tuple[tuple[str, int], ...]  # functions and lines, from the outermost inwards
_STEP = "    "


class Row(NamedTuple):
    """A line that is shown. ``number``: in the file. ``trail``: where it is called from."""

    number: int
    text: str
    trail: Trail


class Inlined:
    """The lines of a function and of its helpers in the same file. ``helpers``: their names."""

    def __init__(self, program: Program, code: Code, uses: Iterable[Use] = ()) -> None:
        """``uses``: the calls that the other program makes too; without them, none is inlined."""
        self._program, self._code = program, code
        self.helpers: list[str] = []
        inner = [(stack, line) for frames, line in uses if (stack := self._inwards(frames))]
        function = code.function
        lines = textwrap.dedent("\n".join(function.lines)).split("\n")
        whole = function._replace(lines=tuple(lines))
        last = function.line + len(lines) - 1
        self.rows = list(self._grown(whole, (function.line, last), inner, ()))
        self._places = {row.trail: at for at, row in enumerate(self.rows)}

    def place(self, record: Record) -> int | None:
        """Return the place of the row on which a tensor of the pass is made."""
        return self._place(self._program.stack(record), self._program.line(self._code, record))

    def place_of(self, source: Source) -> int | None:
        """Return the place of the row on which a source stands."""
        frames = self._program.whole(source)
        return self._place(frames, self._code.line_of(frames))

    def _place(self, frames: Frames, line: int | None) -> int | None:
        if line is None:
            return None
        place = self._places.get(((self._code.name, line),))
        trail: Trail = ()
        for frame in self._inwards(frames):
            trail = (*trail, (self._code.name if not trail else frame.function, frame.line))
            place = self._places.get(trail, place)
        return place

    def _inwards(self, frames: Frames) -> Frames:
        """Return the part of a call stack from the function inwards; empty if it is not in it."""
        at = self._code.index_of(frames)
        return () if at is None else frames[at::-1]

    def _grown(
        self, function: Function, span: tuple[int, int], uses: list[Use], before: Trail
    ) -> Iterator[Row]:
        """Yield the lines of a part of a function, each with those of the helpers that it calls."""
        by_line: dict[int, list[Use]] = defaultdict(list)
        for frames, line in uses:
            by_line[frames[0].line].append((frames[1:], line))
        waiting: list[tuple[Trail, list[Use]]] = []
        brackets = 0
        name = (before and function.name.rpartition(".")[2]) or function.name
        for number in range(span[0], span[1] + 1):
            text = function.lines[number - function.line]
            row = Row(number, text, (*before, (name, number)))
            yield row
            waiting.append((row.trail, by_line[number]))
            brackets += sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
            if brackets <= 0 or number == span[1]:  # the end of a statement
                indent = text[: len(text) - len(text.lstrip())] + _STEP
                for trail, inside in waiting:
                    yield from self._helpers(trail, inside, indent)
                waiting, brackets = [], 0

    def _helpers(self, trail: Trail, uses: list[Use], indent: str) -> Iterator[Row]:
        """Yield the lines of the helpers that a line calls, if several lines answer to them."""
        called: dict[tuple[str, str], list[Use]] = defaultdict(list)
        for frames, line in uses:
            if frames:
                called[frames[0].file, frames[0].function].append((frames, line))
        for (file, name), inside in called.items():
            helper = self._program.function(inside[0][0][0])
            several = len({line for _, line in inside}) > 1
            if not several or file != self._code.function.file or helper is None:
                continue
            within = [(frames, line) for frames, line in inside if frames[0].line in helper]
            first = min(frames[0].line for frames, _ in within)  # what is above says what it takes
            part = textwrap.dedent("\n".join(helper.lines[first - helper.line :]))
            text = textwrap.indent(part, indent).split("\n")
            shown = Function(file, first, name, tuple(text))
            self.helpers.append(name)
            yield from self._grown(shown, (first, first + len(text) - 1), within, trail)
