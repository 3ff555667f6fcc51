"""The origin of each node of a compiled graph: module, operator, call number and source line.

`torch.compile` traces a program (Dynamo), lowers the trace to dispatcher operators (AOTAutograd,
which for Inductor also decomposes them) and fuses these. The metadata of a node keeps its history:
``nn_module_stack``, ``stack_trace``, ``from_node`` (its nodes in earlier graphs) and
``original_aten`` (the decomposed operator).
"""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.operators.kinds import operator_name
from llmdebug_nb.core.errors import PACKAGE
from llmdebug_nb.core.paths import bounded

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_LOCAL = re.compile(r"([LG])\['([^']+)'\]")
_MEMBER = re.compile(
    r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]"
    r"|\.([^.\[]+)|, '([^']+)'\)"
)
_FRAMES = 8  # of a call stack that are kept
Metadata = Mapping[str, Any]
PathOf = Callable[[torch.nn.Module], str | None]


@dataclass(frozen=True, slots=True)
class Origin:
    """A node in terms of the program.

    ``module``: path of its module. ``path``: path of its operator, ``mlp/Aten.silu``, or of a part
    of a decomposed operator, ``mlp/Aten.silu/Aten.sigmoid``. ``number``: which call of ``path`` in
    the graph. ``node``: its name in the traced program, equal in all graphs made of it.
    ``source``: call stack, innermost frame first. ``slot``: which output, if the operator has
    several. ``forward``: path and number of the forward call whose gradient it computes.
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
    """The code that is being compiled; resolves the names in its trace to modules.

    ``order``: name of a node -> its place in the traced program. ``owner``: the local variable that
    holds the module whose method is compiled.
    """

    def __init__(
        self, traced: torch.fx.GraphModule, values: Mapping[str, Mapping[str, object]],
        first: str | None,
    ) -> None:  # fmt: skip
        """``values``: its locals (``L``) and globals (``G``). ``first``: its first argument."""
        self.order = {node.name: place for place, node in enumerate(traced.graph.nodes)}
        self._values = values
        names = dict.fromkeys((first or "self", "self"))
        modules = {name: values["L"].get(name) for name in names}
        owners = [name for name, value in modules.items() if isinstance(value, torch.nn.Module)]
        self.owner = owners[0] if owners else None
        first_value = values["L"][self.owner] if self.owner is not None else None
        self._module = first_value if isinstance(first_value, torch.nn.Module) else None

    def module(self, meta: Metadata, path_of: PathOf) -> str:
        """Return the path of the innermost module that a node ran in, or "" if not known."""
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        for expression, _ in reversed(list(stack.values())):
            path = self._resolve(expression, path_of)
            if path is not None:
                return path
        return self.base(path_of) or ""

    def _resolve(self, expression: str, path_of: PathOf) -> str | None:
        """Return the path of the module that ``L['self'].model.layers.0`` refers to."""
        start = _LOCAL.search(expression)
        value = self._values[start[1]].get(start[2]) if start is not None else None
        if start is None or value is None:
            return None
        for member in _MEMBER.finditer(expression, start.end()):
            name = next(group for group in member.groups() if group is not None)
            if isinstance(value, torch.nn.Module) and name in value._modules:
                value = value._modules[name]
            else:
                value = _member(value, name)
        return path_of(value) if isinstance(value, torch.nn.Module) else None

    def base(self, path_of: PathOf) -> str | None:
        """Return the path of the module whose method is compiled."""
        return path_of(self._module) if self._module is not None else None

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules among the locals, that of the compiled method first."""
        values = [self._module, *self._values["L"].values()]
        return [value for value in values if isinstance(value, torch.nn.Module)]


@runtime_checkable
class _Container(Protocol):
    def __getitem__(self, key: str | int, /) -> object: ...


def _member(value: object, name: str) -> object:
    """Return an attribute or item of a value, or None if it has no such member."""
    attribute = None if name.isdigit() else getattr(value, name, None)
    if attribute is not None or not isinstance(value, _Container):
        return attribute
    try:
        return value[int(name) if name.isdigit() else name]
    except (TypeError, LookupError, ValueError):
        return None


