"""The values of an exported graph, by the names of the traced program that it was exported from.

An exporter notes for each node the operator that it stands for (``fx``), as torch.fx formats it.
Operators are looked up by name in torch. Arguments are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import GRAPH_LEVEL, CallKey, Record
from llmdebug_nb.replay.arguments import is_name
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Scalar, Side

_CALLED = re.compile(
    r"%(\w+) : .*?call_function\[target=torch\.ops\.aten\.([\w.]+)\]"
    r"\(args = (.*), kwargs = (\{.*\})\)",
    re.DOTALL,
)
_VALUE = re.compile(r"%(\w+)")
_NAMED = re.compile(r"(?<=[{ ])(\w+): ")
_MASK_DTYPES = ("bool", "float32", "float16", "bfloat16")


class FxCall(NamedTuple):
    """A node of the traced program, as text."""

    result: str
    operator: str
    args: str
    kwargs: str


@dataclass(frozen=True)
class GraphNode:
    """A node of an exported graph.

    ``fx``: the traced operator that it stands for. ``facts``: its other recorded scalars, by slot.
    """

    key: CallKey
    name: str
    fx: str
    facts: dict[str, Scalar]

    @property
    def op(self) -> str:
        return self.key.path.rpartition("/")[2]


class ExportedGraph:
    """The exported graph of one side, read step by step on demand."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._steps: dict[tuple[int, int], list[GraphNode]] = {}

    def nodes(self, key: CallKey) -> list[GraphNode]:
        """Return the nodes of the step of a call, in the order in which they ran."""
        step = (key.generation, key.step)
        if step not in self._steps:
            facts: dict[tuple[str, int], dict[str, Scalar]] = {}
            for row in self._side.run.index.scalars(role=GRAPH_LEVEL):
                facts.setdefault((row.path, row.call), {})[row.slot] = (row.type, row.value)
            self._steps[step] = [
                GraphNode(
                    CallKey(key.rank, *step, "forward", path, call),
                    own["node"][1] or "",
                    _joined(own),
                    own,
                )
                for (path, call), own in facts.items()
                if "node" in own
            ]
        return self._steps[step]

    def inside(self, key: CallKey) -> list[GraphNode]:
        """Return the nodes of a module."""
        return [node for node in self.nodes(key) if within(node.key.path, key.path)][
            : constants.TRACED_NODES
        ]

    def initializer(self, module: str, weight: str) -> str | None:
        """Return the name of the initializer that holds a weight."""
        slot = f"initializer.{weight}"
        rows = self._side.run.index.scalars(role=GRAPH_LEVEL, path=module, slot=slot)
        return rows[0].value if rows else None

    def output(self, node: GraphNode) -> Record | None:
        return next(iter(self._side.records(node.key, "output")), None)


def _joined(facts: dict[str, Scalar]) -> str:
    """Return the traced operator of a node; a long text is recorded as several scalars."""
    parts = sorted(
        (int(slot.partition(".")[2] or 0), text or "")
        for slot, (_, text) in facts.items()
        if slot.partition(".")[0] == "fx"
    )
    return "".join(text for _, text in parts)


