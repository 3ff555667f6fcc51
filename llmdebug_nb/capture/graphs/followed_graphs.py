"""The graphs that one recording follows: the given ones, or any that runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch

from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.graph import Graph
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
        self._parts, self._options = parts, parts.options
        self._problems, self._guarded = parts.guard.problems, parts.guard.run
        self._only = only
        self._followed: dict[Hashable, FollowedGraph] = {}
        self._busy = False

    def start(self) -> None:
        """Listen to the runs of graphs."""
        self.listeners.add(self)

    def graphs(self) -> list[GraphFacts]:
        return [followed.facts() for followed in self._followed.values()]

    def _note_limits(self, graph: Graph, nested: str) -> None:
        """Note what of a graph is not recorded as it ran. ``nested``: types with graphs inside."""
        if graph.nested:
            self._parts.notes.append(
                f"of {graph.nested} {nested} nodes only the outputs are recorded, "
                "not what runs inside"
            )
        if graph.random:
            self._parts.notes.append(
                "the graph draws random numbers: the recording has drawn its own, "
                "beside the program's run"
            )

    def _followed_by(
        self, key: Hashable, follow: Callable[[], FollowedGraph]
    ) -> FollowedGraph | None:
        """Return what follows something that is about to run; None if nothing does.

        ``key``: of what runs. ``follow()``: follow it, if it is not known yet.
        """
        if self._busy or not self._parts.guard.active:
            return None
        followed = self._followed.get(key)
        if followed is None and self._only:
            return None
        if not self._parts.thread.outermost():
            self._problems[f"{self.kind} that runs inside of a module is not recorded"] += 1
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
        steps, wanted, given = self._parts.steps, self._parts.filter, with_cache_names(inputs)
        if wanted.changed():
            for each in self._followed.values():
                each.select()
        if given.get("use_cache") and given.get("past_key_values") is None:
            steps.end_series(followed)  # an empty cache begins another text
        call = steps.begin(followed, "", True, (), given)
        recording = wanted.selects(call)
        self._parts.thread.begin(call, recording, followed.path(""))
        return call, recording

    def _end(self, on: bool) -> None:
        self._busy = False
        self._guarded(self._end_run, on)

    def _end_run(self, recording: bool) -> None:
        self._parts.thread.end()
        self._parts.thread.after_recorded = False
        if recording:
            self._parts.commit()

    def _record(self, followed: FollowedGraph, root: RootCall, values: dict[str, object]) -> None:
        """Record a run as if its modules and operators had been called."""
        recorder = RunRecorder(self._parts, followed, root, values)
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
