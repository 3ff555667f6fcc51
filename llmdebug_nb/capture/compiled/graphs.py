"""Compiled code: the graphs that `torch.compile` makes, run node by node (fx) or with every buffer of their kernels seen (fused).

A dispatch mode can't see inside compiled code, and hooks on a model's modules would be compiled into it. So the session comes
in as the backend of `torch.compile`: it is given each graph and decides how that runs. Root calls are still noticed by hooks on the
root, which lie outside of what is compiled, so steps are counted as ever, whatever the number of graphs in a call.
"""

from __future__ import annotations

import contextlib
import json
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import dynamo, inductor, torch_modes, triton
from llmdebug_nb.capture.compat.inductor import Launch
from llmdebug_nb.capture.compiled.fusion_switches import FusionSwitch
from llmdebug_nb.capture.compiled.origins import Frame, Origin, origin_of, origins
from llmdebug_nb.capture.operators.kinds import OperatorFilter, OperatorKinds
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.capture.walk import leaves, operator_inputs
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.paths import within

Run = Callable[
    [Sequence[Any]], Any
]  # a compiled graph: takes its inputs as one list, and may empty it


class Host(Protocol):
    """What graphs need of their session."""

    thread: ThreadState
    recorder: Recorder
    reference: Recorder | None
    observer: Any
    profile: Any
    problems: Counter[str]

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any: ...
    def follow_compiled(self, frame: Frame) -> None: ...
    def path_of(self, module: torch.nn.Module) -> str | None: ...
    def asks_for(self, path: str) -> bool: ...
    def enter_compiled(self) -> None: ...


@dataclass
class Traced:
    """A traced program, of which a forward and a backward graph are made. ``root_call``: the last one it ran in, None if that was not recorded.

    ``base``: path of the module whose method it is, ``here``: of the one that it last ran for: layers share what was compiled for one.
    """

    frame: Frame
    base: str | None = None
    here: str | None = None
    forwards: dict[str, Origin] = field(default_factory=dict)
    root_call: int | None = None

    def moved(self, path: str) -> str:
        """Return what a path of the module that it was compiled for is in the one that it runs for."""
        if (
            self.base is None
            or self.here is None
            or self.base == self.here
            or not within(path, self.base)
        ):
            return path
        return self.here + path[len(self.base) :]


@dataclass
class Graph:
    """One graph. ``calls``: how often each path is called in it."""

    number: int
    traced: Traced
    backward: bool
    origins: dict[str, Origin] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    kept: dict[str, bool] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return "backward" if self.backward else "forward"


@dataclass
class _Running:
    """A graph that runs and is recorded. ``base``: how often each path was called in this step before. ``open``: the calls that a kernel makes; ``launched``: its own, where times are taken."""

    graph: Graph
    root_call: int
    base: dict[str, int]
    open: list[OpenCall | None] = field(default_factory=list)
    launched: OpenCall | None = None


