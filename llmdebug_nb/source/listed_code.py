"""The functions of one program around a finding, and the lines of calls in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from llmdebug_nb.core import constants
from llmdebug_nb.core.function_text import Function, function_at
from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.paths import ancestors, is_operator, module_of, parent_of
from llmdebug_nb.core.places import in_torch
from llmdebug_nb.core.records import CallKey, Frame, Record
from llmdebug_nb.source.lines import Source
from llmdebug_nb.store.run import Run

Frames = tuple[Frame, ...]
_SPARSE = "only the lines of recorded operators are known"
_TODAY = "the text is that of the file as it is now"
_NO_SOURCES = "the recording kept no source"
_UNKNOWN = "it was not recorded, and its file is not here"


class Code(NamedTuple):
    """A function in which calls of one program stand.

    ``outer``: the lines that call it, innermost first. ``owner``: the module in whose forward it
    runs. ``blamed``: its line to blame, None for none. ``sparse``: only some lines are known.
    """

    function: Function
    outer: Frames
    owner: str
    blamed: int | None = None
    sparse: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        return self.function.name

    def line_of(self, frames: Frames) -> int | None:
        """Return the line of a call stack that stands in this function, called from the same."""
        at = self.index_of(frames)
        return None if at is None else frames[at].line

    def index_of(self, frames: Frames) -> int | None:
        """Return the place in a call stack of this function, called from the same lines."""
        own = self.function.name.rpartition(".")[2]
        for at, frame in enumerate(frames):
            same = frame.file == self.function.file and frame.function == own
            around = zip(frames[at + 1 :], self.outer, strict=False)  # both may be cut
            if same and frame.line in self.function and all(a == b for a, b in around):
                return at
        return None


class Program:
    """The code of one run. ``key``: a call of the pass that is looked at."""

    def __init__(self, run: Run, key: CallKey) -> None:
        self._run, self._key = run, key
        self._texts: dict[Frame, tuple[Function, bool, str] | None] = {}

    @cached_property
    def _stacks(self) -> dict[tuple[str, int], Frames]:
        return self._run.index.stacks(self._key)

    @cached_property
    def _begins(self) -> dict[str, Frame]:
        """Where the forward of each module begins, by its path."""
        return {node.path: node.source for node in self._run.nodes if node.source is not None}

    @property
    def why(self) -> str:
        """Why a function is not known."""
        return _UNKNOWN if self._begins or self._stacks else _NO_SOURCES

    # -- functions --------------------------------------------------------------------------------

    def candidates(self, source: Source | None) -> Iterator[Code]:
        """Yield the functions in which a source stands, the innermost first.

        A module whose forward is not known stands in that of the module around it.
        """
        if source is None:
            return
        module, found = module_of(source.path), False
        frames = self.whole(source)
        for at, frame in enumerate(frames):
            is_begin = frame == self._begins.get(module)
            code = self._code(frames[at:], module, None if is_begin else frame.line)
            if code is not None:
                found = True
                yield code
        for path in () if found else ancestors(module):
            begins = self._begins.get(path)
            code = None if begins is None else self._code((begins,), path, None)
            if code is not None:
                yield code._replace(blamed=self._named(code, module))
                return

    def whole(self, source: Source) -> Frames:
        """Return the frames of a source, with those outside of its module if they are known."""
        n = len(source.frames)
        stacks = (stack for (path, _), stack in self._stacks.items() if path == source.path)
        return next((stack for stack in stacks if stack[:n] == source.frames), source.frames)

    def around(self, records: Iterable[Record]) -> Iterator[Code]:
        """Yield the functions in which the makers of tensors stand."""
        known: set[Frames] = set()
        for record in records:
            frames = self._stacks.get((record.site.path, record.site.call), ())
            for at in range(len(frames)):
                place = (frames[at]._replace(line=0), *frames[at + 1 :])
                if place in known:
                    break
                known.add(place)
                code = self._code(frames[at:], module_of(record.site.path), None)
                if code is not None:
                    yield code
            begins = self._begins.get(parent_of(module_of(record.site.path)))
            if not frames and begins is not None and (begins,) not in known:
                known.add((begins,))
                code = self._code((begins,), parent_of(module_of(record.site.path)), None)
                if code is not None:
                    yield code

    def _code(self, frames: Frames, module: str, blamed: int | None) -> Code | None:
        text = self._text(frames[0])
        if text is None:
            return None
        function, sparse, note = text
        return Code(function, frames[1:], self._owner(frames, module), blamed, sparse, note)

    def _owner(self, frames: Frames, module: str) -> str:
        """Return the module in whose forward a call stack runs."""
        for path in (module, *ancestors(module)):
            begins = self._begins.get(path)
            if begins is not None and any(self._is_in(frame, begins) for frame in frames):
                return path
        return module

    def _is_in(self, frame: Frame, begins: Frame) -> bool:
        """Tell whether a line is in the forward that begins there."""
        if (frame.file, frame.function) != (begins.file, begins.function.rpartition(".")[2]):
            return frame == begins
        text = self._text(frame)
        return frame.line >= begins.line and (text is None or begins.line in text[0])

    def _text(self, frame: Frame) -> tuple[Function, bool, str] | None:
        """Return the function of a line, whether it has gaps, and what is to be said of it."""
        key = frame._replace(function=frame.function.rpartition(".")[2])
        if key not in self._texts:
            self._texts[key] = self._recorded(frame) or self._live(frame) or self._gaps(key)
        return self._texts[key]

    def _recorded(self, frame: Frame) -> tuple[Function, bool, str] | None:
        function = self._run.index.function(frame)
        return None if function is None else (function, False, "")

    def _live(self, frame: Frame) -> tuple[Function, bool, str] | None:
        """Return the function from the file on this machine, if the line is as it was recorded.

        A function of PyTorch is none of the program, as in a recording.
        """
        if in_torch(frame.file):
            return None
        function = function_at(frame.file, frame.line, frame.function, self._run.path)
        code = self._run.index.code(frame)
        if function is None or not function.at(frame.line).startswith(code):
            return None
        lines = tuple(masked("\n".join(function.lines)).split("\n"))
        same = len(lines) == len(function.lines)
        return (function._replace(lines=lines), False, _TODAY) if same else None

    def _gaps(self, frame: Frame) -> tuple[Function, bool, str] | None:
        """Return the lines of recorded operators in a function."""
        frames = {f for stack in self._stacks.values() for f in stack if f[::2] == frame[::2]}
        near = (f for f in frames if abs(f.line - frame.line) < constants.FUNCTION_LINES // 2)
        lines = {f.line: self._run.index.code(f) for f in near}
        if not any(lines.values()):
            return None
        first, last = min(lines), max(lines)
        texts = tuple(lines.get(number, "") for number in range(first, last + 1))
        return Function(frame.file, first, frame.function, texts), True, _SPARSE

    # -- lines ------------------------------------------------------------------------------------

    def stack(self, record: Record) -> Frames:
        """Return the call stack of the operator of the pass that made a tensor."""
        site = record.site
        return self._stacks.get((site.path, site.call), ()) if self._has(site.key) else ()

    def function(self, frame: Frame) -> Function | None:
        """Return the text of the function of a line, None if it is not known as a whole."""
        text = self._text(frame)
        return None if text is None or text[1] else text[0]

    def line(self, code: Code, record: Record) -> int | None:
        """Return the line of a function on which a tensor of the pass is made."""
        site = record.site
        return self.line_of_call(code, site.path, site.call) if self._has(site.key) else None

    def line_of_call(self, code: Code, path: str, call: int) -> int | None:
        """Return the line of a function on which a call of the pass stands."""
        if is_operator(path):
            return code.line_of(self._stacks.get((path, call), ()))
        return self._named(code, path)

    def _has(self, key: CallKey) -> bool:
        return key[:4] == self._key[:4]

    def _named(self, code: Code, module: str) -> int | None:
        """Return the only line of a forward that calls a module in it by its name."""
        parent, name = parent_of(module), module.rpartition(".")[2]
        begins = self._begins.get(parent)
        if module == parent or begins is None or begins.line not in code.function:
            return None
        if begins.file != code.function.file:
            return None
        calls = re.compile(rf"\.{re.escape(name)}\(")
        found = [at for at, line in enumerate(code.function.lines) if calls.search(line)]
        return code.function.line + found[0] if len(found) == 1 else None
