"""What the nodes of a compiled graph are in the program: module, operator, which call of it, line, and the node of the traced program.

`torch.compile` traces a program (Dynamo), lowers what it traced to operators of the dispatcher (AOTAutograd, which for Inductor also
takes operators apart), and fuses these. The nodes keep a memory of that in their metadata: ``nn_module_stack``, ``stack_trace``,
``from_node`` (the nodes of earlier graphs that one was made from) and ``original_aten`` (the operator that was taken apart).
"""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.operators.kinds import operator_name
from llmdebug_nb.core.errors import PACKAGE

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_LOCAL = re.compile(r"([LG])\['([^']+)'\]")
_STEP = re.compile(
    r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.([^.\[]+)|, '([^']+)'\)"
)
_KEPT = 8  # frames of a call stack
Paths = Callable[[torch.nn.Module], str | None]


@dataclass(frozen=True, slots=True)
class Origin:
    """``module``: path of the module that the node runs in. ``path``: that, and the operator: ``mlp/Aten.silu``, or of a part of one
    that was taken apart ``mlp/Aten.silu/Aten.sigmoid``. ``number``: which call of ``path`` within the graph. ``node``: the same in every
    graph that was made of one traced program. ``source``: call stack, innermost frame first. ``slot``: of what is one of several outputs.
    ``forward``: of a node of a backward graph, what it computes the gradient of: path and number.
    """

    module: str
    path: str
    op: str
    number: int
    node: str
    source: tuple[str, ...]
    slot: str = "0"
    forward: tuple[str, int] | None = None


class Frame:
    """The code that is being compiled: tells which modules its traced names mean.

    ``order``: name of a node of the traced program -> its place there. ``owner``: the local variable with the module whose method it is.
    """

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        values: Mapping[str, Mapping[str, Any]],
        first: str | None,
    ) -> None:
        """``values``: of its locals (``L``) and globals (``G``). ``first``: name of its first argument."""
        self.order = {node.name: place for place, node in enumerate(traced.graph.nodes)}
        self._values = values
        owners = [
            name
            for name in (first or "self", "self")
            if isinstance(values["L"].get(name), torch.nn.Module)
        ]
        self.owner = owners[0] if owners else None
        self._first = values["L"][self.owner] if self.owner is not None else None

    def module(self, meta: Mapping[str, Any], paths: Paths) -> str:
        """Return the path of the innermost module that a node ran in; "" where that is not known."""
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        for text, _ in reversed(list(stack.values())):
            found = self._resolve(text, paths)
            if found is not None:
                return found
        if isinstance(self._first, torch.nn.Module):
            return paths(self._first) or ""
        return ""

    def _resolve(self, text: str, paths: Paths) -> str | None:
        """Turn ``L['self'].model.layers.0`` into the path of the module that it is."""
        start = _LOCAL.search(text)
        here = self._values[start[1]].get(start[2]) if start is not None else None
        if start is None or here is None:
            return None
        for found in _STEP.finditer(text, start.end()):
            name = next(part for part in found.groups() if part is not None)
            here = (
                here._modules.get(name)
                if isinstance(here, torch.nn.Module) and name in here._modules
                else _part(here, name)
            )
        return paths(here) if isinstance(here, torch.nn.Module) else None

    def base(self, paths: Paths) -> str | None:
        """Return the path of the module whose method is compiled."""
        return paths(self._first) if isinstance(self._first, torch.nn.Module) else None

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules among its locals, the first argument first."""
        found = [self._first, *self._values["L"].values()]
        return [value for value in found if isinstance(value, torch.nn.Module)]


def _part(value: Any, name: str) -> Any:
    try:
        return value[int(name)] if name.isdigit() else getattr(value, name, None) or value[name]
    except (TypeError, LookupError, ValueError):
        return None


def origins(
    graph: torch.fx.Graph, frame: Frame, paths: Paths, asked: Callable[[Any], bool],
    forwards: Mapping[str, Origin] | None = None,
) -> dict[str, Origin]:  # fmt: skip
    """Return name of a node -> what it is, for the nodes that compute something.

    ``paths(module)``: its path in the model. ``asked(operator)``: it is one to be recorded (views are none). ``forwards``: those of
    the forward graph, for a backward graph.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    place = {node.name: i for i, node in enumerate(nodes)}
    if forwards is None:  # as in the program, whatever the order that they were brought into since
        nodes.sort(
            key=lambda node: (frame.order.get(_traced(node), len(frame.order)), place[node.name])
        )
    groups: dict[tuple[str, str], list[torch.fx.Node]] = {}
    for node in nodes:  # by name, as operators in metadata may be copies
        groups.setdefault(
            (_traced(node) or node.name, str(node.meta.get("original_aten"))), []
        ).append(node)
    taken = [
        group
        for group in groups.values()
        if _is_apart(group) and asked(group[0].meta["original_aten"])
    ]
    apart = {node.name for group in taken for node in group}
    results = {node.name for group in taken if _traced(group[0]) for node in _result(group)}
    numbers: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    found: dict[str, Origin] = {}
    for node in nodes:
        if node.target is operator.getitem:
            whole_tuple = found.get(getattr(node.args[0], "name", ""))
            if whole_tuple is not None:
                found[node.name] = replace(whole_tuple, slot=str(node.args[1]))
            continue
        if node.name not in results and not asked(node.target):
            continue
        whole, own = node.meta.get("original_aten"), operator_name(node.target)
        module = frame.module(node.meta, paths)
        op = operator_name(whole) if node.name in results else own
        inside = (
            f"{operator_name(whole)}/" if node.name in apart and node.name not in results else ""
        )
        path, traced = f"{module}/{inside}{op}", _traced(node)
        key = f"{traced}/{inside}{op}" if traced else ""
        found[node.name] = Origin(
            module, path, op, numbers[path], key and f"{key}/{parts[key]}", _source(node.meta),
            forward=_forward(traced, forwards) if forwards is not None else None,
        )  # fmt: skip
        numbers[path] += 1
        parts[key] += 1
    return found


