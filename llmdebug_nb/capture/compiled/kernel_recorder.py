"""Records the kernels of a graph: their code, and their buffers whenever they run."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import triton
from llmdebug_nb.capture.compat.inductor.kernel_calls import CompiledFunction, Launch
from llmdebug_nb.capture.compiled.formulas import Formula, Formulas
from llmdebug_nb.capture.compiled.graph_recorder import CompiledGraph, GraphRecorder, GraphRun
from llmdebug_nb.capture.compiled.origins import Origin, origin_of
from llmdebug_nb.core.masking import masked, masked_json
from llmdebug_nb.core.paths import bounded
from llmdebug_nb.core.records import IN_KERNEL

_UNOBSERVED = "a combined or foreign kernel was not recorded: its buffers can't be observed"


class KernelRecorder:
    """Records one graph that is compiled to kernels; a `KernelObserver`."""

    def __init__(self, graphs: GraphRecorder, graph: CompiledGraph) -> None:
        self.launches: list[Launch] = []
        self.module: torch.fx.GraphModule | None = None
        self._graphs, self._graph, self._parts = graphs, graph, graphs.parts
        self._nodes: Formulas | None = None
        self._formulas: dict[str, Formula] = {}  # by buffer; each is recorded once
        self._has_tilings = "tiling" not in graphs.options.profile  # or none are wanted

    # -- while the graph is compiled ------------------------------------------------------------

    @property
    def wants_module(self) -> bool:
        """The graph behind the kernels is run and recorded, too."""
        return self._parts.reference is not None

    def describe_nodes(self, nodes: torch.fx.Graph) -> None:
        """Find the origins of the graph's nodes."""
        self._graphs.describe(self._graph, nodes)
        self._nodes = Formulas(nodes)

    def describe_node(self, node: torch.fx.Node) -> None:
        """Find the origin of a node whose value a buffer holds.

        Also of an unwanted one, such as a view; where operators are named, it is not recorded.
        """
        graph = self._graph
        if node.name not in graph.origins:
            frame, path_of = graph.program.frame, self._parts.roots.path_of
            self._add(node.name, origin_of(node, frame, path_of, graph.calls))

    def _add(self, name: str, origin: Origin) -> None:
        self._graph.origins[name] = origin
        named = bool(self._graphs.options.apis)
        self._graph.kept[name] = not named and self._parts.roots.selects_inside(origin.module)

    def slot_of(self, node: str) -> str:
        """Return the output slot of a node."""
        return self._graph.origins[node].slot

    def name_unmapped(self, kernel: str, nodes: Sequence[str]) -> str:
        """Name a buffer that is no node's value after its kernel, and return the name.

        It belongs to the module of the last node in the kernel.
        """
        stem, _, number = kernel.rpartition("_")
        op = f"Kernel.{stem if number.isdigit() else kernel}"
        origins, calls = self._graph.origins, self._graph.calls
        module = next((origins[name].module for name in reversed(nodes) if name in origins), "")
        path = bounded(f"{module}/{op}")
        name = f"{path}#{calls[path]}"
        self._add(name, Origin(module, path, op, calls[path], "", ()))
        calls[path] += 1
        return name

    def note_unobserved(self, kernel: str) -> None:
        """Note that the buffers of a kernel can't be recorded."""
        self._parts.guard.problems[_UNOBSERVED] += 1

    def observed(self, run: CompiledFunction) -> CompiledFunction:
        """Return a function that runs the compiled graph and records it in recorded steps."""
        sink = self._parts.recorder.sink
        rows = [
            (self._name(launch), ", ".join(launch.nodes), masked(launch.source))
            for launch in self.launches
        ]
        self._parts.guard.run(sink.table, "kernels", rows)
        self._parts.guard.run(self._describe_buffers)

        def run_recorded(args: Sequence[object]) -> object:
            with self._graphs.running(self._graph) as graph_run:
                reference, module = self._parts.reference, self.module
                if graph_run is not None and reference is not None and module is not None:
                    run_reference = self._graphs.run_reference
                    self._parts.guard.run(run_reference, module, args, graph_run, reference)
                result = run(args)
                if graph_run is not None and not self._has_tilings:
                    self._has_tilings = True
                    self._parts.guard.run(self._record_tilings, run)
                return result

        run_recorded._boxed_call = True  # type: ignore[attr-defined]  # read by AOTAutograd
        return run_recorded

    def _describe_buffers(self) -> None:
        """Note how each buffer is computed."""
        nodes, self._nodes = self._nodes, None  # the graph is large
        if nodes is None:
            return
        for launch in self.launches:
            for buffer in launch.buffers:
                formula = nodes.of(self.launches, launch, buffer)
                if formula is not None:
                    self._formulas[buffer.name] = formula

    def _name(self, launch: Launch) -> str:
        return f"graph{self._graph.number}/{launch.name}"

    # -- while its kernels run ------------------------------------------------------------------

    def _record_tilings(self, run: CompiledFunction) -> None:
        """Record the launch configurations of a graph that has run."""
        number = self._graph.number
        rows = [
            (f"graph{number}/{name}", json.dumps(masked_json(configuration)))
            for name, configuration in triton.configurations(run)
        ]
        self._parts.recorder.sink.table("tilings", rows)

    def begin_kernel(self, number: int, tensors: Sequence[object]) -> None:
        """Begin a kernel. ``tensors``: its inputs, as in `Launch.reads`."""
        run = self._graphs.current
        if run is not None and run.graph is self._graph:
            self._parts.guard.run(self._begin, self.launches[number], run, tensors)

    def end_kernel(self, number: int, tensors: Sequence[object]) -> None:
        """End a kernel. ``tensors``: the buffers that it wrote, as in `Launch.buffers`."""
        run = self._graphs.current
        if run is not None and run.graph is self._graph:
            self._parts.guard.run(self._end, self.launches[number], run, tensors)

    def _begin(self, launch: Launch, run: GraphRun, tensors: Sequence[object]) -> None:
        recorder, code = self._parts.recorder, self._name(launch)
        run.open = []
        for buffer in launch.buffers:
            inputs = [(f"{IN_KERNEL}{launch.reads[i]}", tensors[i]) for i in buffer.reads]
            texts = [("kernel", code), ("buffer", buffer.name)]
            if (formula := self._formulas.get(buffer.name)) is not None:
                given = dict(zip(launch.reads, tensors, strict=True))
                texts.append(("formula", formula.written(given)))
            begin_call = self._graphs.begin_call
            call = begin_call(run, buffer.node, recorder, "fused", inputs, texts)
            if call is not None:
                self._formulas.pop(buffer.name, None)
            run.open.append(call)
        if self._parts.profile is not None:
            run.kernel = self._kernel_call(launch, run)
            self._parts.profile.begins(run.kernel, code)

    def _kernel_call(self, launch: Launch, run: GraphRun) -> OpenCall:
        """Return the call of a kernel, in the module of the last buffer that it writes."""
        last = self._graph.origins[launch.buffers[-1].node]
        module = self._graph.program.moved(last.module)
        path = f"{module}/Kernel.{launch.name}"
        call = OpenCall(path, launch.name, "kernel", module, 0, run.root_call)
        call.phase = self._graph.phase
        return call

    def _end(self, launch: Launch, run: GraphRun, tensors: Sequence[object]) -> None:
        calls, run.open = run.open, []
        if run.kernel is not None and self._parts.profile is not None:
            self._parts.profile.ends(run.kernel)
            run.kernel = None
        for call, buffer, tensor in zip(calls, launch.buffers, tensors, strict=True):
            if call is not None:
                slots = {i: f"{IN_KERNEL}{launch.buffers[i].name}" for i in buffer.inner}
                inner = [(slot, tensors[i]) for i, slot in slots.items()]
                self._graphs.end_call(call, self._parts.recorder, [(buffer.slot, tensor)], inner)
