"""The formula of a buffer: the nodes of the graph between what its kernel reads and its value.

It is JSON, so that a dump tells what a kernel should compute, and `opcheck` computes it again:

    {"node": "mul_4",                                        the node whose value the buffer holds
     "reads": {"add": ["buf0", "0", [1, 7, 32], [1, 0]], ..}, node -> input, which output, shape of
                                                             the node, axes of the input in memory
     "steps": [["mul_4", "Aten.mul.Tensor", [{"node": "add"}, 2.0], {}], ..]}    in order
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.capture.compat.inductor.kernel_calls import Buffer, Launch
from llmdebug_nb.capture.operators.kinds import operator_name

_MOST = 200  # nodes of a formula; Inductor fuses 64 at most, and their views come on top
_NO_VALUES = ("device", "layout", "memory_format", "pin_memory")
_Reads = dict[str, list[object]]


class _UnknownError(Exception):
    """Something that the formula needs can't be written down."""


@dataclass
class Formula:
    """A formula before its kernel has run. Raises nothing."""

    node: str
    reads: _Reads
    steps: list[list[object]]

    def written(self, inputs: Mapping[str, object]) -> str:
        """Return it as JSON. ``inputs``: those of the kernel, which tell how they lie in memory."""
        reads = {}
        for node, (name, *facts) in self.reads.items():
            x = inputs.get(str(name))
            strides = x.stride() if isinstance(x, torch.Tensor) else ()
            axes = sorted(range(len(strides)), key=lambda axis: -strides[axis])
            reads[node] = [name, *facts, axes]
        return json.dumps({"node": self.node, "reads": reads, "steps": self.steps})


class Formulas:
    """The formulas of one graph's buffers."""

    def __init__(self, nodes: torch.fx.Graph) -> None:
        self._nodes = {node.name: node for node in nodes.nodes}

    def of(self, launches: Sequence[Launch], launch: Launch, buffer: Buffer) -> Formula | None:
        """Return the formula of a buffer that a kernel writes; None if it has none.

        ``launches``: all kernels of the graph.
        """
        known = {b.name: b for each in launches for b in each.buffers}
        names = [launch.reads[at] for at in buffer.reads]
        names += [launch.buffers[at].name for at in buffer.inner]
        held = {name: self._held(name, known) for name in names}
        if buffer.node not in self._nodes:
            return None
        walk = _Walk({place: name for name, place in held.items()}, known)
        try:
            walk.visit(self._nodes[buffer.node])
        except _UnknownError:
            return None
        return Formula(buffer.node, walk.reads, walk.steps)

    def _held(self, name: str, known: Mapping[str, Buffer]) -> tuple[str, str]:
        """Return the node whose value a buffer or an argument holds, and which output it is."""
        buffer = known.get(name)
        if buffer is None:
            return name, "0"
        node = self._nodes.get(buffer.node)
        one = node is not None and node.target is operator.getitem
        return buffer.node, "0" if one else buffer.slot.partition(" ")[0]


class _Walk:
    """Walks from a node to what its kernel reads. Raises _UnknownError."""

    def __init__(self, places: Mapping[tuple[str, str], str], known: Mapping[str, Buffer]) -> None:
        self.reads: _Reads = {}
        self.steps: list[list[object]] = []
        self._places, self._known = places, known
        self._done: set[str] = set()
        self._begun = False  # the node itself is what the kernel computes

    def visit(self, node: torch.fx.Node) -> None:
        if node.name in self._done:
            return
        self._done.add(node.name)
        if self._begun and self._is_read(node):
            return
        self._begun = True
        if node.op != "call_function" or len(self._done) > _MOST:
            raise _UnknownError
        args, kwargs = self._written(node.args), self._written(dict(node.kwargs))
        self.steps.append([node.name, _name(node), args, kwargs])

    def _is_read(self, node: torch.fx.Node) -> bool:
        """Note a node whose value the kernel reads."""
        place = node.name, "0"
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            of_tuple = node.args[0].name, str(node.args[1])
            place = of_tuple if of_tuple in self._places else place
        value = node.meta.get("val")
        if place not in self._places or not isinstance(value, torch.Tensor):
            return False
        name = self._places[place]
        buffer = self._known.get(name)
        slot = "0" if buffer is None else buffer.slot
        self.reads[node.name] = [name, slot, [_size(size) for size in value.shape]]
        return True

    def _written(self, value: object) -> object:
        if isinstance(value, torch.fx.Node):
            self.visit(value)
            return {"node": value.name}
        if isinstance(value, (list, tuple)):
            return [self._written(each) for each in value]
        if isinstance(value, dict):
            return {k: self._written(v) for k, v in value.items() if k not in _NO_VALUES}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, float):
            return {"float": str(value)}  # infinities are no JSON
        if value is None or isinstance(value, (bool, int, str)):
            return value
        raise _UnknownError


def _name(node: torch.fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return operator_name(node.target) if callable(node.target) else str(node.target)


def _size(size: object) -> int:
    """Return a size; -1 for one that changes from run to run."""
    return size if isinstance(size, int) else -1
