"""The graphs of other runtimes that one recording follows, beside modules of PyTorch.

What follows a runtime is loaded when the program has imported that runtime: most never do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.runtime import GraphFacts, GraphSource
from llmdebug_nb.capture.runtimes import RUNTIMES
from llmdebug_nb.capture.session_parts import Parts


class GraphSources:
    """Follows models of runtimes: the given ones, or all that run."""

    def __init__(self, parts: Parts, given: Sequence[object], only: bool) -> None:
        """``given``: models of theirs. ``only``: no others are recorded.

        Raises CaptureError: one can't be recorded.
        """
        self._parts, self._only = parts, only
        self._sources: list[GraphSource] = []
        self._undo = ExitStack()
        try:
            for runtime in RUNTIMES:
                models = list(filter(runtime.is_model, given))
                if models and runtime.source is not None:
                    self._undo.callback(self._made(runtime.source(), models).stop)
        except BaseException:
            self.stop()
            raise

    def _made(self, kind: type[GraphSource], given: Sequence[object]) -> GraphSource:
        source = kind(self._parts, given, self._only)
        self._sources.append(source)
        return source

    def graphs(self) -> list[GraphFacts]:
        """Return what is known of each graph that is followed by now."""
        return [graph for source in self._sources for graph in source.graphs()]

    def start(self) -> None:
        """Follow the given ones, and listen to others. Raises CaptureError."""
        for source in self._sources:
            source.start()
        for runtime in () if self._only else RUNTIMES:
            if runtime.source is not None:
                follow = functools.partial(self._follow, runtime.source)
                self._undo.callback(pytorch.with_module(runtime.package, follow))

    def _follow(self, kind: Callable[[], type[GraphSource]], _: object) -> Callable[[], None]:
        source = self._made(kind(), ())
        source.start()
        return source.stop

    def stop(self) -> None:
        """Stop following, and listening."""
        self._undo.close()
