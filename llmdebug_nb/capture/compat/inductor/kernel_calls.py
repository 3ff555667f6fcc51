"""Kernel calls of compiled code: their description, and the functions that compiled code calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GraphInput = torch.Tensor | int | torch.SymInt | None
# a compiled graph: takes its inputs as one list, which it may empty
CompiledFunction = Callable[[Sequence[object]], object]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that a kernel writes.

    ``name``: Inductor's name. ``node``: the graph node whose value the buffer holds.
    ``slot``: which output of the node; ``0 sum of N`` is a sum that gives output 0 divided by N.
    ``reads``, ``inner``: the inputs of its computation, as indices into `Launch.reads` and into
    `Launch.buffers`.
    """

    name: str
    node: str
    slot: str
    reads: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel call in the code of a graph.

    ``name``: the kernel's name, followed by ``#2`` for its second call. ``nodes``: the graph nodes
    that it computes. ``source``: its code, "" for a kernel of PyTorch. ``reads``: its inputs.
    """

    name: str
    nodes: tuple[str, ...]
    source: str
    reads: tuple[str, ...]
    buffers: tuple[Buffer, ...]


class KernelObserver(Protocol):
    """Observes one graph while it is compiled and whenever its kernels run.

    ``module``: the graph before lowering, stored here if ``wants_module``.
    """

    launches: list[Launch]
    module: torch.fx.GraphModule | None

    @property
    def wants_module(self) -> bool: ...
    def describe_nodes(self, nodes: torch.fx.Graph) -> None: ...
    def describe_node(self, node: torch.fx.Node) -> None: ...
    def slot_of(self, node: str) -> str: ...
    def name_unmapped(self, kernel: str, nodes: Sequence[str]) -> str: ...
    def note_unobserved(self, kernel: str) -> None: ...
    def observed(self, run: CompiledFunction) -> CompiledFunction: ...
    def begin_kernel(self, number: int, tensors: Sequence[object]) -> None: ...
    def end_kernel(self, number: int, tensors: Sequence[object]) -> None: ...


_observers: weakref.WeakValueDictionary[int, KernelObserver] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_BEGIN, _END = "_llmdebug_begin_kernel", "_llmdebug_end_kernel"
IMPORT = f"from {__name__} import begin_kernel as {_BEGIN}, end_kernel as {_END}"


def register(observer: KernelObserver) -> int:
    """Return a number by which compiled code finds the observer."""
    number = next(_numbers)
    _observers[number] = observer
    return number


def begin_kernel(graph: int, kernel: int, tensors: Sequence[object]) -> None:
    """Called by compiled code before a kernel runs, with its inputs."""
    observer = _observers.get(graph)
    if observer is not None:
        observer.begin_kernel(kernel, tensors)


def end_kernel(graph: int, kernel: int, tensors: Sequence[object]) -> None:
    """Called by compiled code after a kernel has run, with the buffers that it wrote."""
    observer = _observers.get(graph)
    if observer is not None:
        observer.end_kernel(kernel, tensors)


def begin_line(graph: int, kernel: int, variables: Sequence[str]) -> str:
    """Return the line of code before a kernel call. ``variables``: the kernel's inputs."""
    return f"{_BEGIN}({graph}, {kernel}, ({''.join(f'{name}, ' for name in variables)}))"


def end_line(graph: int, kernel: int, variables: Sequence[str]) -> str:
    """Return the line of code after a kernel call. ``variables``: the buffers that it writes."""
    return f"{_END}({graph}, {kernel}, ({''.join(f'{name}, ' for name in variables)}))"
