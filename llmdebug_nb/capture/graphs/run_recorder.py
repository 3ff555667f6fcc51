"""Records one run of an exported graph as if its modules and operators had been called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from llmdebug_nb.capture.calls import OpenCall, innermost
from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.graph import GraphModule, GraphNode, ModuleBegins, ModuleEnds
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.errors import first_line
from llmdebug_nb.core.records import GRAPH_LEVEL, RootCall

_UNREADABLE = (ValueError, OSError, TypeError)  # of constants whose external data is missing


class RunRecorder:
    """Records one run. ``values``: by name; inputs of a node are the tensors of earlier outputs."""

    def __init__(
        self,
        parts: Parts,
        followed: FollowedGraph,
        root: RootCall,
        values: dict[str, object],
    ) -> None:
        self._parts, self._followed, self._root, self.values = parts, followed, root, values
        self._observer, self._exposed = parts.observer, followed.exposed
        self._modules = parts.options.records_modules
        self._open: dict[str, OpenCall] = {}

    def record(self) -> None:
        """Record all modules and the wanted nodes in order of execution."""
        graph = self._exposed.graph if self._exposed is not None else None
        root = graph.modules[""] if graph is not None else GraphModule("")
        self._record_weights()
        fed = self._followed.fed
        inputs = self._named(graph.inputs if graph is not None else self.values)
        self._begin(root, {f"kwargs.{name}": inputs[name] for name in inputs if name in fed})
        for step in self._followed.plan:
            if isinstance(step, GraphNode):
                self._record_node(step, self._followed.is_wanted(step))
            elif isinstance(step, ModuleBegins):
                module = step.module
                self._begin(module, {} if module.guessed else self._module_inputs(module))
            else:
                self._end(step.module, self._module_outputs(step.module))
        outputs = self._named(graph.outputs if graph is not None else list(self.values))
        self._end(root, {_slot(name): outputs[name] for name in outputs if name not in fed})

    def record_logits(self) -> None:
        """Record only the output of the last module that has one."""
        for step in reversed(self._followed.plan):
            outputs = self._module_outputs(step.module) if isinstance(step, ModuleEnds) else {}
            if isinstance(step, ModuleEnds) and outputs:
                call = self._call(step.module.path, step.module.type or "module", "module")
                self._observer.record(call, "output", outputs.items())
                return

    def _named(self, names: Iterable[str]) -> dict[str, object]:
        return {name: self.values[name] for name in names if name in self.values}

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, module: str, op: str, level: str) -> OpenCall:
        path, outer = self._followed.path(module), innermost(self._open, module)
        return self._parts.thread.of_graph(path, op, level, outer, self._root.index)

    def _begin(self, module: GraphModule, inputs: Mapping[str, object]) -> None:
        name = "Module" if module.path else self._followed.label
        call = self._call(module.path, module.type or name, "module")
        self._parts.recorder.record_call(call)
        wanted = self._followed.kept[module.path] and self._modules
        call.selected, call.recorded = True, wanted and self._observer.names.selects(call)
        self._open[module.path] = call
        if call.recorded:
            self._observer.begin_call(call, list(inputs.items()))

    def _end(self, module: GraphModule, outputs: Mapping[str, object]) -> None:
        self._observer.end_call(self._open.pop(module.path), list(outputs.items()))

    def _record_node(self, node: GraphNode, wanted: bool) -> None:
        """Record a node, or only count it: ids don't depend on what is recorded."""
        outer = innermost(self._open, node.module)
        if not wanted:
            home = outer.module_id if outer is not None else ""
            self._parts.thread.next_id(self._followed.path(node.module), GRAPH_LEVEL, home)
            return
        call, recorder = self._call(node.module, node.op, GRAPH_LEVEL), self._parts.recorder
        call.selected, call.recorded = True, self._observer.names.selects(call)
        if not call.recorded:
            return
        recorder.record_call(call)
        stack = None
        if node.source and self._parts.options.sources:
            stack = recorder.sources.stack_number(list(node.source))
        within = (outer.path, outer.number) if outer is not None else (None, None)
        row = [call.root_call, call.path, call.number, "forward", GRAPH_LEVEL, call.op, stack]
        recorder.record_operator([*row, *within, None, None])
        if (call.path, call.number) not in self._followed.described:  # equal in all runs
            self._followed.described.add((call.path, call.number))
            recorder.record(call, GRAPH_LEVEL, self._facts(node))
        inputs, outputs = self._by_place(node.inputs), self._by_place(node.outputs)
        self._observer.begin_call(call, [*inputs, *node.scalars])
        self._observer.end_call(call, outputs)

    def _by_place(self, names: list[str]) -> list[tuple[str, object]]:
        values = self.values
        return [(str(at), values[name]) for at, name in enumerate(names) if name in values]

    def _facts(self, node: GraphNode) -> list[tuple[str, object]]:
        return [*node.facts, *(self._exposed.facts(node) if self._exposed is not None else ())]

    # -- modules --------------------------------------------------------------------------------

    def _module_inputs(self, module: GraphModule) -> dict[str, object]:
        """Return the inputs of a module by slot: ``0`` if there is one, else the values' names."""
        inputs = self._tensors(module.inputs)
        if len(inputs) == 1:
            return {"0": next(iter(inputs.values()))}
        return {f"kwargs.{name}": value for name, value in inputs.items()}

    def _module_outputs(self, module: GraphModule) -> dict[str, object]:
        """Return the outputs of a module by slot: results by place, others by the values' names."""
        results = enumerate(self._tensors(module.results).values())
        more = self._tensors(module.more)
        return {
            **{str(at): value for at, value in results},
            **{_slot(name): value for name, value in more.items()},
        }

    def _tensors(self, names: Iterable[str]) -> dict[str, object]:
        """Return those values that modules exchange, not sizes that a graph computes with."""
        tensors: dict[str, object] = {}
        for name in names:
            value = self._value(name)
            if isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex() or value.dim() > 1
            ):
                tensors[name] = value
        return tensors

    def _value(self, name: str) -> object:
        exposed = self._exposed
        if name not in self.values and exposed is not None and exposed.has_constant(name):
            try:
                self.values[name] = exposed.constant(name)
            except _UNREADABLE:
                self.values[name] = None
        return self.values.get(name)

    def _record_weights(self) -> None:
        """Record the weights and settings of each module, once."""
        exposed, followed = self._exposed, self._followed
        if followed.has_weights or exposed is None:
            return
        followed.has_weights = True
        for path, module in exposed.graph.modules.items():
            if not followed.kept[path]:
                continue
            tensors = {}
            for name, weight in module.weights.items():
                try:
                    tensor = exposed.constant(weight.name)
                except _UNREADABLE as error:
                    problem = f"weight {weight.name} can't be read: {first_line(error)}"
                    self._parts.guard.problems[problem] += 1
                    continue
                if tensor is not None:
                    tensors[name] = tensor.t().contiguous() if weight.transposed else tensor
            op, path = module.type or "Module", followed.path(path)
            call = OpenCall(path, op, "module", None, 0, self._root.index)
            weights = module.weights.items()
            names: list[tuple[str, object]] = [(f"initializer.{n}", w.name) for n, w in weights]
            names += [(f"transposed.{name}", True) for name, one in weights if one.transposed]
            self._parts.recorder.record(call, GRAPH_LEVEL, names)
            self._observer.weights.record(path, op, module.settings, tensors)


def _slot(name: str) -> str:
    """Return the slot of a value: dots in its name don't separate parts."""
    return name.replace(".", "\\.")
