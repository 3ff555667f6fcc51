"""Compiling a traced program with Inductor so that its kernels report their buffers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch

from llmdebug_nb.capture.compat.inductor import kernel_calls
from llmdebug_nb.capture.compat.inductor.buffers import (
    Compilation,
    KernelBuffers,
    ScheduledNode,
    lowered_values,
)
from llmdebug_nb.capture.compat.inductor.kernel_calls import (
    CompiledFunction,
    GraphInput,
    KernelObserver,
    Launch,
)
from llmdebug_nb.capture.compat.inductor.settings import restricted_fusion
from llmdebug_nb.capture.compiled.fusion_switches import FusionSwitch

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.graph import GraphLowering

# Cached code would lack our lines, and a CUDA graph would be replayed without running them.
_SETTINGS = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "triton.cudagraphs": False}
GraphPass = Callable[[torch.fx.Graph], None]
Original = Callable[..., object]  # a method of Inductor's


def compile_traced(
    traced: torch.fx.GraphModule, inputs: Sequence[GraphInput], switch: FusionSwitch,
    config: Mapping[str, object] | None, observe: Callable[[bool], KernelObserver],
) -> Callable[..., object]:  # fmt: skip
    """Compile a traced program; ``observe(backward)`` returns the observer of each graph."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    changes = {**(config or {}), **switch.config, **_SETTINGS}
    compile_inner: Callable[..., CompiledFunction] = compile_fx_inner

    def compile_graph(
        module: torch.fx.GraphModule, examples: Sequence[object], **options: object
    ) -> CompiledFunction:
        observer = observe(bool(options.get("is_backward")))
        keep = _keep_graph(observer, inductor_config.post_grad_custom_post_pass, module)
        with (
            inductor_config.patch({**changes, "post_grad_custom_post_pass": keep}),
            restricted_fusion(switch),
            _observed_by(observer),
        ):
            run = compile_inner(module, examples, **options)
        return observer.observed(run)

    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(changes):
        compiled = compile_fx(
            traced,
            inputs,
            inner_compile=compile_graph,  # type: ignore[arg-type]  # no OutputCode
        )
    return cast("Callable[..., object]", compiled)  # only ahead of time it is a file name


def _keep_graph(
    observer: KernelObserver, users: GraphPass | Sequence[GraphPass] | None,
    module: torch.fx.GraphModule,
) -> CustomGraphPass:  # fmt: skip
    """Return a pass that runs the user's passes and then keeps a copy of the graph."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = users if isinstance(users, Sequence) else [users] if users is not None else []

    class KeepGraph(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for users_pass in passes:
                users_pass(graph)
            if observer.wants_module:
                copy = torch.fx.Graph()
                copy.output(copy.graph_copy(graph, {}))
                observer.module = torch.fx.GraphModule(module, copy)

        def uuid(self) -> None:
            return None

    return KeepGraph()


# -- methods of Inductor that are wrapped while a graph is compiled -------------------------------


class _Thread(threading.local):
    """What the running thread compiles."""

    compilation: Compilation | None = None


_here = _Thread()
_patched = threading.RLock()


@contextlib.contextmanager
def _observed_by(observer: KernelObserver) -> Iterator[None]:
    """Add calls to the observer to the code that is compiled in the block."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    wrappers: tuple[tuple[type, str, Callable[..., object]], ...] = (
        (CppScheduling, "flush", _flush),
        (CppScheduling, "codegen_template", _codegen_template),
        (SIMDScheduling, "_launch_kernel_and_cleanup", _launch_kernel),
        (PythonWrapperCodegen, "generate_kernel_call", _generate_kernel_call),
        (PythonWrapperCodegen, "write_header", _write_header),
        (ExternKernelSchedulerNode, "codegen", _codegen_extern),
        (GraphLowering, "run_node", _run_node),
        (GraphLowering, "codegen", _codegen_graph),
    )
    with _patched, contextlib.ExitStack() as stack:
        for home, name, wrapper in wrappers:
            original = getattr(home, name)
            setattr(home, name, _method(wrapper, original))
            stack.callback(setattr, home, name, original)
        stack.callback(setattr, _here, "compilation", _here.compilation)
        _here.compilation = Compilation(observer, kernel_calls.register(observer))
        yield


def _method(wrapper: Callable[..., object], original: Original) -> Original:
    def method(self: object, *args: object, **kwargs: object) -> object:
        if _here.compilation is None:
            return original(self, *args, **kwargs)
        return wrapper(_here.compilation, original, self, *args, **kwargs)

    return method


class _Lines(Protocol):
    """Lines of generated code."""

    def writeline(self, line: str) -> None: ...


class _Wrapper(_Lines, Protocol):
    """The generated code of a graph. ``src_to_kernel``: code of a kernel -> its name."""

    imports: _Lines
    src_to_kernel: dict[str, str]


class _KernelArguments(Protocol):
    inplace_buffers: Mapping[str, object]


class _KernelGroup(Protocol):
    scheduled_nodes: Sequence[ScheduledNode]
    args: _KernelArguments


class _CppScheduling(Protocol):
    kernel_group: _KernelGroup


