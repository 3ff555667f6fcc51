"""The only home of Inductor's internals: what has Inductor's compiled code hand out what its kernels read and write.

Inductor turns a graph into a Python function that calls kernels on buffers. While one of our graphs is compiled, a line is
written in front of each kernel's call and one after it, which hand the buffers to `Seeing`; all else is as Inductor does it, so
the kernels and what they compute are the same. What is compiled this way never gets into Inductor's caches.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compiled.fusion_switches import FusionSwitch

# code from a cache has no lines of ours, and ours must not get into one. A CUDA graph would be recorded once, and then replayed past us
_SETTINGS = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "triton.cudagraphs": False}
_GIVEN, _MADE = "_llmdebug_given", "_llmdebug_made"
_IMPORT = f"from {__name__} import given as {_GIVEN}, made as {_MADE}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a kernel writes. ``name``: Inductor's. ``node``: the node of the graph whose value it is. ``slot``: which output of that, or
    ``0 sum of N``: it is a sum, which whoever reads it divides by N. ``reads``: places in `Launch.reads` of what it is computed from, ``inner``: in `Launch.buffers`.
    """

    name: str
    node: str
    slot: str
    reads: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a kernel. ``name``: with ``#2`` behind it for the second call of one kernel. ``nodes``: of the graph, that it computes. ``reads``: names of what it is given. ``source``: its code; "" for one of PyTorch's."""

    name: str
    nodes: tuple[str, ...]
    source: str
    reads: tuple[str, ...]
    buffers: tuple[Buffer, ...]


class Seeing(Protocol):
    """Follows one graph: told of its nodes and kernels while it is compiled, and of what these read and write whenever they run.

    ``module``: is set to the graph that kernels are made of, where ``wants_module``.
    """

    launches: list[Launch]
    module: torch.fx.GraphModule | None

    @property
    def wants_module(self) -> bool: ...
    def described(self, nodes: torch.fx.Graph) -> None: ...
    def names(self, node: torch.fx.Node) -> None: ...
    def slot(self, name: str) -> str: ...
    def unmapped(self, kernel: str, nodes: Sequence[str]) -> str: ...
    def unseen(self, kernel: str) -> None: ...
    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]: ...
    def given(self, number: int, tensors: Sequence[Any]) -> None: ...
    def made(self, number: int, tensors: Sequence[Any]) -> None: ...


_followed: weakref.WeakValueDictionary[int, Seeing] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def given(graph: int, kernel: int, tensors: Sequence[Any]) -> None:
    """Called by compiled code: a kernel is about to run."""
    seeing = _followed.get(graph)
    if seeing is not None:
        seeing.given(kernel, tensors)


def made(graph: int, kernel: int, tensors: Sequence[Any]) -> None:
    """Called by compiled code: a kernel has run."""
    seeing = _followed.get(graph)
    if seeing is not None:
        seeing.made(kernel, tensors)


def trouble() -> str | None:
    """Say why kernels can't be seen in this version of PyTorch; None where all that is needed is there."""
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.codegen.simd import SIMDScheduling
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: F401
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode
        from torch._inductor.virtualized import V
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no {error.name or error}"
    needed: tuple[tuple[Any, str], ...] = (
        (CppScheduling, "flush"), (CppScheduling, "codegen_template"), (SIMDScheduling, "_launch_kernel_and_cleanup"),
        (PythonWrapperCodegen, "generate_kernel_call"), (PythonWrapperCodegen, "write_header"),
        (ExternKernelSchedulerNode, "codegen"), (GraphLowering, "run_node"), (GraphLowering, "codegen"), (InductorChoices, "can_fuse_vertical"),
        (V, "set_choices_handler"), (config, "post_grad_custom_post_pass"), (config, "fx_graph_cache"),
    )  # fmt: skip
    missing = next(
        (
            f"{getattr(home, '__name__', 'V')}.{name}"
            for home, name in needed
            if not hasattr(home, name)
        ),
        None,
    )
    return missing and f"PyTorch {torch.__version__} has no {missing}"


def no_compiler() -> str | None:
    """Say why code for the CPU can't be compiled, or None where there is a compiler."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        return str(error).partition("\n")[0]
    return None


def check_config(given: Mapping[str, Any]) -> None:
    """Raise KeyError with the name of a setting that Inductor's configuration has not."""
    from torch._inductor import config

    for name in given:
        if name not in config._config:  # type: ignore[attr-defined]
            raise KeyError(name)


