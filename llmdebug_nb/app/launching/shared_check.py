"""The check of one process of a program, whose results go into one file."""

from __future__ import annotations

import msgspec

from llmdebug_nb.app.errcheck import CheckOptions, ErrorCheck
from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.core.faults import CheckResult, ProcessCheck


class SharedCheck(ErrorCheck):
    """The check of this process; the launcher writes the result file."""

    def __init__(self, handover: Handover, options: CheckOptions) -> None:
        super().__init__(None, options)
        self._handover = handover

    def begin(self) -> None:
        """Begin to check, as a recording begins."""
        self.start()

    def _say(self, text: str) -> None:
        self._handover.say(text)

    def _keep(self, process: ProcessCheck) -> None:
        self._handover.note_check(msgspec.json.encode(process))

    def _write(self, result: CheckResult) -> None:
        """Leave the file to the launcher."""