class _Kernel(Protocol):
    args: _KernelArguments


def _write_header(
    _: Compilation, original: Original, wrapper: _Wrapper, *args: object, **kwargs: object
) -> object:
    result = original(wrapper, *args, **kwargs)
    wrapper.imports.writeline(kernel_calls.IMPORT)
    return result


def _run_node(
    compilation: Compilation, original: Original, lowering: object, node: torch.fx.Node
) -> object:
    result = original(lowering, node)
    if node.op == "call_function":
        compilation.results.append((node, result))
    return result


def _codegen_graph(
    compilation: Compilation, original: Original, lowering: GraphLowering,
    *args: object, **kwargs: object,
) -> object:  # fmt: skip
    compilation.observer.describe_nodes(lowering.graph)
    compilation.values = lowered_values(compilation.results, lowering)
    return original(lowering, *args, **kwargs)


def _flush(compilation: Compilation, original: Original, scheduling: _CppScheduling) -> object:
    group = scheduling.kernel_group
    with _next_kernel(compilation, list(group.scheduled_nodes), group.args):
        return original(scheduling)


def _codegen_template(
    compilation: Compilation, original: Original, scheduling: object, template: ScheduledNode,
    epilogue: Sequence[ScheduledNode], prologue: Sequence[ScheduledNode],
) -> object:  # fmt: skip
    with _next_kernel(compilation, [template, *epilogue, *prologue], None):
        return original(scheduling, template, epilogue, prologue)


def _launch_kernel(
    compilation: Compilation, original: Original, scheduling: object, kernel: _Kernel,
    nodes: Sequence[ScheduledNode], **options: object,
) -> object:  # fmt: skip
    with _next_kernel(compilation, nodes, kernel.args):
        return original(scheduling, kernel, nodes, **options)


@contextlib.contextmanager
def _next_kernel(
    compilation: Compilation, nodes: Sequence[ScheduledNode], arguments: _KernelArguments | None
) -> Iterator[None]:
    """Note which scheduled nodes the next kernel call computes."""
    renamed = {}
    for name, overwritten in arguments.inplace_buffers.items() if arguments is not None else ():
        names = getattr(overwritten, "other_names", None)
        if names:
            renamed[name] = names[-1]
    before = compilation.nodes, compilation.renamed
    compilation.nodes = [leaf for node in nodes for leaf in node.get_nodes()]
    compilation.renamed = renamed
    try:
        yield
    finally:
        compilation.nodes, compilation.renamed = before


def _generate_kernel_call(
    compilation: Compilation, original: Original, wrapper: _Wrapper, name: str,
    call_args: Sequence[object], *args: object, **kwargs: object,
) -> object:  # fmt: skip
    """Write the call of a generated kernel."""
    nodes, compilation.nodes = compilation.nodes, None
    if nodes is None:
        compilation.observer.note_unobserved(name)
        return original(wrapper, name, call_args, *args, **kwargs)
    variables = {str(arg) for arg in call_args}
    kernels = reversed(wrapper.src_to_kernel.items())
    source = next((code for code, kernel in kernels if kernel == name), "")
    buffers = KernelBuffers(compilation, name, nodes, variables.__contains__)
    with _observed_call(compilation, wrapper, name, source, nodes, buffers):
        return original(wrapper, name, call_args, *args, **kwargs)


def _codegen_extern(
    compilation: Compilation, original: Original, scheduled: ScheduledNode, wrapper: _Wrapper
) -> object:
    """Write the call of one of PyTorch's own kernels."""
    from torch._inductor import ir

    node: object = scheduled.node
    name = getattr(node, "python_kernel_name", None) or type(node).__name__
    if isinstance(node, ir.MultiOutput):
        name = getattr(node.inputs[0], "python_kernel_name", None) or name
    name = f"extern:{name}"
    buffers = KernelBuffers(compilation, name, [scheduled], lambda variable: True)
    with _observed_call(compilation, wrapper, name, "", [scheduled], buffers):
        return original(scheduled, wrapper)


@contextlib.contextmanager
def _observed_call(
    compilation: Compilation, wrapper: _Wrapper, name: str, source: str,
    nodes: Sequence[ScheduledNode], buffers: KernelBuffers,
) -> Iterator[None]:  # fmt: skip
    """Write a line before and after the kernel call that is written in the block."""
    written = buffers.written()
    if not written:
        yield
        return
    launches, graph = compilation.observer.launches, compilation.number
    kernel = len(launches)
    operations = [node.node for node in nodes if node.node is not None]
    origins = dict.fromkeys(node.name for one in operations for node in one.get_origins())
    earlier = sum(launch.name.partition("#")[0] == name for launch in launches)
    name = f"{name}#{earlier + 1}" if earlier else name
    launches.append(Launch(name, tuple(origins), source, tuple(buffers.reads), tuple(written)))
    inputs = [compilation.variable(read) for read in buffers.reads]
    wrapper.writeline(kernel_calls.begin_line(graph, kernel, inputs))
    yield
    wrapper.writeline(kernel_calls.end_line(graph, kernel, buffers.variables))