def settings() -> list[str]:
    """Return the names of the settings of Inductor's configuration."""
    from torch._inductor import config

    return list(config._config)  # type: ignore[attr-defined]


def compile_traced(
    traced: torch.fx.GraphModule, inputs: Sequence[Any], switch: FusionSwitch, config: Mapping[str, Any] | None,
    follow: Callable[[bool], Seeing],
) -> Callable[..., Any]:  # fmt: skip
    """Compile a traced program with Inductor; ``follow(backward)`` gives what follows each graph that is made of it."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    changes = {**(config or {}), **switch.config, **_SETTINGS}

    def inner(
        module: torch.fx.GraphModule, examples: Sequence[Any], **how: Any
    ) -> Callable[..., Any]:
        seeing = follow(bool(how.get("is_backward")))
        keep = _keeper(seeing, inductor_config.post_grad_custom_post_pass, module)
        with (
            inductor_config.patch({**changes, "post_grad_custom_post_pass": keep}),
            _switched(switch),
            _followed_by(seeing),
        ):
            run: Callable[..., Any] = compile_fx_inner(module, examples, **how)
        return seeing.compiled(run)

    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(changes):
        compiled: Any = compile_fx(traced, inputs, inner_compile=inner)  # type: ignore[arg-type]
    return compiled  # type: ignore[no-any-return]


def _keeper(seeing: Seeing, theirs: Any, module: torch.fx.GraphModule) -> Any:
    """Return a pass over the graph that keeps a copy of it, after what the user has put there."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Keep(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if theirs is not None:
                theirs(graph)
            if seeing.wants_module:
                copy = torch.fx.Graph()
                output = copy.graph_copy(graph, {})
                copy.output(output)
                seeing.module = torch.fx.GraphModule(module, copy)

        def uuid(self) -> Any:
            return None

    return Keep()


@contextlib.contextmanager
def _switched(switch: FusionSwitch) -> Iterator[None]:
    """Fuse only what the switch leaves on."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    if switch.says_nothing:
        yield
        return

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if _operators(node1) & switch.apart or _operators(node2) & switch.apart:
                return False
            return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

        @staticmethod
        def can_fuse_vertical(
            scheduler: Any, node1: Any, node2: Any, shared_data_score: int
        ) -> bool:
            return switch.vertical and InductorChoices.can_fuse_vertical(
                scheduler, node1, node2, shared_data_score
            )

        @staticmethod
        def can_fuse_horizontal(
            scheduler: Any, node1: Any, node2: Any, shared_data_score: int
        ) -> bool:
            return switch.horizontal and InductorChoices.can_fuse_horizontal(
                scheduler, node1, node2, shared_data_score
            )

    with V.set_choices_handler(Choices()):
        yield


def _operators(node: Any) -> set[str]:
    """Return the operators that a scheduled node computes, with and without their overload: ``aten.rsqrt.default``, ``aten.rsqrt``."""
    names = {
        str(origin.target)
        for one in node.get_nodes()
        if one.node is not None
        for origin in one.node.origins
    }
    return names | {name.rpartition(".")[0] for name in names}


# -- while a graph is compiled ----------------------------------------------------------------------


class _Compiling(threading.local):
    """What this thread compiles. ``number``: of the graph, in its code. ``results``: what each node became. ``values``: name of a
    buffer -> the node whose value it holds. ``moments``: how many buffers of a mean and variance there were so far. ``nodes``: what is scheduled into the kernel whose call is written next. ``renamed``: of what it reads, the
    variable that holds it then, where it is written in place."""

    seeing: Seeing | None = None
    number = 0
    results: list[tuple[torch.fx.Node, Any]]
    values: dict[str, torch.fx.Node]
    moments: dict[torch.fx.Node, int]
    nodes: Sequence[Any] | None = None
    renamed: Mapping[str, str] = {}


_here = _Compiling()
_patched = threading.RLock()


@contextlib.contextmanager
def _followed_by(seeing: Seeing) -> Iterator[None]:
    """Have the code that is compiled in here hand out its buffers."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    wraps: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (CppScheduling, "flush", _flush),
        (CppScheduling, "codegen_template", _template),
        (SIMDScheduling, "_launch_kernel_and_cleanup", _launch),
        (PythonWrapperCodegen, "generate_kernel_call", _kernel_call),
        (PythonWrapperCodegen, "write_header", _header),
        (ExternKernelSchedulerNode, "codegen", _extern),
        (GraphLowering, "run_node", _run_node),
        (GraphLowering, "codegen", _lowered),
    )
    with _patched, contextlib.ExitStack() as stack:
        for home, name, wrap in wraps:
            original = getattr(home, name)
            setattr(home, name, _bound(wrap, original))
            stack.callback(setattr, home, name, original)
        before, _here.seeing, _here.number = _here.seeing, seeing, next(_numbers)
        _here.results, _here.values, _here.moments = [], {}, {}
        stack.callback(setattr, _here, "seeing", before)
        _followed[_here.number] = seeing
        yield


