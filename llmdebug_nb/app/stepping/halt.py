"""The halt of a program, ready to show: where, why, the tensors, and what can be done."""

from __future__ import annotations

import textwrap
from pathlib import PurePath
from typing import TYPE_CHECKING

from llmdebug_nb.app.stepping.stop import Stop
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show.wire_findings import CodeLine, CodeView
from llmdebug_nb.show.wire_halts import Command, HaltView

if TYPE_CHECKING:
    from llmdebug_nb.app.stepping.stepper import Stepper
    from llmdebug_nb.show.views import View

_NO_CODE = "The code around this call can't be read."


class Halt:
    """A halt of a stepper. ``number``: of the halt, from 1; one more after the program's end.

    ``view``: its tensors. It implements `show.view_data.Halted`.
    """

    def __init__(self, stepper: Stepper, stop: Stop, commands: dict[str, str]) -> None:
        self._stepper, self._stop, self._commands = stepper, stop, commands
        self.number = stepper.halts + (not stepper.running)
        self.view: View = stop.view()
        self.view.halted = self

    def shown(self) -> HaltView:
        stop, stepper = self._stop, self._stepper
        ended = not stepper.running
        frame = stop.here.frame if stop.here else None
        path, op = printable(stop.path) or "the model", printable(stop.op)
        place = path if frame is None else printable(f"{PurePath(frame.file).name}:{frame.line}")
        where = f"{module_of(path)} · {op}" if is_operator(path) else f"{path} ({op})"
        return {
            "ended": ended,
            "head": "Ended; halted last in" if ended else "Halted in",
            "place": place,
            "where": f"{where}, step {stop.step}",
            "why": printable(stepper.ending if ended else stop.why),
            "tensors": printable("; ".join(stop.outputs_text())),
            "rest": printable(stepper.rest),
            "file": "" if frame is None else frame.file,
            "line": 0 if frame is None else frame.line,
            "commands": [
                Command(name=name, effect=effect, can=not ended and self._can(name))
                for name, effect in self._commands.items()
            ],
            "listing": _listing(stop),
        }

    def go(self, command: str) -> View:
        """Carry out a command; return the view of the next halt, or of this one at the end.

        Raises:
            CaptureError, OptionError: as `Stepper.go`.
            Exception: whatever the program raises.
        """
        stop = self._stepper.go(command)
        return Halt(self._stepper, stop or self._stop, self._commands).view

    def _can(self, name: str) -> bool:
        return name != "replace" or bool(self._stop.golden)


def _listing(stop: Stop) -> CodeView:
    function = stop.here.function if stop.here else None
    view = CodeView(
        golden_file="", golden_function="", mine_file="", mine_function="", lines=[], at=-1,
        note="" if function else _NO_CODE,
    )  # fmt: skip
    if stop.here is None or function is None:
        return view
    at = stop.here.frame.line - function.line
    texts = textwrap.dedent("\n".join(function.lines)).split("\n")
    lines = [_line(function.line + i, text, i == at) for i, text in enumerate(texts)]
    return {
        **view, "mine_file": function.file, "mine_function": function.name, "lines": lines,
        "at": at,
    }  # fmt: skip


def _line(number: int, text: str, is_here: bool) -> CodeLine:
    return {
        "golden_line": 0, "golden": "", "mine_line": number, "mine": text,
        "state": "halted" if is_here else "", "error": None,
    }  # fmt: skip
