"""Records the runs of compiled graphs: the wanted nodes with their inputs and outputs."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import dynamo, torch_modes
from llmdebug_nb.capture.compiled.origins import Frame, Origin, origins
from llmdebug_nb.capture.operators.kinds import OperatorFilter, OperatorKinds
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.walk import leaves, operator_inputs
from llmdebug_nb.core.paths import within

Slots = Iterable[tuple[str, object]]  # tensors and other values, each with its slot


@dataclass
class TracedProgram:
    """A traced program, the source of a forward graph and perhaps a backward graph.

    Layers share the code that was compiled for one of them. ``base``: path of the module that it
    was compiled for; ``here``: path of the module that it last ran for. ``forwards``: origins of
    the forward graph. ``root_call``: the last root call, None if that was not recorded.
    """

    frame: Frame
    base: str | None = None
    here: str | None = None
    forwards: dict[str, Origin] = field(default_factory=dict)
    root_call: int | None = None

    def moved(self, path: str) -> str:
        """Convert a path in the module that was compiled to the module that is running."""
        base, here = self.base, self.here
        if base is None or here is None or base == here or not within(path, base):
            return path
        return here + path[len(base) :]


@dataclass
class CompiledGraph:
    """One graph of operators.

    ``origins``: by node. ``calls``: number of calls of each path in the graph. ``kept``: node ->
    whether the filters ask for its module.
    """

    number: int
    program: TracedProgram
    backward: bool
    origins: dict[str, Origin] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    kept: dict[str, bool] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return "backward" if self.backward else "forward"


@dataclass
class GraphRun:
    """A run of a graph that is recorded.

    ``base``: number of earlier calls of each path in this step. ``open``: the calls that the
    running kernel computes. ``kernel``: the kernel's own call, if it is timed.
    """

    graph: CompiledGraph
    root_call: int
    base: dict[str, int]
    open: list[OpenCall | None] = field(default_factory=list)
    kernel: OpenCall | None = None


class GraphRecorder:
    """Records the runs of one session's compiled graphs. ``runs``: number of runs so far."""

    def __init__(self, parts: Parts, enter: Callable[[], None]) -> None:
        """``enter()``: is called before a forward graph runs.

        Raises EmptyDumpError for an operator that doesn't exist.
        """
        self.parts, self.options, self._enter, self.runs = parts, parts.options, enter, 0
        wanted = OperatorFilter(parts.options.apis)
        wanted.refuse_unknown(("aten",))
        self._kinds = OperatorKinds(wanted)
        self._numbers: dict[tuple[object, ...], Counter[str]] = {}
        self._here = threading.local()
        self._lock = threading.RLock()

    def describe(self, graph: CompiledGraph, nodes: torch.fx.Graph) -> None:
        """Find the origins of a graph's nodes."""
        program, path_of = graph.program, self.parts.roots.path_of
        forwards = program.forwards if graph.backward else None
        graph.origins = origins(nodes, program.frame, path_of, self._is_wanted, forwards)
        if not graph.backward:
            program.forwards = graph.origins
        for name, origin in graph.origins.items():
            graph.kept[name] = self.parts.roots.selects_inside(origin.module)
            graph.calls[origin.path] = max(graph.calls[origin.path], origin.number + 1)

    def _is_wanted(self, function: object) -> bool:
        if not isinstance(function, torch_modes.OpOverload):
            return False
        kind = self._kinds.aten(function)
        return kind is not None and kind.wanted

    # -- runs -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, graph: CompiledGraph) -> Iterator[GraphRun | None]:
        """Record the graph's run in the block; yields None if it is not recorded."""
        outer, run = self.current, None
        try:  # an interrupt may come at any line
            run = self._here.run = self.parts.guard.run(self._begin_run, graph)
            yield run
        finally:
            self._here.run = outer
            if run is not None and graph.backward:
                self.parts.guard.run(self.parts.recorder.flush)

    @property
    def current(self) -> GraphRun | None:
        """The recorded run in this thread."""
        run: GraphRun | None = getattr(self._here, "run", None)
        return run

    def _begin_run(self, graph: CompiledGraph) -> GraphRun | None:
        self.runs += 1
        program, thread = graph.program, self.parts.thread
        if not graph.backward:
            self._enter()
            program.root_call = thread.root_call if thread.recording else None
            if program.base is not None:
                owner = dynamo.running_owner(program.frame.owner)
                here = self.parts.roots.path_of(owner) if owner is not None else None
                program.here = here or program.base
        asked = graph.phase in self.options.phases and not self.parts.observer.context.paused
        if program.root_call is None or not asked:
            return None
        with self._lock:
            key = (program.root_call,) if graph.backward else (*thread.step_key, "forward")
            counts = self._numbers.setdefault(key, Counter())
            moved = {program.moved(path): number for path, number in graph.calls.items()}
            base = {path: counts[path] for path in moved}
            counts.update(moved)
        return GraphRun(graph, program.root_call, base)

    def run_reference(
        self, module: torch.fx.GraphModule, args: Sequence[object], run: GraphRun,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        """Run and record the graph behind the kernels on copies of its inputs.

        The program is not affected.
        """
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.no_grad(), dynamo.same_randomness(args):
            NodeInterpreter(module, self, run, recorder).run(*copies)

    # -- calls ----------------------------------------------------------------------------------

    def begin_call(
        self, run: GraphRun, node: str, recorder: Recorder, level: str, inputs: Slots,
        texts: Sequence[tuple[str, str]] = (),
    ) -> OpenCall | None:  # fmt: skip
        """Begin the call of a node; returns None if it is not wanted.

        ``texts``: further facts about the call, slot and text.
        """
        graph, program, parts = run.graph, run.graph.program, self.parts
        origin, moved = graph.origins[node], graph.program.moved
        path, module = moved(origin.path), moved(origin.module)
        kept = graph.kept[node]
        if program.here != program.base:
            kept = parts.roots.selects_inside(module)
        if not kept:
            return None
        number = run.base[path] + origin.number
        call = OpenCall(path, origin.op, level, module, number, run.root_call)
        call.phase = graph.phase
        if not parts.observer.names.selects(call):
            return None
        stack = None
        if origin.source and self.options.sources:
            stack = recorder.sources.stack_number(list(origin.source))
        forward, forward_number = origin.forward or (None, None)
        gradient_of = (moved(forward) if forward is not None else None, forward_number)
        row = [call.root_call, path, call.number, call.phase, level, call.op, stack, None, None]
        recorder.record_operator([*row, *gradient_of])
        role = "graph" if call.phase == "forward" else "graph.backward"
        recorder.record_texts(call, role, [("node", origin.node), ("fx", node), *texts])
        self._record(recorder, call, "input", inputs)
        if parts.profile is not None and level == "fx" and recorder is parts.recorder:
            parts.profile.begins(call)
        return call

    def end_call(
        self, call: OpenCall, recorder: Recorder, outputs: Slots, inputs: Slots = ()
    ) -> None:
        """End the call of a node. ``inputs``: those that did not exist when it began."""
        observer, outputs = self.parts.observer, list(outputs)
        if self.parts.profile is not None and call.level == "fx":
            self.parts.profile.ends(call)
        self._record(recorder, call, "input", inputs)
        self._record(recorder, call, "output", outputs)
        if recorder is not self.parts.recorder:
            return
        observer.record_if_overflowing(call)
        if observer.on_call_end is not None and call.phase == "forward":
            observer.on_call_end(call, outputs)

    def _record(self, recorder: Recorder, call: OpenCall, role: str, values: Slots) -> None:
        if role in self.options.roles:
            own = recorder is self.parts.recorder
            record = self.parts.observer.record if own else recorder.record
            record(call, role, values)


class NodeInterpreter(torch.fx.Interpreter):
    """Runs a graph node by node and records the wanted ones."""

    def __init__(
        self, module: torch.fx.GraphModule, graphs: GraphRecorder, run: GraphRun, recorder: Recorder
    ) -> None:
        super().__init__(module)
        self._graphs, self._run, self._recorder = graphs, run, recorder

    def run_node(self, n: torch.fx.Node) -> object:
        if n.target is operator.getitem or n.name not in self._run.graph.origins:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op == "call_function" else ((), {})
        guarded, graphs, recorder = self._graphs.parts.guard.run, self._graphs, self._recorder
        inputs = operator_inputs(args, kwargs)
        call = guarded(graphs.begin_call, self._run, n.name, recorder, "fx", inputs)
        result: object = super().run_node(n)
        if call is not None:
            guarded(graphs.end_call, call, recorder, leaves(result))
        return result
