"""The calls of one pass over a graph: modules begin and end where their nodes do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from llmdebug_nb.capture.calls import Leaf, OpenCall, innermost
from llmdebug_nb.capture.engines.ggml_graph import Graph, NodeKey, path_in
from llmdebug_nb.capture.engines.ggml_plan import Described
from llmdebug_nb.capture.engines.ggml_results import Results
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.ggml import FACTS, PREFIX, ROLE
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import RootCall

_LOGITS = "result_output"  # the name that llama.cpp gives to the logits


class Followed(Protocol):
    """What is recorded. ``kept``: module -> whether the filters ask for it."""

    graph: Graph
    label: str
    kept: dict[str, bool]


class Computed(NamedTuple):
    """A node that was computed."""

    key: NodeKey
    inputs: Sequence[Leaf]
    output: torch.Tensor
    described: Described


class GraphCalls:
    """``results``: of the nodes so far. ``module``: the present."""

    def __init__(self, parts: Parts, followed: Followed, prefix: str, root: RootCall) -> None:
        self._parts, self._followed, self._prefix, self._root = parts, followed, prefix, root
        self.results = Results(parts.recorder)
        self.module = ""
        self._open: dict[str, OpenCall] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        self._result: tuple[OpenCall, Leaf] | None = None

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Begin the call of the model."""
        self._begin("", list(inputs.items()))

    def node(self, node: Computed) -> None:
        """Record a node, after the modules that ended or began with it."""
        self._enter(node.described.module, node.inputs)
        if node.described.listed:
            self._record(node)
        self._last = node.key.name, node.output

    def end(self) -> None:
        """End the calls that are open, and the model's."""
        self._leave(())
        if self._parts.options.logits and self._result is not None:
            call, leaf = self._result
            self._parts.observer.record(call, "output", [leaf])

    # -- modules ----------------------------------------------------------------------------------

    def _enter(self, module: str, inputs: Sequence[Leaf]) -> None:
        if module == self.module:  # all that is around it has begun
            return
        around = [module, *ancestors(module)]
        self._leave(around)
        for path in reversed(around):
            if path not in self._open and self._followed.graph.called(path):
                # what it takes from outside: one tensor is its input 0
                leaves = [("0", inputs[0][1])] if len(inputs) == 1 else list(inputs)
                self._begin(path, leaves)
        self.module = module

    def _leave(self, around: Sequence[str]) -> None:
        """End the calls of all modules but these."""
        for path in [path for path in reversed(self._open) if path not in around]:
            call = self._open.pop(path)
            if self._last is None:
                continue
            name, output = self._last
            leaf: Leaf = ("logits" if not path and name == _LOGITS else "0", output)
            self._parts.observer.end_call(call, [leaf])
            if path:
                self._result = call, leaf

    def _begin(self, path: str, inputs: Sequence[Leaf]) -> None:
        options, observer = self._parts.options, self._parts.observer
        op = self._followed.graph.type_of(path, self._followed.label)
        call = self._call(path, op, "module", innermost(self._open, path))
        self._parts.recorder.record_call(call)
        wanted = self._followed.kept.get(path, False) and options.records_modules
        call.selected = True
        call.recorded = wanted and not options.logits and observer.names.selects(call)
        self._open[path] = call
        if call.recorded:
            observer.begin_call(call, inputs)

    # -- nodes ------------------------------------------------------------------------------------

    def _record(self, node: Computed) -> None:
        recorder, observer = self._parts.recorder, self._parts.observer
        outer = innermost(self._open, node.described.module)
        call = self._call(node.described.module, PREFIX + node.key.op, ROLE, outer)
        call.selected, call.recorded = True, observer.names.selects(call)
        if not call.recorded:
            return
        recorder.record_call(call)
        within = (outer.path, outer.number) if outer is not None else (None, None)
        row = [call.root_call, call.path, call.number, "forward", ROLE, call.op, None]
        recorder.record_operator([*row, *within, None, None])
        facts = [("name", node.key.name), (FACTS, node.described.facts)]
        recorder.record_texts(call, ROLE, facts if node.described.facts else facts[:1])
        observer.begin_call(call, [*node.inputs, *node.described.parameters])
        observer.end_call(call, [("0", node.output)])

    def _call(self, module: str, op: str, level: str, outer: OpenCall | None) -> OpenCall:
        path = path_in(self._prefix, module)
        return self._parts.thread.of_graph(path, op, level, outer, self._root.index)
