"""The backend of `torch.compile` that records its graphs.

A graph runs node by node (fx), or as Inductor's kernels with every buffer observed (fused).

Dispatch modes can't see into compiled code, and hooks on a model's modules would be compiled with
it. A backend receives each graph and decides how it runs. Hooks on the root, outside of the
compiled code, still count root calls and steps, whatever the number of graphs in a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from llmdebug_nb.capture.compat import dynamo
from llmdebug_nb.capture.compat.inductor import compiling, settings
from llmdebug_nb.capture.compat.inductor.kernel_calls import CompiledFunction, GraphInput
from llmdebug_nb.capture.compiled.fusion_switches import FusionSwitch
from llmdebug_nb.capture.compiled.graph_recorder import (
    CompiledGraph,
    GraphRecorder,
    NodeInterpreter,
    TracedProgram,
)
from llmdebug_nb.capture.compiled.kernel_recorder import KernelRecorder
from llmdebug_nb.capture.compiled.origins import Frame
from llmdebug_nb.capture.session_parts import Parts


class Graphs:
    """The compiled graphs of one session."""

    def __init__(
        self, parts: Parts, follow: Callable[[Frame], None], enter: Callable[[], None]
    ) -> None:
        """``follow(frame)``: follow what is being compiled. ``enter``: see `GraphRecorder`.

        Raises OptionError for a bad fusion switch, EmptyDumpError for an unknown operator.
        """
        options = parts.options
        self._parts, self._follow = parts, follow
        self._recorder = GraphRecorder(parts, enter)
        self._switch = FusionSwitch.read(options.fusion_switch)
        self._config = dict(options.compiler_config or {})
        if "kernel" in options.profile:
            # adds a profiler range around each kernel, and changes nothing else
            self._config.setdefault("cpp.enable_kernel_profile", True)
        self._numbers = itertools.count()
        self._fused = options.graph != "fx"
        why = settings.trouble() if self._fused else None
        if why is not None:
            self._fused = False
            problem = f"kernels can't be seen ({why}): the graph was run node by node instead"
            parts.guard.problems[problem] += 1

    @property
    def ran(self) -> int:
        """Number of runs of graphs so far."""
        return self._recorder.runs

    def backend(
        self, traced: torch.fx.GraphModule, inputs: Sequence[GraphInput]
    ) -> Callable[..., object]:
        """Compile a traced program: a backend of `torch.compile`."""
        frame = dynamo.compiled_frame(traced)
        self._follow(frame)
        base = frame.base(self._parts.roots.path_of)
        program = TracedProgram(frame, base, base)

        def new_graph(backward: bool) -> CompiledGraph:
            return CompiledGraph(next(self._numbers), program, backward)

        if not self._fused:
            return dynamo.aot(
                traced, inputs, lambda module, back: self._interpreted(module, new_graph(back))
            )

        def observe(backward: bool) -> KernelRecorder:
            return KernelRecorder(self._recorder, new_graph(backward))

        return compiling.compile_traced(traced, inputs, self._switch, self._config, observe)

    def _interpreted(self, module: torch.fx.GraphModule, graph: CompiledGraph) -> CompiledFunction:
        """Return a function that runs a graph and records its nodes in recorded steps."""
        recorder = self._recorder
        recorder.describe(graph, module.graph)

        def run(args: Sequence[object]) -> object:
            with recorder.running(graph) as graph_run:
                if graph_run is None:
                    return module.forward(*args)
                interpreter = NodeInterpreter(module, recorder, graph_run, self._parts.recorder)
                return interpreter.boxed_run(list(args))

        run._boxed_call = True  # type: ignore[attr-defined]  # read by AOTAutograd
        return run
