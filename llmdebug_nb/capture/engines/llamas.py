"""The models in llama.cpp that one recording follows: the given ones, or any that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from llmdebug_nb.capture.compat import llamacpp_api
from llmdebug_nb.capture.compat.llamacpp_api import Llama
from llmdebug_nb.capture.engines.llamacpp_steps import LlamaSteps
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.runtime import GraphFacts
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.errors import CaptureError


class Llamas:
    """Follows each ``Llama`` by `LlamaSteps`."""

    listeners: ClassVar[Listeners[Any]] = llamacpp_api.listeners

    def __init__(self, parts: Parts, given: Sequence[Llama], only: bool) -> None:
        """``only``: no others are recorded. Raises CaptureError: one can't be recorded."""
        self._parts, self._only = parts, only
        self._seen: list[Llama] = list(given)
        self._steps: list[LlamaSteps] = []
        try:
            for llama in given:
                self._steps.append(LlamaSteps(llama, parts))
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Follow the given ones, and listen to others. Raises CaptureError."""
        for steps in self._steps:
            steps.start()
        if not self._only:
            self.listeners.add(self)

    def stop(self) -> None:
        """Let each ``Llama`` use its own context again."""
        self.listeners.remove(self)
        for steps in self._steps:
            steps.stop()

    def computes(self, llama: Llama) -> None:
        """Follow a ``Llama`` that is about to compute for the first time."""
        if any(llama is each for each in self._seen):
            return
        self._seen.append(llama)
        try:
            steps = LlamaSteps(llama, self._parts)
            self._steps.append(steps)
            steps.start()
        except CaptureError as error:  # the program goes on without being recorded
            self._parts.guard.problems[str(error)] += 1

    def graphs(self) -> list[GraphFacts]:
        return [steps.facts() for steps in self._steps]
