"""Maps each buffer of a kernel to the graph node whose value it holds, and to its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compat.inductor.kernel_calls import Buffer, KernelObserver

if TYPE_CHECKING:
    from torch._inductor import ir
    from torch._inductor.dependencies import ReadWrites
    from torch._inductor.graph import GraphLowering

NodeOutput = tuple[torch.fx.Node, str]  # a node and the slot of one of its outputs


class Operation(Protocol):
    """A lowered operation: computes one buffer, or several at once."""

    def get_origins(self) -> Collection[torch.fx.Node]: ...
    def get_origin_node(self) -> torch.fx.Node | None: ...
    def get_numel(self) -> int: ...
    def get_dtype(self) -> torch.dtype: ...


class ScheduledBuffer(Protocol):
    """A buffer that a scheduled node writes."""

    node: object

    def get_name(self) -> str: ...


class ScheduledNode(Protocol):
    """An operation in Inductor's schedule, or several that are fused."""

    node: Operation | None
    read_writes: ReadWrites

    def get_nodes(self) -> Sequence[ScheduledNode]: ...
    def get_outputs(self) -> Sequence[ScheduledBuffer]: ...


@dataclass
class Compilation:
    """One graph while Inductor compiles it. ``number``: the graph's number in the compiled code.

    ``results``: each node with the value that it was lowered to. ``values``: name of a buffer ->
    the node whose value it holds. ``var_means``: how many buffers of each var_mean node have been
    mapped. ``nodes``: the nodes scheduled into the kernel whose call is written next. ``renamed``:
    name of a buffer that this kernel overwrites -> the variable that holds it afterwards.
    """

    observer: KernelObserver
    number: int
    results: list[tuple[torch.fx.Node, object]] = field(default_factory=list)
    values: dict[str, torch.fx.Node] = field(default_factory=dict)
    var_means: Counter[torch.fx.Node] = field(default_factory=Counter)
    nodes: Sequence[ScheduledNode] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    def variable(self, name: str) -> str:
        """Return the variable of the compiled function that holds a buffer.

        It is that of another buffer if the buffer is written in place.
        """
        from torch._inductor.virtualized import V

        real = V.graph.scheduler.mutation_real_name.get(name, name)
        return str(self.renamed.get(real, real))


# -- lowered graphs -------------------------------------------------------------------------------


def lowered_values(
    results: Iterable[tuple[torch.fx.Node, object]], lowering: GraphLowering
) -> dict[str, torch.fx.Node]:
    """Return name of a buffer -> the node whose value it holds.

    A buffer holds the value of the node that was lowered to it, or of the argument that PyTorch's
    own kernel receives in it.
    """
    from torch._inductor import ir

    values: dict[str, torch.fx.Node] = {}
    multiple: dict[str, torch.fx.Node] = {}  # name of a kernel with several outputs -> its node
    for node, result in results:
        for part in result if isinstance(result, (list, tuple)) else ():
            inputs = getattr(_whole_buffer(part), "inputs", ())
            if inputs:
                multiple[inputs[0].get_name()] = node
        name = _buffer_name(result)
        if name is not None:
            values.setdefault(name, node)
    for operation in lowering.operations:
        if not isinstance(operation, (ir.ExternKernel, ir.ConcatKernel)):
            continue
        kernel = operation.get_origin_node() or multiple.get(operation.get_name())
        arguments = _argument_nodes(kernel) if kernel is not None else ()
        for operand, argument in zip(operation.inputs, arguments, strict=False):
            name = _buffer_name(operand)
            if name is not None and name not in lowering.graph_inputs:
                values.setdefault(name, argument)
    return values


def _argument_nodes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes among a node's arguments, in order and as often as they occur."""
    arguments = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return [argument for argument in arguments if isinstance(argument, torch.fx.Node)]


def _whole_buffer(value: object) -> ir.Buffer | None:
    """Return the buffer that a value fills; None for a view or a value without a buffer."""
    from torch._inductor import ir

    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value if isinstance(value, ir.Buffer) and value.name is not None else None


