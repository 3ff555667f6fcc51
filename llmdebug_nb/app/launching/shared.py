"""A recording of one process in a run that the processes of a program share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.options import DumpOptions


class SharedRecording(Recording):
    """``seeded``: what was seeded as the program began."""

    def __init__(
        self,
        model: Any,
        options: DumpOptions,
        handover: Handover,
        seeded: determinism.Switched | None,
    ) -> None:
        super().__init__(model, options)
        self._handover, self._seeded = handover, seeded

    @property
    def generations(self) -> Any:
        """What is told of each `generate`."""
        return self._running().generations

    @property
    def sessions(self) -> Any:
        """What is told of each run of ONNX Runtime."""
        return self._running().sessions

    def at_exit(self) -> None:
        """The process ends, for whatever reason it still can say."""
        if not self.running:
            return
        error = getattr(sys, "last_type", None)
        try:
            self.stop(None if error is None else error.__name__)
        except LLMDebugError as ours:
            self._handover.say(str(ours))

    def _create(self, name: str) -> Path:
        """Return the run of the launch, which the first process to come makes; and what lies beside it (``.fx``)."""
        with self._handover.alone():
            run = self._handover.run
            beside = name.removeprefix(self.options.name)
            if run is None or (beside and not run.with_name(run.name + beside).is_dir()):
                made = super()._create(name)
                if not beside:
                    self._handover.run = made
                return made
            return run.with_name(run.name + beside)

    def _discard(self) -> None:
        """Remove what this process wrote. The run stays for the others; who launched the program removes an empty one."""
        for folder in self._process_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _seed(self) -> determinism.Switched:
        return self._seeded or determinism.Switched()
