"""What an exported graph computed, by the names of the traced program that it is made of.

An exporter notes of each node the operator that it is made of (``fx``), as torch.fx formats it. Operators are found by name among those of torch, and
arguments are read, never evaluated.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Record
from llmdebug_nb.explain.calls import Key
from llmdebug_nb.explain.replay import FAILURES, operator, quiet
from llmdebug_nb.explain.runs import NotAgain, Scalar, Side

ROLE = "onnx"  # of the scalars that say what a node is
_CALLED = re.compile(
    r"%(\w+) : .*?call_function\[target=torch\.ops\.aten\.([\w.]+)\]\(args = (.*), kwargs = (\{.*\})\)",
    re.DOTALL,
)
_VALUE = re.compile(r"%(\w+)")
_NAMED = re.compile(r"(?<=[{ ])(\w+): ")
_MOST = 400  # nodes of a module that are looked at
Fx = tuple[str, str, str, str]  # result, operator, arguments, keyword arguments


@dataclass(frozen=True)
class Node:
    """``key``: its call. ``name``: in the graph. ``fx``: what it is made of, as the exporter wrote it. ``said``: what else is known of it."""

    key: Key
    name: str
    fx: str
    said: dict[str, Scalar]

    @property
    def op(self) -> str:
        return self.key.path.rpartition("/")[2]


class Graph:
    """The exported graph of one side, as far as one comparison needs it."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._steps: dict[tuple[int, int], list[Node]] = {}

    def nodes(self, key: Key) -> list[Node]:
        """Return the nodes of the step that a call is of, in the order in which they ran."""
        step = (key.generation, key.step)
        if step not in self._steps:
            found: dict[tuple[str, int], dict[str, Scalar]] = {}
            for row in self._side.run.index.scalars(role=ROLE):
                found.setdefault((row.path, row.call), {})[row.slot] = (row.type, row.value)
            self._steps[step] = [
                Node(Key(key.rank, *step, "forward", path, call), said["node"][1] or "", _joined(said), said)
                for (path, call), said in found.items() if "node" in said
            ]  # fmt: skip
        return self._steps[step]

    def inside(self, key: Key) -> list[Node]:
        return [node for node in self.nodes(key) if within(node.key.path, key.path)][:_MOST]

    def weight(self, module: str, name: str) -> str | None:
        """Return the initializer that a weight of a module is."""
        rows = self._side.run.index.scalars(role=ROLE, path=module, slot=f"initializer.{name}")
        return rows[0].value if rows else None

    def made(self, node: Node) -> Record | None:
        return next(iter(self._side.records(node.key, "output")), None)


def _joined(said: dict[str, Scalar]) -> str:
    """Return what a node is made of: a text too long for one scalar is several."""
    parts = sorted(
        (int(slot.partition(".")[2] or 0), text or "")
        for slot, (_, text) in said.items()
        if slot.partition(".")[0] == "fx"
    )
    return "".join(text for _, text in parts)


