"""The nouns of an exported graph as a model: nodes, the modules that they run in, and weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import SupportsFloat

from llmdebug_nb.core.paths import ancestors, within

Scalar = tuple[str, object]  # slot, value


@dataclass(slots=True)
class Weight:
    """A weight of a module.

    ``name``: that of the constant. ``transposed``: it is stored transposed, as exporters do with
    the weight of a linear layer.
    """

    name: str
    transposed: bool = False


@dataclass(slots=True)
class GraphNode:
    """A node of the graph. ``inputs``, ``outputs``: names of values.

    ``op``: ``Onnx.MatMul``. ``module``: its path, "" for the root.
    ``scalars``: attributes and small constants. ``facts``: what else is known, such as its name in
    the traced program. ``source``: call stack, innermost frame first.
    """

    name: str
    op: str
    inputs: list[str]
    outputs: list[str]
    module: str = ""
    scalars: list[Scalar] = field(default_factory=list)
    facts: list[Scalar] = field(default_factory=list)
    source: tuple[str, ...] = ()


@dataclass(slots=True)
class GraphModule:
    """A module, described by the names of the values that enter and leave it.

    ``results``: the values that it probably returns. ``more``: its other values that are used
    outside. ``called``: False if it only holds other modules. ``guessed``: it is only known by the
    names of its weights, so its inputs are not known.
    """

    path: str
    type: str = ""
    inputs: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    called: bool = True
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class ModuleBegins:
    """A module is called."""

    module: GraphModule


@dataclass(frozen=True, slots=True)
class ModuleEnds:
    """A module returns."""

    module: GraphModule


@dataclass(slots=True)
class Graph:
    """A graph that can be recorded.

    ``nodes``: in an executable order. ``modules``: by path, parents first. ``constants``: values
    that no node computes. ``nested``: number of nodes with graphs inside. ``random``: it draws
    random numbers.
    """

    nodes: list[GraphNode]
    modules: dict[str, GraphModule]
    inputs: list[str]
    outputs: list[str]
    constants: set[str]
    nested: int = 0
    random: bool = False

    def plan(self) -> list[GraphNode | ModuleBegins | ModuleEnds]:
        """Return the order of execution: nodes, and beginnings and ends of modules."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for path in (node.module, *ancestors(node.module)):
                first.setdefault(path, place)
                last[path] = place
        begins: dict[int, list[GraphModule]] = defaultdict(list)
        ends: dict[int, list[GraphModule]] = defaultdict(list)
        for path, module in self.modules.items():
            if path in first and path and module.called:
                begins[first[path]].append(module)
                ends[last[path]].insert(0, module)
        plan: list[GraphNode | ModuleBegins | ModuleEnds] = []
        for place, node in enumerate(self.nodes):
            plan += map(ModuleBegins, begins[place])
            plan.append(node)
            plan += map(ModuleEnds, ends[place])
        return plan


def common_module(paths: Iterable[str]) -> str | None:
    """Return the innermost module that holds all paths; None for no paths."""
    modules = list(paths)
    if not modules:
        return None
    above = (modules[0], *ancestors(modules[0]), "")
    return next(path for path in above if all(within(module, path) for module in modules))


def shortest(number: SupportsFloat) -> float:
    """Return a float32 in its shortest form: 1e-05, not 9.999999747378752e-06."""
    import numpy

    value = float(number)
    return float(str(numpy.float32(value))) if math.isfinite(value) else value
