"""The explorer of a program that is stepped through: it goes from halt to halt."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from llmdebug_nb.app.stepping import COMMANDS, Stepper, Stop
from llmdebug_nb.app.stepping.halt import Halt
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.notebook.widgets import Explorer


class StepPanel(Explorer):
    """Shows the present halt of a stepper, and the last one after the program's end.

    ``on_halt`` is called with each halt, and with None at the end.
    """

    def __init__(self, stepper: Stepper, on_halt: Callable[[Stop | None], None]) -> None:
        assert stepper.stop is not None
        self._stepper, self._on_halt, self._last = stepper, on_halt, stepper.stop
        view = Halt(stepper, stepper.stop, COMMANDS).view
        super().__init__(view, selected=stepper.stop.telling_row(view))
        stepper.watchers.append(self._go_on)

    def __repr__(self) -> str:
        """Return where the program is halted, or was last, and what agrees since a replacement."""
        return "\n".join(filter(None, (repr(self._last), self._stepper.rest)))

    def _html(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def _go_on(self) -> None:
        """Show where the program has got to."""
        stop = self._stepper.stop
        self._on_halt(stop)
        self._last = stop or self._last
        view = Halt(self._stepper, self._last, COMMANDS).view
        self._view, self._bridge = view, Bridge(view)
        with self.hold_sync():
            self.snapshot = view.overview()
            self.position, self.path = 0, ""
            self.selected = self._last.telling_row(view)