class Values:
    """What a graph computed, by the names of the traced program."""

    def __init__(self, graph: Graph, side: Side, key: Key) -> None:
        self._side, self._key = side, key
        self._made = {
            match[1]: node for node in graph.nodes(key) if (match := re.match(r"%(\w+) :", node.fx))
        }  # the last of a group stays
        self._graph = graph

    def named(self, name: str) -> torch.Tensor:
        """Raises NotAgain where it was not recorded."""
        node = self._made.get(name)
        made = self._graph.made(node) if node is not None else None
        if made is None:
            made = self._constant(name)
        if made is None:
            raise NotAgain(f"{name} was not recorded")
        return self._side.load(made)

    @functools.cache  # noqa: B019 - lives as long as one search
    def _constant(self, name: str) -> Record | None:
        found = self._side.run.records(
            n=1,
            role="input",
            slot=f"kwargs.{name}",
            generation=self._key.generation,
            step=self._key.step,
        )
        return next(found, None)

    def mask(self, node: Node) -> torch.Tensor | None:
        """Return the mask that a node has as an initializer: flags or numbers, a row and a column a token."""
        for slot, (_, text) in node.said.items():
            made = self._constant(text or "") if slot.startswith("initializer.") else None
            if (
                made is not None
                and len(made.summary.shape) >= 2
                and DTYPES.get(made.summary.dtype, torch.int8)
                in (torch.bool, torch.float32, torch.float16, torch.bfloat16)
            ):
                try:
                    return self._side.load(made)
                except NotAgain:
                    return None
        return None

    def load(self, record: Record) -> torch.Tensor:
        return self._side.load(record)

    def attentions(self, said: Fx, group: list[Node]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield what may be query, key and value of an attention: by name, or where views were made into one, as its nodes are given them.

        Raises NotAgain.
        """
        names = _VALUE.findall(said[2])[:3]
        found = [self._found(name) for name in names]
        like = next((t for t in found[::-1] if t is not None and t.dim() == 4), None)
        missing = [at for at, t in enumerate(found) if t is None]
        if like is None or len(found) < 3 or len(missing) > 1:
            raise NotAgain("what the attention was given was not recorded")
        if not missing:
            yield tuple(t for t in found if t is not None)
            return
        inner = {r.id for node in group for r in self._side.records(node.key, "output")}
        for record in [
            r
            for node in group
            for r in self._side.records(node.key, "input")
            if r.producer not in inner
        ]:
            if math.prod(record.summary.shape) != like.numel():
                continue
            tensor = self._side.load(record)
            ways = [tensor.reshape(like.shape)]
            if tensor.dim() == 4:
                ways += [
                    w
                    for order in itertools.permutations(range(4))
                    if (w := tensor.permute(order)).shape == like.shape
                ]
            for way in ways:
                yield tuple(way if t is None else t for t in found)

    def _found(self, name: str) -> torch.Tensor | None:
        try:
            return self.named(name)
        except NotAgain:
            return None

    def computed(self, said: Fx, made: Record) -> torch.Tensor:
        """Return what the operator gives, of the shape that was recorded. Raises NotAgain."""
        _, name, args, kwargs = said
        _, function = operator(f"Aten.{name.removesuffix('.default')}")
        given, named = _filled(args, self.named), _filled(_NAMED.sub(r"'\1': ", kwargs), self.named)
        if not isinstance(given, tuple) or not isinstance(named, dict):
            raise NotAgain(f"the arguments of {name} can't be read")
        try:
            shape = function(*_meta(given), **_meta(named))
            if not isinstance(shape, torch.Tensor) or math.prod(shape.shape) != math.prod(
                made.summary.shape
            ):
                raise NotAgain(f"{name} gives something else")
            with quiet():
                result = function(*given, **named)
        except FAILURES as error:
            raise NotAgain(f"{name} fails: {str(error).partition(chr(10))[0]}") from None
        found: torch.Tensor = result.reshape(made.summary.shape)
        return found


def read(fx: str) -> Fx:
    """Read a node of the traced program as torch.fx formats it. Raises NotAgain."""
    found = _CALLED.match(fx)
    if found is None:
        raise NotAgain("it is no operator of torch")
    result, name, args, kwargs = found.groups()
    return result, name, args, kwargs


def _filled(text: str, named: Any) -> Any:
    """Return arguments with their tensors. Raises NotAgain for anything but numbers, texts, dtypes, names and containers of these."""
    try:
        tree = ast.parse(_VALUE.sub(r"value_\1", text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotAgain("its arguments can't be read") from None

    def part_of(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id.startswith("value_"):
            return named(node.id.removeprefix("value_"))
        if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return float(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -part_of(node.operand)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and node.attr in DTYPES
        ):
            return DTYPES[node.attr]
        if isinstance(node, (ast.Tuple, ast.List)):
            parts = [part_of(part) for part in node.elts]
            return tuple(parts) if isinstance(node, ast.Tuple) else parts
        if isinstance(node, ast.Dict):
            return {
                part_of(key): part_of(value)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        raise NotAgain("its arguments can't be read")

    return part_of(tree)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_meta(part) for part in value)
    return {name: _meta(part) for name, part in value.items()} if isinstance(value, dict) else value