class Graphs:
    """The compiled graphs of one session. ``ran``: how many graphs were run so far."""

    def __init__(self, host: Host, options: DumpOptions) -> None:
        """Raises OptionError for a fusion switch that makes no sense, EmptyDumpError for an operator that does not exist."""
        self._host, self._options, self._roles = host, options, options.roles
        wanted = OperatorFilter(options.apis)
        wanted.refuse_unknown(("aten",))
        self._kinds = OperatorKinds(wanted)
        self._switch = FusionSwitch.read(options.fusion_switch)
        self.ran = 0
        self._config = dict(options.compiler_config or {})
        if "kernel" in options.profile:
            # a range around what each kernel does, which is the same otherwise
            self._config.setdefault("cpp.enable_kernel_profile", True)
        self._made = 0
        self._numbers: dict[tuple[Any, ...], Counter[str]] = {}
        self._here = threading.local()
        self._lock = threading.RLock()
        self._fused = options.graph != "fx"
        why = inductor.trouble() if self._fused else None
        if why is not None:
            self._fused = False
            host.problems[
                f"kernels can't be seen ({why}): the graph was run node by node instead"
            ] += 1

    # -- compiling ----------------------------------------------------------------------------------

    def backend(self, traced: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a traced program: a backend of `torch.compile`."""
        frame = dynamo.compiled_frame(traced)
        self._host.follow_compiled(frame)
        base = frame.base(self._host.path_of)
        program = Traced(frame, base, base)
        if not self._fused:
            return dynamo.aot(
                traced,
                inputs,
                lambda graph, backward: self._interpreted(
                    graph, Graph(self._next(), program, backward)
                ),
            )
        return inductor.compile_traced(
            traced, inputs, self._switch, self._config,
            lambda backward: _Seeing(self, Graph(self._next(), program, backward)),
        )  # fmt: skip

    def _next(self) -> int:
        with self._lock:
            self._made += 1
            return self._made - 1

    def describe(self, graph: Graph, nodes: torch.fx.Graph) -> None:
        """Find out what the nodes of a graph are."""
        forwards = graph.traced.forwards if graph.backward else None
        graph.origins = origins(
            nodes, graph.traced.frame, self._host.path_of, self._asked, forwards
        )
        if not graph.backward:
            graph.traced.forwards = graph.origins
        for name, origin in graph.origins.items():
            graph.kept[name] = self._host.asks_for(origin.module)
            graph.calls[origin.path] = max(graph.calls[origin.path], origin.number + 1)

    def _asked(self, function: Any) -> bool:
        operator = (
            self._kinds.aten(function) if isinstance(function, torch_modes.OpOverload) else None
        )
        return operator is not None and operator.wanted

    # -- running ------------------------------------------------------------------------------------

    def _interpreted(self, module: torch.fx.GraphModule, graph: Graph) -> Run:
        """Return what runs a graph node by node, and records each one while a step runs that was asked for."""
        self.describe(graph, module.graph)

        def run(args: Sequence[Any]) -> Any:
            with self.running(graph) as running:
                if running is None:
                    return module.forward(*args)
                return _Interpreter(module, self, running, self._host.recorder).boxed_run(
                    list(args)
                )

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextlib.contextmanager
    def running(self, graph: Graph) -> Iterator[_Running | None]:
        """A graph runs in this thread; gives None where it is not recorded."""
        outer = getattr(self._here, "running", None)
        running = self._here.running = self._host.guarded(self._begin, graph)
        try:
            yield running
        finally:
            self._here.running = outer
            if running is not None and graph.backward:
                self._host.guarded(self._host.recorder.flush)

    def _begin(self, graph: Graph) -> _Running | None:
        self.ran += 1
        program, thread = graph.traced, self._host.thread
        if not graph.backward:
            self._host.enter_compiled()
            program.root_call = thread.root_call if thread.on else None
            if program.base is not None:
                owner = dynamo.running_owner(program.frame.owner)
                program.here = (
                    self._host.path_of(owner) if owner is not None else None
                ) or program.base
        observer = self._host.observer
        if program.root_call is None or graph.phase not in self._options.phases or observer.paused:
            return None
        with self._lock:
            key = (program.root_call,) if graph.backward else (*thread.within, "forward")
            counts = self._numbers.setdefault(key, Counter())
            moved = {program.moved(path): number for path, number in graph.calls.items()}
            base = {path: counts[path] for path in moved}
            counts.update(moved)
        return _Running(graph, program.root_call, base)

    @property
    def now(self) -> _Running | None:
        """The graph that runs in this thread and is recorded."""
        return getattr(self._here, "running", None)

    def begins(
        self,
        running: _Running,
        name: str,
        recorder: Recorder,
        level: str,
        inputs: Any,
        said: Sequence[tuple[str, str]] = (),
    ) -> OpenCall | None:
        """A node is about to run; None where it is not asked for. ``inputs``: slot and tensor. ``said``: what is known of it, slot and text."""
        graph, observer = running.graph, self._host.observer
        origin, moved = graph.origins[name], graph.traced.moved
        at_home = graph.traced.here == graph.traced.base
        if not (graph.kept[name] if at_home else self._host.asks_for(moved(origin.module))):
            return None
        path, module = moved(origin.path), moved(origin.module)
        call = OpenCall(
            path, origin.op, level, module, running.base[path] + origin.number, running.root_call
        )
        call.phase = graph.phase
        if not observer.asks_for(call):
            return None
        source = (
            recorder.stack_number(list(origin.source))
            if origin.source and self._options.sources
            else None
        )
        row = [
            call.root_call,
            call.path,
            call.number,
            call.phase,
            level,
            call.op,
            source,
            None,
            None,
        ]
        recorder.record_operator(
            [
                *row,
                *(
                    (moved(origin.forward[0]), origin.forward[1])
                    if origin.forward
                    else (None, None)
                ),
            ]
        )
        role = "graph" if call.phase == "forward" else "graph.backward"
        recorder.record_texts(call, role, [("node", origin.node), ("fx", name), *said])
        if "input" in self._roles:
            self._see(recorder, call, "input", inputs)
        if self._host.profile is not None and level == "fx" and recorder is self._host.recorder:
            self._host.profile.begins(call)
        return call

    def ends(self, call: OpenCall, recorder: Recorder, outputs: Any, inputs: Any = ()) -> None:
        """A node has run. ``outputs``: slot and tensor. ``inputs``: those that were not there when it began."""
        observer, outputs = self._host.observer, list(outputs)
        if self._host.profile is not None and call.level == "fx":
            self._host.profile.ends(call)
        if inputs and "input" in self._roles:
            self._see(recorder, call, "input", inputs)
        if "output" in self._roles:
            self._see(recorder, call, "output", outputs)
        if recorder is not self._host.recorder:
            return
        observer.record_if_overflowing(call)
        if observer.on_call_end is not None and call.phase == "forward":
            observer.on_call_end(call, outputs)

    def _see(self, recorder: Recorder, call: OpenCall, role: str, found: Any) -> None:
        see = self._host.observer.record if recorder is self._host.recorder else recorder.record
        see(call, role, found)

    # -- kernels ------------------------------------------------------------------------------------

    def interpret(
        self,
        module: torch.fx.GraphModule,
        args: Sequence[Any],
        running: _Running,
        recorder: Recorder,
    ) -> None:
        """Run the graph that kernels were made of on copies of their inputs, and record that; the program sees nothing of it."""
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.no_grad(), dynamo.same_randomness(args):
            _Interpreter(module, self, running, recorder).run(*copies)

    def write_kernels(self, graph: Graph, launches: Sequence[Launch]) -> None:
        """Make the kernels of a graph part of the dump."""
        rows = [
            (f"graph{graph.number}/{launch.name}", ", ".join(launch.nodes), launch.source)
            for launch in launches
        ]
        self._host.guarded(self._host.recorder.sink.table, "kernels", rows)

    def note_tilings(self, graph: Graph, run: Run) -> None:
        """Make part of the dump how the kernels of a graph that has run are launched."""
        if "tiling" in self._options.profile:
            found = triton.configurations(run)
            rows = [
                (f"graph{graph.number}/{name}", json.dumps(configuration))
                for name, configuration in found
            ]
            self._host.recorder.sink.table("tilings", rows)

    @property
    def host(self) -> Host:
        return self._host


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph node by node and records what is asked for."""

    def __init__(
        self, module: torch.fx.GraphModule, graphs: Graphs, running: _Running, recorder: Recorder
    ) -> None:
        super().__init__(module)
        self._graphs, self._running, self._recorder = graphs, running, recorder

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is operator.getitem or n.name not in self._running.graph.origins:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op == "call_function" else ((), {})
        guarded = self._graphs.host.guarded
        call = guarded(
            self._graphs.begins,
            self._running,
            n.name,
            self._recorder,
            "fx",
            operator_inputs(args, kwargs),
        )
        result = super().run_node(n)
        if call is not None:
            guarded(self._graphs.ends, call, self._recorder, leaves(result))
        return result


class _Seeing:
    """One graph that is compiled to kernels: is told of its nodes and kernels, and of the buffers when they run."""

    def __init__(self, graphs: Graphs, graph: Graph) -> None:
        self._graphs, self._graph = graphs, graph
        self.launches: list[Launch] = []
        self.module: torch.fx.GraphModule | None = None
        self._noted = False  # how its kernels are launched

    @property
    def wants_module(self) -> bool:
        """The graph that the kernels are made of is run as well."""
        return self._graphs.host.reference is not None

    def described(self, nodes: torch.fx.Graph) -> None:
        self._graphs.describe(self._graph, nodes)

    def names(self, node: torch.fx.Node) -> None:
        """A buffer holds the value of a node: one that was not asked for, as a view gives nothing new, is named here."""
        graph = self._graph
        if node.name not in graph.origins:
            origin = origin_of(node, graph.traced.frame, self._graphs.host.path_of, graph.calls)
            graph.origins[node.name] = origin
            graph.kept[node.name] = self._graphs.host.asks_for(origin.module)

    def slot(self, name: str) -> str:
        return self._graph.origins[name].slot

    def unmapped(self, kernel: str, nodes: Sequence[str]) -> str:
        """Name a buffer that is the value of no node: after its kernel, in the module of the last node in it."""
        bare = kernel.rpartition("_")[0] if kernel.rpartition("_")[2].isdigit() else kernel
        origins, graph = self._graph.origins, self._graph
        module = next((origins[name].module for name in reversed(nodes) if name in origins), "")
        path = f"{module}/Kernel.{bare}"
        name = f"{path}#{graph.calls[path]}"
        origins[name] = Origin(module, path, f"Kernel.{bare}", graph.calls[path], "", ())
        graph.calls[path] += 1
        graph.kept[name] = self._graphs.host.asks_for(module)
        return name

    def unseen(self, kernel: str) -> None:
        self._graphs.host.problems[
            "a kernel of a kind that can't be looked into (combined or foreign) was not recorded"
        ] += 1

    def compiled(self, run: Run) -> Run:
        """Return what runs the compiled graph, and records it while a step runs that was asked for."""
        graphs, graph = self._graphs, self._graph
        graphs.write_kernels(graph, self.launches)

        def seen(args: Sequence[Any]) -> Any:
            with graphs.running(graph) as running:
                reference = graphs.host.reference
                if running is not None and reference is not None and self.module is not None:
                    graphs.host.guarded(graphs.interpret, self.module, args, running, reference)
                result = run(args)
                if running is not None and not self._noted:
                    self._noted = True
                    graphs.host.guarded(graphs.note_tilings, graph, run)
                return result

        seen._boxed_call = True  # type: ignore[attr-defined]
        return seen

    def given(self, number: int, tensors: Sequence[Any]) -> None:
        """A kernel is about to run. ``tensors``: what it reads, as in `Launch.reads`."""
        running = self._graphs.now
        if running is not None and running.graph is self._graph:
            self._graphs.host.guarded(self._begin, self.launches[number], running, tensors)

    def made(self, number: int, tensors: Sequence[Any]) -> None:
        """A kernel has run. ``tensors``: what it wrote, as in `Launch.buffers`."""
        running = self._graphs.now
        if running is not None and running.graph is self._graph:
            self._graphs.host.guarded(self._end, self.launches[number], running, tensors)

    def _begin(self, kernel: Launch, running: _Running, tensors: Sequence[Any]) -> None:
        code = f"graph{self._graph.number}/{kernel.name}"
        said = ("kernel", code)
        running.open = [
            self._graphs.begins(
                running, buffer.node, self._graphs.host.recorder, "fused",
                [(f"kernel.{kernel.reads[i]}", tensors[i]) for i in buffer.reads], [said, ("buffer", buffer.name)],
            )
            for buffer in kernel.buffers
        ]  # fmt: skip
        profile = self._graphs.host.profile
        if profile is not None:
            running.launched = self._launched(kernel, running)
            profile.begins(running.launched, code)

    def _launched(self, kernel: Launch, running: _Running) -> OpenCall:
        """Return the call of a kernel: it runs in the module of the last buffer that it writes."""
        traced = self._graph.traced
        module = traced.moved(self._graph.origins[kernel.buffers[-1].node].module)
        call = OpenCall(
            f"{module}/Kernel.{kernel.name}", kernel.name, "kernel", module, 0, running.root_call
        )
        call.phase = self._graph.phase
        return call

    def _end(self, kernel: Launch, running: _Running, tensors: Sequence[Any]) -> None:
        calls, running.open = running.open, []
        if running.launched is not None:
            self._graphs.host.profile.ends(running.launched)
            running.launched = None
        for call, buffer, tensor in zip(calls, kernel.buffers, tensors, strict=True):
            if call is not None:
                inner = [(f"kernel.{kernel.buffers[i].name}", tensors[i]) for i in buffer.inner]
                self._graphs.ends(call, self._graphs.host.recorder, [(buffer.slot, tensor)], inner)
