"""The recording of one process of a program, whose run all its processes share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.app.launching.handover import Handover
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import LLMDebugError
from llmdebug_nb.core.options import DumpOptions

if TYPE_CHECKING:
    from llmdebug_nb.app.live_models import Models


class SharedRecording(Recording):
    """The recording of this process, into the run of the launch."""

    def __init__(
        self,
        model: Models | None,
        options: DumpOptions,
        handover: Handover,
        seeded: determinism.Switched | None,
    ) -> None:
        """``seeded``: the seeds set when the program began."""
        super().__init__(model, options)
        self._handover, self._seeded = handover, seeded

    @property
    def generations(self) -> Any:
        """The listener of `generate` calls."""
        session: Any = self._running()
        return session.generations

    def at_exit(self) -> None:
        """End the recording with the process; send errors to the launcher."""
        if not self.running:
            return
        from llmdebug_nb.store import progress

        program_error = getattr(sys, "last_type", None)
        try:
            self.end(None if program_error is None else program_error.__name__)
        except LLMDebugError as error:
            self._handover.say(str(error))
        else:
            self._handover.note_end(progress.part(self._process_folders[0]))

    def _create(self, name: str) -> Path:
        """Return the run's folder, or that of the run beside it (``.fx``).

        The first process creates it.
        """
        with self._handover.lock():
            run = self._handover.run
            suffix = name.removeprefix(self.options.name)
            if run is not None:
                folder = run.with_name(run.name + suffix)
                if not suffix or folder.is_dir():
                    return folder
            folder = super()._create(name)
            if not suffix:
                self._handover.run = folder
            return folder

    def _discard(self) -> None:
        """Remove this process's empty part; the launcher removes a run that is empty as a whole."""
        for folder in self._process_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _seed(self) -> determinism.Switched:
        return self._seeded or determinism.Switched()
