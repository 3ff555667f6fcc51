"""Runs of exported graphs as root calls of a recording."""

from __future__ import annotations

from collections.abc import Mapping

from llmdebug_nb.capture.graphs.graph import Graph
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.records import Node, RootCall


class GraphRuns:
    """Numbers the runs of graphs, and gives those who record them the parts to do it with."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.options, self.thread, self.recorder = parts.options, parts.thread, parts.recorder
        self.observer, self.notes = parts.observer, parts.notes
        self.problems, self.guarded = parts.guard.problems, parts.guard.run
        self.operators = OperatorFilter(parts.options.apis)

    @property
    def active(self) -> bool:
        return self._parts.guard.active

    def next_prefix(self, label: str) -> str:
        """Return the prefix of all paths of the next root."""
        return self._parts.roots.next_prefix(label)

    def add_root(self, root: object, nodes: list[Node]) -> None:
        """Follow what runs a graph, whose modules are ``nodes``."""
        self._parts.roots.add_nodes(nodes)
        self._parts.steps.add_root(root, nodes[0].root)

    def note_limits(self, graph: Graph, nested: str) -> None:
        """Note what of a graph is not recorded as it ran. ``nested``: types with graphs inside."""
        if graph.nested:
            self.notes.append(
                f"of {graph.nested} {nested} nodes only the outputs are recorded, "
                "not what runs inside"
            )
        if graph.random:
            self.notes.append(
                "the graph draws random numbers: the recording has drawn its own, "
                "beside the program's run"
            )

    def end_series(self, root: object) -> None:
        """Let the next run of a root begin another generation."""
        self._parts.steps.end_series(root)

    def selects_module(self, path: str) -> bool:
        """Return whether the control file selects a module."""
        return self._parts.filter.selected_modules([path], self._parts.roots.nodes)[0]

    def selection_changed(self) -> bool:
        """Read the control file again; return whether other modules may be selected now."""
        return self._parts.filter.changed()

    def begin_run(
        self, root: object, path: str, inputs: Mapping[str, object]
    ) -> tuple[RootCall, bool]:
        """Number a run that begins; also return whether it is recorded.

        ``path``: of the root. ``inputs``: by name, with ``use_cache`` and ``past_key_values`` if
        the graph has a cache.
        """
        steps, thread = self._parts.steps, self._parts.thread
        if inputs.get("use_cache") and inputs.get("past_key_values") is None:
            steps.end_series(root)  # an empty cache begins another text
        call = steps.begin(root, "", True, (), inputs)
        recording = self._parts.filter.selects(call)
        thread.begin(call, recording, path)
        return call, recording

    def end_run(self, recording: bool) -> None:
        self._parts.thread.end()
        self._parts.thread.after_recorded = False
        if recording:
            self._parts.commit()
