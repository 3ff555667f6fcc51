"""msprobe's ``stack.json``: the lines of the program that led to each call, read and written.

    {"0": [[NAMES], [LINES]], ...}      mindstudio-probe 8.3 and 26.2: calls share a stack
    {NAME: [LINES], ...}                1.2

A line is ``File model.py, line 19, in forward, \\n return self.fc(x)``, the innermost first. Lines
of torch itself are left out, as in our own recordings: the same ones stand around every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.places import in_torch, shown
from llmdebug_nb.core.records import Frame
from llmdebug_nb.store.layouts.files import Folder, read_json

FILE = "stack.json"
_LINE = re.compile(
    r"File (?P<file>.+?), line (?P<line>[0-9]{1,9}), in (?P<function>[^\n]+?)"
    r",? *(?:\n *(?P<code>.*))?",
    re.DOTALL,
)
_LONGEST = 4096  # characters of a line that are read
_DEEPEST = 1000  # lines of a stack: Python stops a recursion there
_REFUSED = re.compile(r";(?=[-+=%@＋－＝％＠])")  # msprobe's compare takes these for a formula
Lines = tuple[tuple[Frame, str], ...]


def read(folder: Folder, name: str) -> dict[str, Lines]:
    """Return the lines that led to each call, by its name in ``dump.json``.

    What is no line, such as msprobe's own remark that it found none, is left out.

    Raises:
        CorruptDumpError: it can't be read, or has another shape than msprobe's two.
    """
    document = read_json(folder, name)
    if not isinstance(document, dict):
        raise CorruptDumpError(f"{name} is not an object")
    found: dict[str, Lines] = {}
    for calls, stack in _pairs(document):
        if not isinstance(calls, list) or not isinstance(stack, list):
            raise CorruptDumpError(f"{name} has no lists of calls and lines: {str(stack)[:80]!r}")
        lines = _without_torch(filter(None, map(_line, stack[:_DEEPEST])))
        if lines:
            found.update((call, lines) for call in calls if isinstance(call, str))
    return found


def _pairs(document: Mapping[str, object]) -> Iterator[tuple[object, object]]:
    """Yield names of calls and the stack that they share."""
    for key, value in document.items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list):
            yield value[0], value[1]
        else:
            yield [key], value


def _line(text: object) -> tuple[Frame, str] | None:
    found = _LINE.fullmatch(text[:_LONGEST]) if isinstance(text, str) else None
    if found is None:
        return None
    frame = Frame(shown(found["file"]), int(found["line"]), found["function"])
    return frame, (found["code"] or "").strip()


def _without_torch(lines: Iterable[tuple[Frame, str]]) -> Lines:
    every = tuple(lines)
    return tuple(line for line in every if not in_torch(line[0].file)) or every


def document_of(stacks: Mapping[str, Lines]) -> dict[str, list[list[str]]]:
    """Return the document of the newer shape: the calls of each stack, and its lines."""
    calls: dict[Lines, list[str]] = {}
    for name, lines in stacks.items():
        calls.setdefault(lines, []).append(name)
    return {
        str(number): [names, [_text(*line) for line in lines]]
        for number, (lines, names) in enumerate(calls.items())
    }


def _text(frame: Frame, code: str) -> str:
    text = f"File {frame.file}, line {frame.line}, in {frame.function}, \n {code}"
    return _REFUSED.sub("; ", text)