def _buffer_name(value: object) -> str | None:
    buffer = _whole_buffer(value)
    return None if buffer is None else str(buffer.get_name())


# -- kernels --------------------------------------------------------------------------------------


class KernelBuffers:
    """The buffers that one kernel reads and writes.

    ``reads``: names of its inputs. ``variables``: those that hold the written buffers.
    """

    def __init__(
        self, compilation: Compilation, kernel: str, nodes: Sequence[ScheduledNode],
        exists: Callable[[str], bool],
    ) -> None:  # fmt: skip
        """``exists(variable)``: the kernel's call names the variable."""
        self.reads: list[str] = []
        self._compilation, self._kernel, self._exists = compilation, kernel, exists
        # name of a written buffer -> its sources: indices into reads, names of written buffers
        self._sources: dict[str, set[int | str]] = {}
        # variable -> the buffer that it finally holds
        self._written: dict[str, tuple[str, Operation, NodeOutput | None]] = {}
        for node in nodes:
            self._add(node)

    @property
    def variables(self) -> list[str]:
        return list(self._written)

    def _add(self, node: ScheduledNode) -> None:
        from torch._inductor import ir

        sources = self._sources_of(node)
        operation = node.node
        var_mean = self._var_mean(operation) if operation is not None else None
        for output in node.get_outputs():
            name = output.get_name()
            self._sources[name] = sources
            variable = self._compilation.variable(name)
            renamed = self._compilation.renamed.get(name, name)
            layout = getattr(output.node, "layout", None)
            has_no_value = isinstance(layout, (ir.MultiOutputLayout, ir.NoneLayout))
            overwritten = renamed != name  # in place, by the same kernel
            if operation is None or has_no_value or overwritten or not self._exists(variable):
                continue
            self._written.pop(variable, None)  # overwritten by the same kernel
            self._written[variable] = name, operation, var_mean

    def _sources_of(self, node: ScheduledNode) -> set[int | str]:
        from torch._inductor import ir
        from torch._inductor.dependencies import WeakDep

        sources: set[int | str] = set()
        for read in sorted(node.read_writes.reads, key=str):
            if isinstance(read, WeakDep):
                continue  # only an order of execution
            if read.name in self._sources:
                sources.add(read.name)
            elif self._exists(self._compilation.variable(read.name)) and not isinstance(
                node.node, ir.MultiOutput
            ):
                if read.name not in self.reads:
                    self.reads.append(read.name)
                sources.add(self.reads.index(read.name))
        return sources

    def written(self) -> list[Buffer]:
        """Return the written buffers that remain after the kernel."""
        indices = {name: index for index, (name, _, _) in enumerate(self._written.values())}
        return [
            self._buffer(name, operation, var_mean, indices)
            for name, operation, var_mean in self._written.values()
        ]

    def _buffer(
        self, name: str, operation: Operation, var_mean: NodeOutput | None,
        indices: Mapping[str, int],
    ) -> Buffer:  # fmt: skip
        observer = self._compilation.observer
        node = var_mean[0] if var_mean is not None else self._node_of(name, operation)
        if node is None:
            nodes = [one.name for one in _in_order(operation.get_origins())]
            known = observer.name_unmapped(self._kernel, nodes)
        else:
            known = node.name
            observer.describe_node(node)
        slot = var_mean[1] if var_mean is not None else None
        slot = slot or _sum_slot(operation, node) or observer.slot_of(known)
        return Buffer(name, known, slot, *self._visible_sources(name, indices))

    def _node_of(self, name: str, operation: Operation) -> torch.fx.Node | None:
        """Return the node whose value a buffer holds.

        It is the node that Inductor names or that was lowered to the buffer, or else the last node
        of the operation with as many elements and the same dtype.
        """
        node = operation.get_origin_node() or self._compilation.values.get(name)
        writers = _in_place_writers(name)
        if node is None or node in writers:  # a writer's name: the buffer is its initial value
            alike = [one for one in _in_order(operation.get_origins()) if _is_like(one, operation)]
            node = next((one for one in reversed(alike) if one not in writers), None)
        if node is not None and node.target is torch.ops.aten.copy_.default:
            copied = node.args[1]  # the program changed its argument in place to this value
            return copied if isinstance(copied, torch.fx.Node) else node
        return node

    def _visible_sources(
        self, name: str, indices: Mapping[str, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `Buffer.reads` and `Buffer.inner` of a buffer.

        Buffers that don't remain after the kernel are replaced by their own sources.
        """
        reads, inner, remaining, done = set(), set(), [*self._sources[name]], {name}
        while remaining:
            source = remaining.pop()
            if isinstance(source, int):
                reads.add(source)
                continue
            if source not in done and source in indices:
                inner.add(indices[source])
            elif source not in done:
                remaining += self._sources[source]
            done.add(source)
        return tuple(sorted(reads)), tuple(sorted(inner))

    def _var_mean(self, operation: Operation) -> NodeOutput | None:
        """Return node and slot if a buffer holds an output of a var_mean node; else None."""
        from torch._inductor import ir

        data = getattr(operation, "data", None)
        if not isinstance(data, ir.Reduction):
            return None
        node = next(reversed(_in_order(operation.get_origins())), None)
        kinds = ("sum", "welford_reduce")
        if data.reduction_type not in kinds or node is None or "var_mean" not in str(node.target):
            return None
        counts, is_sum = self._compilation.var_means, data.reduction_type == "sum"
        # as sums: first the mean, then the variance; Welford computes both in one pass
        index = counts[node] if is_sum else getattr(data, "output_index", None)
        counts[node] += 1
        part, whole = _numel(operation), _numel_of(node.args[0])
        correction = node.kwargs.get("correction", 1)
        if not part or not whole or not isinstance(correction, int) or index not in (0, 1):
            return None
        if index == 0:
            return node, f"1 sum of {whole // part}" if is_sum else "1"
        return node, f"0 sum of {whole // part - correction}"


def _in_place_writers(name: str) -> set[torch.fx.Node]:
    """Return the nodes that later write to a buffer in place."""
    from torch._inductor.virtualized import V

    versions = {new for new, real in V.graph.scheduler.mutation_real_name.items() if real == name}
    if not versions:
        return set()
    writers = set()
    for operation in V.graph.operations:
        origins = operation.get_origins()
        if origins and not versions.isdisjoint(out.get_name() for out in operation.get_outputs()):
            writers.add(_in_order(origins)[-1])
    return writers


def _in_order(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return nodes in the order of their graph."""
    from torch._inductor.virtualized import V

    places = {node: place for place, node in enumerate(V.graph.graph.nodes)}
    return sorted(nodes, key=lambda node: places.get(node, -1))


def _numel(operation: Operation) -> int | None:
    """Return the number of elements of a buffer, or None if it is not known."""
    from torch._inductor.virtualized import V

    try:
        return int(V.graph.sizevars.optimization_hint(operation.get_numel()))
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _numel_of(node: object) -> int | None:
    """Return the number of elements of a node's value, or None if that is not a tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return pytorch.size_of(value) if isinstance(value, torch.Tensor) else None


def _is_like(node: torch.fx.Node, operation: Operation) -> bool:
    """Tell whether a node's value has the element count and dtype of an operation's."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != operation.get_dtype():
        return False
    return pytorch.size_of(value) == _numel(operation)


def _sum_slot(operation: Operation, node: torch.fx.Node | None) -> str | None:
    """Return ``0 sum of 64`` for a buffer that holds the sum behind the mean of 64 elements."""
    from torch._inductor import ir

    data = getattr(operation, "data", None)
    is_sum = isinstance(data, ir.Reduction) and data.reduction_type == "sum"
    if not is_sum or node is None or "mean" not in str(node.target):
        return None
    part, whole = _numel_of(node), _numel_of(node.args[0])
    return f"0 sum of {whole // part}" if part and whole else None