def _bound(wrap: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _here.seeing is None:
            return original(self, *args, **kwargs)
        return wrap(_here.seeing, original, self, *args, **kwargs)

    return method


def _header(_: Seeing, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(wrapper, *args, **kwargs)
    wrapper.imports.writeline(_IMPORT)
    return result


def _run_node(_: Seeing, original: Any, lowering: Any, node: torch.fx.Node) -> Any:
    result = original(lowering, node)
    if node.op == "call_function":
        _here.results.append((node, result))
    return result


def _lowered(seeing: Seeing, original: Any, lowering: Any, *args: Any, **kwargs: Any) -> Any:
    seeing.described(lowering.graph)
    _here.values = _values(lowering)
    return original(lowering, *args, **kwargs)


def _values(lowering: Any) -> dict[str, torch.fx.Node]:
    """Return name of a buffer -> the node whose value it holds: what the node became, or what a kernel of PyTorch's is given for it."""
    from torch._inductor import ir

    found: dict[str, torch.fx.Node] = {}
    several: dict[
        str, torch.fx.Node
    ] = {}  # name of a kernel of PyTorch's with several outputs -> its node
    for node, result in _here.results:
        for part in result if isinstance(result, (list, tuple)) else ():
            inputs = getattr(_buffer_of(part), "inputs", ())
            if inputs:
                several[inputs[0].get_name()] = node
        name = _name_of(result)
        if name is not None:
            found.setdefault(name, node)
    for operation in lowering.operations:
        kernel = isinstance(operation, (ir.ExternKernel, ir.ConcatKernel))
        whole = (
            (operation.get_origin_node() or several.get(operation.get_name())) if kernel else None
        )
        if whole is None:
            continue
        given = [
            arg
            for arg in torch.utils._pytree.tree_leaves((whole.args, whole.kwargs))
            if isinstance(arg, torch.fx.Node)
        ]
        for operand, arg in zip(operation.inputs, given, strict=False):
            name = _name_of(operand)
            if name is not None and name not in lowering.graph_inputs:
                found.setdefault(name, arg)
    return found


def _buffer_of(value: Any) -> Any:
    """Return the buffer that a value of Inductor's is, all of it; None for a view, and for what is in no buffer."""
    from torch._inductor import ir

    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value if isinstance(value, ir.Buffer) and value.name is not None else None


def _name_of(value: Any) -> str | None:
    buffer = _buffer_of(value)
    return None if buffer is None else str(buffer.get_name())


def _flush(_: Seeing, original: Any, scheduling: Any) -> Any:
    group = scheduling.kernel_group
    with _about(list(group.scheduled_nodes), group.args):
        return original(scheduling)


def _template(
    _: Seeing, original: Any, scheduling: Any, template: Any, epilogue: Any, prologue: Any
) -> Any:
    with _about([template, *epilogue, *prologue], None):
        return original(scheduling, template, epilogue, prologue)


def _launch(_: Seeing, original: Any, scheduling: Any, kernel: Any, nodes: Any, **how: Any) -> Any:
    with _about(nodes, kernel.args):
        return original(scheduling, kernel, nodes, **how)


@contextlib.contextmanager
def _about(nodes: Sequence[Any], args: Any) -> Iterator[None]:
    """The next kernel call that is written is of these scheduled nodes."""
    renamed = {}
    for name, place in args.inplace_buffers.items() if args is not None else ():
        names = getattr(place, "other_names", None)
        if names:
            renamed[name] = names[-1]
    before = _here.nodes, _here.renamed
    _here.nodes, _here.renamed = [leaf for node in nodes for leaf in node.get_nodes()], renamed
    try:
        yield
    finally:
        _here.nodes, _here.renamed = before


def _kernel_call(
    seeing: Seeing,
    original: Any,
    wrapper: Any,
    name: str,
    call_args: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Write the call of a kernel, with a line before and one after it."""
    nodes, _here.nodes = _here.nodes, None
    if nodes is None:
        seeing.unseen(name)
        return original(wrapper, name, call_args, *args, **kwargs)
    known = {str(arg) for arg in call_args}
    source = next(
        (code for code, called in reversed(wrapper.src_to_kernel.items()) if called == name), ""
    )
    with _lines(seeing, wrapper, name, source, nodes, lambda variable: variable in known):
        return original(wrapper, name, call_args, *args, **kwargs)


def _extern(seeing: Seeing, original: Any, scheduled: Any, wrapper: Any) -> Any:
    """Write the call of a kernel of PyTorch's."""
    from torch._inductor import ir

    node = scheduled.node
    name = getattr(node, "python_kernel_name", None) or type(node).__name__
    if isinstance(node, ir.MultiOutput):
        name = getattr(node.inputs[0], "python_kernel_name", None) or name
    with _lines(seeing, wrapper, f"extern:{name}", "", [scheduled], lambda variable: True):
        return original(scheduled, wrapper)


@contextlib.contextmanager
def _lines(
    seeing: Seeing,
    wrapper: Any,
    name: str,
    source: str,
    nodes: Sequence[Any],
    exists: Callable[[str], bool],
) -> Iterator[None]:
    """Write a line before what is written in here, and one after it. ``exists(variable)``: the kernel's call names it."""
    reads, buffers, variables = _buffers(seeing, name, nodes, exists)
    if not buffers:
        yield
        return
    number = len(seeing.launches)
    origins = dict.fromkeys(
        origin.name for node in nodes if node.node is not None for origin in node.node.origins
    )
    again = sum(launch.name.partition("#")[0] == name for launch in seeing.launches)
    name = f"{name}#{again + 1}" if again else name
    seeing.launches.append(Launch(name, tuple(origins), source, tuple(reads), tuple(buffers)))
    where = f"{_here.number}, {number}"
    wrapper.writeline(f"{_GIVEN}({where}, ({''.join(f'{_variable(read)}, ' for read in reads)}))")
    yield
    wrapper.writeline(f"{_MADE}({where}, ({''.join(f'{variable}, ' for variable in variables)}))")


def _buffers(
    seeing: Seeing, kernel: str, nodes: Sequence[Any], exists: Callable[[str], bool]
) -> tuple[list[str], list[Buffer], list[str]]:
    """Return what a kernel reads, the buffers that it writes and that stay, and the variables that these are in."""
    from torch._inductor import ir

    reads: list[str] = []
    sources: dict[
        str, set[int | str]
    ] = {}  # what is written in the kernel -> what it is made of: places in reads, names of what else is written
    kept: dict[
        str, tuple[str, Any, _Moment]
    ] = {}  # variable -> the buffer that is in it in the end
    for node in nodes:
        made_of: set[int | str] = set()
        for dep in sorted(node.read_writes.reads, key=str):
            if type(dep).__name__ == "WeakDep":
                continue  # only an order
            if dep.name in sources:
                made_of.add(dep.name)
            elif exists(_variable(dep.name)) and not isinstance(node.node, ir.MultiOutput):
                if dep.name not in reads:
                    reads.append(dep.name)
                made_of.add(reads.index(dep.name))
        moment = _moment(node.node)
        for output in node.get_outputs():
            name = output.get_name()
            sources[name] = made_of
            layout = getattr(output.node, "layout", None)
            overwritten = _here.renamed.get(name, name) != name  # in place, by the same kernel
            if (
                isinstance(layout, (ir.MultiOutputLayout, ir.NoneLayout))
                or overwritten
                or not exists(_variable(name))
            ):
                continue
            kept.pop(_variable(name), None)  # what is written again by the same kernel is gone
            kept[_variable(name)] = name, node.node, moment
    places = {name: place for place, (name, _, _) in enumerate(kept.values())}
    buffers = [
        _buffer(seeing, kernel, *one, *_seen_sources(one[0], sources, places))
        for one in kept.values()
    ]
    return reads, buffers, list(kept)


def _seen_sources(
    name: str, sources: Mapping[str, set[int | str]], places: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a buffer is made of that can be looked at: places of what the kernel reads, and of its other buffers."""
    reads, inner, left, done = set(), set(), [*sources[name]], {name}
    while left:
        one = left.pop()
        if isinstance(one, int):
            reads.add(one)
        elif one in places and one not in done:
            inner.add(places[one])
        elif one not in done:
            left += sources[one]
        if isinstance(one, str):
            done.add(one)
    return tuple(sorted(reads)), tuple(sorted(inner))


def _variable(name: str) -> str:
    """Return the variable of the compiled function that holds a buffer: another where it is written in place."""
    from torch._inductor.virtualized import V

    real = V.graph.scheduler.mutation_real_name.get(name, name)
    return str(_here.renamed.get(real, real))


def _buffer(
    seeing: Seeing,
    kernel: str,
    name: str,
    node: Any,
    moment: _Moment,
    reads: tuple[int, ...],
    inner: tuple[int, ...],
) -> Buffer:
    """Find the node of the graph whose value a buffer is: that which Inductor says or which became it, else the last that it computes of as
    many elements and the same dtype."""
    origin, slot = moment
    origin = origin or node.get_origin_node() or _here.values.get(name)
    later = _written_again(name)
    if (
        origin is None or origin in later
    ):  # as what it is begun with, to be written to by the node that it is named after
        size, dtype = _numel(node), node.get_dtype()
        same = [
            one
            for one in _in_order(node.origins)
            if _numel_of(one) == size and one.meta["val"].dtype == dtype
        ]
        last = [one for one in same if one not in later]
        origin = last[-1] if last else None
    if (
        origin is not None
        and origin.target is torch.ops.aten.copy_.default
        and isinstance(origin.args[1], torch.fx.Node)
    ):
        origin = origin.args[1]  # written back to what the program changed in place: that value
    if origin is None:
        found = seeing.unmapped(kernel, [one.name for one in _in_order(node.origins)])
    else:
        found = origin.name
        seeing.names(origin)
    return Buffer(name, found, slot or _sum(node, origin) or seeing.slot(found), reads, inner)


def _written_again(name: str) -> set[torch.fx.Node]:
    """Return the nodes that write to a buffer in place, after it was made."""
    from torch._inductor.virtualized import V

    writers = {new for new, real in V.graph.scheduler.mutation_real_name.items() if real == name}
    operations = [
        one
        for one in V.graph.operations
        if writers.intersection(out.get_name() for out in one.get_outputs())
    ]
    return (
        {_in_order(one.get_origins())[-1] for one in operations if one.get_origins()}
        if writers
        else set()
    )


_Moment = tuple[torch.fx.Node | None, str | None]


def _moment(node: Any) -> _Moment:
    """Return the node whose mean or variance a buffer holds that computes both at once, and as which output of it."""
    from torch._inductor import ir

    data = getattr(node, "data", None)
    if not isinstance(data, ir.Reduction) or data.reduction_type not in ("sum", "welford_reduce"):
        return None, None
    last = next(iter(_in_order(node.origins)[::-1]), None)
    if last is None or "var_mean" not in str(last.target):
        return None, None
    summed = (
        data.reduction_type == "sum"
    )  # first the mean, then the variance; in one pass otherwise
    index = getattr(data, "output_index", None) if not summed else _here.moments.get(last, 0)
    _here.moments[last] = _here.moments.get(last, 0) + 1
    part, whole = _numel(node), _numel_of(last.args[0])  # type: ignore[arg-type]
    correction = last.kwargs.get("correction", 1)
    if not part or not whole or not isinstance(correction, int) or index not in (0, 1):
        return None, None
    if index == 0:
        return last, f"1 sum of {whole // part}" if summed else "1"
    return last, f"0 sum of {whole // part - correction}"


def _in_order(origins: Any) -> list[torch.fx.Node]:
    """Return nodes in the order of their graph."""
    from torch._inductor.virtualized import V

    places = {node: place for place, node in enumerate(V.graph.graph.nodes)}
    return sorted(origins, key=lambda node: places.get(node, -1))


def _numel(node: Any) -> int | None:
    """Return how many elements a buffer has; None where that is not known."""
    from torch._inductor.virtualized import V

    try:
        return int(V.graph.sizevars.optimization_hint(node.get_numel()))
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _numel_of(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return pytorch.size_of(value) if isinstance(value, torch.Tensor) else None


def _sum(node: Any, origin: torch.fx.Node | None) -> str | None:
    """Return what a buffer is that has yet to be divided to be the mean that it is said to be: ``0 sum of 64``; None for any other."""
    from torch._inductor import ir

    data = getattr(node, "data", None)
    if (
        not isinstance(data, ir.Reduction)
        or data.reduction_type != "sum"
        or origin is None
        or "mean" not in str(origin.target)
    ):
        return None
    part, whole = _numel_of(origin), _numel_of(origin.args[0])  # type: ignore[arg-type]
    return f"0 sum of {whole // part}" if part and whole else None