def origins(
    graph: torch.fx.Graph, frame: Frame, path_of: PathOf,
    is_wanted: Callable[[torch.fx.node.Target], bool],
    forwards: Mapping[str, Origin] | None = None,
) -> dict[str, Origin]:  # fmt: skip
    """Return name of a node -> its origin, for the nodes that compute something.

    ``path_of(module)``: the module's path in the model. ``is_wanted(operator)``: the operator is
    to be recorded (views are not). ``forwards``: for a backward graph, the origins of the forward
    graph.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if forwards is None:  # in the order of the program, even if nodes have been moved since
        nodes.sort(key=lambda node: frame.order.get(_traced_name(node), len(frame.order)))
    decomposed, results = _decomposed(nodes, is_wanted)
    numbers: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    known: dict[str, Origin] = {}
    for node in nodes:
        if node.target is operator.getitem:
            several = known.get(getattr(node.args[0], "name", ""))
            if several is not None:
                known[node.name] = replace(several, slot=str(node.args[1]))
            continue
        is_result = node.name in results
        if not is_result and not is_wanted(node.target):
            continue
        whole, module = node.meta.get("original_aten"), frame.module(node.meta, path_of)
        op = operator_name(whole if is_result else node.target)
        is_part = node.name in decomposed and not is_result
        name = f"{operator_name(whole)}/{op}" if is_part else op
        path, traced = bounded(f"{module}/{name}"), _traced_name(node)
        key = f"{traced}/{name}" if traced else ""
        known[node.name] = Origin(
            module, path, op, numbers[path], key and f"{key}/{parts[key]}", _stack(node.meta),
            forward=_forward(traced, forwards) if forwards is not None else None,
        )  # fmt: skip
        numbers[path] += 1
        parts[key] += 1
    return known


def origin_of(node: torch.fx.Node, frame: Frame, path_of: PathOf, counts: Counter[str]) -> Origin:
    """Return the origin of a single node, and count its call in ``counts`` (by path)."""
    module = frame.module(node.meta, path_of)
    op = operator_name(node.target) if node.op == "call_function" else "Graph.input"
    path, traced = bounded(f"{module}/{op}"), _traced_name(node)
    number = counts[path]
    counts[path] += 1
    name = f"{traced}/{op}/{number}" if traced else ""
    return Origin(module, path, op, number, name, _stack(node.meta))


def _decomposed(
    nodes: list[torch.fx.Node], is_wanted: Callable[[torch.fx.node.Target], bool]
) -> tuple[set[str], set[str]]:
    """Return the names of the nodes of decomposed operators, and of those with their results."""
    groups: dict[tuple[str, str], list[torch.fx.Node]] = {}
    for node in nodes:  # by name, as the operators in metadata may be copies
        key = (_traced_name(node) or node.name, str(node.meta.get("original_aten")))
        groups.setdefault(key, []).append(node)
    decomposed: set[str] = set()
    results: set[str] = set()
    for group in groups.values():
        whole = group[0].meta.get("original_aten")
        if not _is_decomposed(whole, group) or not is_wanted(whole):
            continue
        decomposed.update(node.name for node in group)
        if _traced_name(group[0]):
            results.update(node.name for node in _result(whole, group))
    return decomposed, results


def _is_decomposed(whole: object, group: list[torch.fx.Node]) -> TypeGuard[torch_modes.OpOverload]:
    """Tell whether nodes are the parts of a decomposed operator."""
    names = (str(node.target) for node in group)
    return isinstance(whole, torch_modes.OpOverload) and str(whole) not in names


def _result(whole: torch_modes.OpOverload, group: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the node with a decomposed operator's (first) output, if there is one.

    It is the last node, or the last of the largest if the operator has several outputs.
    """
    several = len(whole._schema.returns) > 1
    sizes = [
        (pytorch.size_of(node.meta["val"]) if several else 0, place)
        for place, node in enumerate(group)
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return [group[max(sizes)[1]]] if sizes else []


def _traced_name(node: torch.fx.Node) -> str:
    """Return the name of the node's ancestor in the traced program, or "" if unknown.

    A node of a backward graph gets the name of the node whose gradient it computes.
    """
    history, name = node.meta.get("from_node") or (), ""
    while history:
        name, history = history[-1].name, history[-1].from_node
    if not name and node.meta.get("fwd_source_fn_stack"):
        name = node.meta["fwd_source_fn_stack"][-1][0]
    return str(name)


def _forward(traced: str, forwards: Mapping[str, Origin]) -> tuple[str, int] | None:
    if not traced:
        return None
    same = [one for one in forwards.values() if one.node.partition("/")[0] == traced]
    return (same[-1].path, same[-1].number) if same else None


def _stack(meta: Metadata) -> tuple[str, ...]:
    """Return a node's call stack, innermost frame first, without our frames and PyTorch's."""
    frames = _FRAME.findall(meta.get("stack_trace") or meta.get("fwd_stack_trace") or "")
    ignored = (PACKAGE, _TORCH)
    program = [
        f"{file}:{line} {name}" for file, line, name in frames if not file.startswith(ignored)
    ]
    return tuple(reversed(program[-_FRAMES:]))
