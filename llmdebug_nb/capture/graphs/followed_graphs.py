"""The graphs that one recording follows: the given ones, or any that runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch

from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.graph_runs import GraphRuns
from llmdebug_nb.capture.graphs.run_recorder import RunRecorder
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.runtime import GraphFacts
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.records import RootCall

_CACHE_NAMES = ("past", "cache")


class FollowedGraphs:
    """Begins, records and ends the runs of graphs, one at a time.

    ``kind``: what the program runs, in words. ``listeners``: those of its runs.
    """

    kind = "a graph"
    listeners: ClassVar[Listeners[Any]]

    def __init__(self, parts: Parts, only: bool) -> None:
        """``only``: no other graphs than those that are followed at the start are recorded."""
        self._host, self._options = GraphRuns(parts), parts.options
        self._only = only
        self._followed: dict[Hashable, FollowedGraph] = {}
        self._busy = False

    def start(self) -> None:
        """Listen to the runs of graphs."""
        self.listeners.add(self)

    def graphs(self) -> list[GraphFacts]:
        return [followed.facts() for followed in self._followed.values()]

    def select_all(self) -> None:
        """Apply the filters anew."""
        for followed in self._followed.values():
            followed.select()

    def _followed_by(
        self, key: Hashable, follow: Callable[[], FollowedGraph]
    ) -> FollowedGraph | None:
        """Return what follows something that is about to run; None if nothing does.

        ``key``: of what runs. ``follow()``: follow it, if it is not known yet.
        """
        if self._busy or not self._host.active:
            return None
        followed = self._followed.get(key)
        if followed is None and self._only:
            return None
        if not self._host.thread.outermost():
            self._host.problems[f"{self.kind} that runs inside of a module is not recorded"] += 1
            return None
        if followed is None:
            self._busy = True
            try:
                followed = self._followed[key] = follow()
            finally:
                self._busy = False
        return followed

    def _begin(
        self, followed: FollowedGraph, inputs: Mapping[str, object]
    ) -> tuple[RootCall, bool]:
        """Begin a root call, and tell whether it is recorded. ``inputs``: tensors by name."""
        if self._host.selection_changed():
            self.select_all()
        return self._host.begin_run(followed, followed.path(""), with_cache_names(inputs))

    def _end(self, on: bool) -> None:
        self._busy = False
        self._host.guarded(self._host.end_run, on)

    def _record(self, followed: FollowedGraph, root: RootCall, values: dict[str, object]) -> None:
        """Record a run as if its modules and operators had been called."""
        recorder = RunRecorder(self._host, followed, root, values)
        if self._options.logits:
            recorder.record_logits()
        else:
            recorder.record()


def with_cache_names(values: Mapping[str, object]) -> dict[str, object]:
    """Return the tensors among inputs, with the key-value cache under a model's usual names."""
    tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
    cached = [
        tensor.numel()
        for name, tensor in tensors.items()
        if any(word in name for word in _CACHE_NAMES)
    ]
    inputs: dict[str, object] = dict(tensors)
    if cached:
        inputs |= {"use_cache": True, "past_key_values": True if any(cached) else None}
    return inputs
