"""What a recording keeps of the program's source: call stacks, and the text of functions.

So both can be shown where the program's files are not. A function is read once, when one of its
lines is first noted, and kept once. Those of PyTorch are not kept: they are the same everywhere.
"""

from __future__ import annotations

import json
import linecache
import os
import threading
from types import CodeType

import torch

from llmdebug_nb.capture.source_lines import LONGEST_LINE, code_of, named, own_name, place_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.batches import FunctionRow, SourceRow
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.core.function_text import block, first_line
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.records import Frame

_NOT_KEPT = (PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_KNOWN = 4096  # functions whose text is at hand: those of a hundred models
# a file and the first line of a function -> the lines of the file then, and the masked text
_texts: dict[tuple[str, int, str], tuple[list[str], tuple[str, ...]]] = {}


class KeptSources:
    """Call stacks and functions. ``stacks``, ``functions``: rows that were not written yet.

    Thread-safe. ``wanted``: False keeps no functions. ``lock``: who holds it may write the rows.
    """

    def __init__(self, wanted: bool, lock: threading.RLock | None = None) -> None:
        self._lock = lock or threading.RLock()
        self.stacks: list[SourceRow] = []
        self.functions: list[FunctionRow] = []
        self._wanted = wanted
        self._numbers: dict[tuple[tuple[str, ...], int | None], int] = {}
        self._seen: set[tuple[str, int, str]] = set()
        self._kept: set[tuple[str, int, str]] = set()
        self._bytes = self._cut = self._left_out = 0

    def stack_number(
        self, frames: list[str], code: list[str] | None = None, inside: int | None = None
    ) -> int:
        """Return the number of a call stack, innermost frame first; equal stacks share one.

        ``code``: the line of each frame, whose file is `named`; if it is not given, the lines are
        read now, with the functions.
        ``inside``: how many frames there are to the module's forward.
        """
        key = tuple(frames), inside
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                if code is None:
                    code = list(map(code_of, frames))
                    for frame in filter(None, map(Frame.read, frames)):
                        self._keep(frame.file, frame.function, frame.line)
                    frames = list(map(place_of, frames))
                self.stacks.append((number, json.dumps(frames), json.dumps(code), inside))
            return number

    def keep_function(self, code: CodeType, line: int) -> None:
        """Keep the text of the function that a line of the program stands in, once."""
        name = own_name(getattr(code, "co_qualname", code.co_name))  # from Python 3.11 on
        with self._lock:
            self._keep(code.co_filename, name, line, code.co_firstlineno)

    def _keep(self, file: str, name: str, line: int, first: int | None = None) -> None:
        """Keep the text of the function that a line is in.

        ``file``: not yet `named`. ``name``: with its class before it, if that is known. ``first``:
        the line that it begins on; looked for if it is not given.
        """
        own = name.rpartition(".")[2]
        key = file, first or line, own
        if not self._wanted or key in self._seen or file.startswith(_NOT_KEPT):
            return
        self._seen.add(key)
        if first is None:
            first = first_line(linecache.getlines(file), line, own)
        text = () if first is None else _text(file, first, own)
        if first is not None and text:
            self._add(named(file), name, text, first, line)

    def _add(self, file: str, name: str, text: tuple[str, ...], first: int, line: int) -> None:
        """Add a function; of one that is too long, the lines around ``line``."""
        longest = constants.FUNCTION_LINES
        start = min(max(line - first - longest // 2, 0), max(len(text) - longest, 0))
        kept = "\n".join(text[start : start + longest])
        content = file, first + start, kept
        if content in self._kept:
            return
        if self._bytes + len(kept) > constants.FUNCTIONS_BYTES:
            self._left_out += 1
            return
        self._cut += len(text) > longest
        self._bytes += len(kept)
        self._kept.add(content)
        self.functions.append((file, first + start, name, kept))

    def notes(self) -> list[str]:
        """Return what was not kept, in words."""
        notes = []
        if self._cut:
            longest = f"{constants.FUNCTION_LINES:,}"
            notes.append(f"of {self._cut:,} longer functions, only {longest} lines were kept")
        if self._left_out:
            most = f"{constants.FUNCTIONS_BYTES >> 20} MiB"
            notes.append(
                f"the text of {self._left_out:,} functions was not kept: it is more than {most}"
            )
        return notes


def _text(file: str, first: int, name: str) -> tuple[str, ...]:
    """Return the lines of a function without secrets; empty if they can't be read.

    A secret of several lines would change the numbers of those behind it, so nothing is returned.
    """
    lines = linecache.getlines(file)
    key = file, first, name
    known = _texts.get(key)
    if known is not None and known[0] is lines:
        return known[1]
    if len(_texts) >= _KNOWN:
        _texts.clear()
    text = block(lines, first, name)
    clean = tuple(masked("\n".join(text)).split("\n"))
    clean = tuple(map(_shortened, clean)) if len(clean) == len(text) else ()
    _texts[key] = lines, clean
    return clean


def _shortened(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return indent[:LONGEST_LINE] + line.strip()[:LONGEST_LINE]