class GraphValues:
    """The values that a graph computed, by the names of the traced program."""

    def __init__(self, graph: ExportedGraph, side: Side, key: CallKey) -> None:
        self._side, self._key = side, key
        # if several nodes stand for one traced operator, the last one counts
        self._nodes = {
            match[1]: node for node in graph.nodes(key) if (match := re.match(r"%(\w+) :", node.fx))
        }
        self._graph = graph

    def named(self, name: str) -> torch.Tensor:
        """Return the value of a name. Raises CannotReplay if it was not recorded."""
        node = self._nodes.get(name)
        record = self._graph.output(node) if node is not None else None
        if record is None:
            record = self._constant(name)
        if record is None:
            raise CannotReplay(f"{name} was not recorded")
        return self._side.load(record)

    @functools.cache  # noqa: B019 - lives as long as one search
    def _constant(self, name: str) -> Record | None:
        records = self._side.run.records(
            n=1,
            role="input",
            slot=f"kwargs.{name}",
            generation=self._key.generation,
            step=self._key.step,
        )
        return next(records, None)

    def mask(self, node: GraphNode) -> torch.Tensor | None:
        """Return the attention mask [..., queries, keys] that a node has as an initializer."""
        for slot, (_, text) in node.facts.items():
            record = self._constant(text or "") if slot.startswith("initializer.") else None
            if record is None or len(record.summary.shape) < 2:
                continue
            if record.summary.dtype in _MASK_DTYPES:
                try:
                    return self._side.load(record)
                except CannotReplay:
                    return None
        return None

    def load(self, record: Record) -> torch.Tensor:
        return self._side.load(record)

    def attentions(
        self, call: FxCall, group: list[GraphNode]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the possible query, key and value of an attention.

        They are taken by name. One that was not recorded is a view of an input of its nodes.

        Raises:
            CannotReplay: more than one was not recorded.
        """
        tensors = [self._or_none(name) for name in _VALUE.findall(call.args)[:3]]
        like = next((t for t in tensors[::-1] if t is not None and t.dim() == 4), None)
        missing = sum(t is None for t in tensors)
        if like is None or len(tensors) < 3 or missing > 1:
            raise CannotReplay("the inputs of the attention were not recorded")
        if not missing:
            yield tuple(t for t in tensors if t is not None)
            return
        for view in self._views(group, like.shape):
            yield tuple(view if t is None else t for t in tensors)

    def _views(self, group: list[GraphNode], shape: torch.Size) -> Iterator[torch.Tensor]:
        """Yield every way to view an outside input of the nodes in the wanted shape."""
        inner = {r.id for node in group for r in self._side.records(node.key, "output")}
        inputs = (r for node in group for r in self._side.records(node.key, "input"))
        for record in [r for r in inputs if r.producer not in inner]:
            if math.prod(record.summary.shape) != math.prod(shape):
                continue
            tensor = self._side.load(record)
            yield tensor.reshape(shape)
            if tensor.dim() == 4:
                orders = itertools.permutations(range(4))
                turned = (tensor.permute(order) for order in orders)
                yield from (view for view in turned if view.shape == shape)

    def _or_none(self, name: str) -> torch.Tensor | None:
        try:
            return self.named(name)
        except CannotReplay:
            return None

    def computed(self, call: FxCall, output: Record) -> torch.Tensor:
        """Return the operator's result, in the recorded shape. Raises CannotReplay."""
        op = f"Aten.{call.operator.removesuffix('.default')}"
        args = _read_arguments(call.args, self.named)
        kwargs = _read_arguments(_NAMED.sub(r"'\1': ", call.kwargs), self.named)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise CannotReplay(f"the arguments of {op} can't be read")
        size = output.summary.numel
        results = self._side.execute(Task(op, list(args), kwargs, size))
        if len(results) != 1 or results[0][1].numel() != size:
            raise CannotReplay(f"{op} gives a result of another kind or shape")
        return results[0][1].reshape(output.summary.shape)


def read(fx: str) -> FxCall:
    """Read a node of the traced program as torch.fx formats it. Raises CannotReplay."""
    match = _CALLED.match(fx)
    if match is None:
        raise CannotReplay("torch has no such operator")
    return FxCall(*match.groups())


def _read_arguments(text: str, named: Callable[[str], torch.Tensor]) -> object:
    """Return arguments with their tensors.

    Raises:
        CannotReplay: anything but numbers, texts, dtypes, names and containers of these.
    """
    try:
        tree = ast.parse(_VALUE.sub(r"value_\1", text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CannotReplay("its arguments can't be read") from None
    return _read_node(tree, named)


def _read_node(node: ast.expr | None, named: Callable[[str], torch.Tensor]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id.startswith("value_"):
        return named(node.id.removeprefix("value_"))
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _read_node(node.operand, named)
        if isinstance(number, (int, float, complex)):
            return -number
    if isinstance(node, ast.Attribute) and is_name(node.value, "torch") and node.attr in DTYPES:
        return DTYPES[node.attr]
    if isinstance(node, ast.Tuple):
        return tuple(_read_node(part, named) for part in node.elts)
    if isinstance(node, ast.List):
        return [_read_node(part, named) for part in node.elts]
    if isinstance(node, ast.Dict):
        items = zip(node.keys, node.values, strict=True)
        return {
            _read_node(key, named): _read_node(value, named)
            for key, value in items
            if key is not None
        }
    raise CannotReplay("its arguments can't be read")