def origin_of(node: torch.fx.Node, frame: Frame, paths: Paths, calls: Counter[str]) -> Origin:
    """Return what a single node is. ``calls``: how often each path is called in its graph; it is counted there."""
    module, op = (
        frame.module(node.meta, paths),
        operator_name(node.target) if node.op == "call_function" else "Graph.input",
    )
    path, traced = f"{module}/{op}", _traced(node)
    calls[path] += 1
    return Origin(
        module,
        path,
        op,
        calls[path] - 1,
        f"{traced}/{op}/{calls[path] - 1}" if traced else "",
        _source(node.meta),
    )


def _traced(node: torch.fx.Node) -> str:
    """Return the name of the node of the traced program that a node was made from, or is the gradient of; "" if unknown."""
    history, name = node.meta.get("from_node") or (), ""
    while history:
        name, history = history[-1].name, history[-1].from_node
    if not name and node.meta.get("fwd_source_fn_stack"):
        name = node.meta["fwd_source_fn_stack"][-1][0]
    return str(name)


def _is_apart(group: list[torch.fx.Node]) -> bool:
    """Tell whether nodes are what an operator was taken apart into."""
    whole = group[0].meta.get("original_aten")
    return isinstance(whole, torch._ops.OpOverload) and not any(
        str(node.target) == str(whole) for node in group
    )


def _result(group: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the node that gives what an operator that was taken apart gives (the first of what it gives), if there is one."""
    several = len(group[0].meta["original_aten"]._schema.returns) > 1
    sizes = [
        (pytorch.size_of(node.meta["val"]) if several else 0, place)
        for place, node in enumerate(group)
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return [group[max(sizes)[1]]] if sizes else []


def _forward(traced: str, forwards: Mapping[str, Origin]) -> tuple[str, int] | None:
    same = [
        origin for origin in forwards.values() if traced and origin.node.partition("/")[0] == traced
    ]
    return (same[-1].path, same[-1].number) if same else None


def _source(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the call stack of a node, innermost frame first, without ours and PyTorch's."""
    frames = _FRAME.findall(meta.get("stack_trace") or meta.get("fwd_stack_trace") or "")
    program = [
        f"{file}:{line} {name}"
        for file, line, name in frames
        if not file.startswith((PACKAGE, _TORCH))
    ]
    return tuple(reversed(program[-_KEPT:]))
