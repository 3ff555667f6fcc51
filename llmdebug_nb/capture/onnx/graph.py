"""The nouns of an ONNX graph as a model: nodes, the modules that they run in, and weights."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from llmdebug_nb.capture.onnx.proto import Scalar
from llmdebug_nb.core.paths import ancestors


@dataclass(slots=True)
class Weight:
    """A weight of a module.

    ``name``: that of the initializer. ``transposed``: it is stored transposed, as exporters do with
    the weight of a linear layer.
    """

    name: str
    transposed: bool = False


@dataclass(slots=True)
class OnnxNode:
    """A node of the graph. ``inputs``, ``outputs``: names of values.

    ``op``: ``Onnx.MatMul``. ``module``: its path, "" for the root. ``scalars``: attributes and
    small constants. ``facts``: what else is known, such as its name in the traced program.
    ``source``: call stack, innermost frame first.
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
class OnnxModule:
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

    module: OnnxModule


@dataclass(frozen=True, slots=True)
class ModuleEnds:
    """A module returns."""

    module: OnnxModule


@dataclass(slots=True)
class OnnxGraph:
    """A graph that can be recorded.

    ``nodes``: in an executable order. ``modules``: by path, parents first. ``constants``: values
    that no node computes. ``nested``: number of nodes with graphs inside. ``random``: it draws
    random numbers.
    """

    nodes: list[OnnxNode]
    modules: dict[str, OnnxModule]
    inputs: list[str]
    outputs: list[str]
    constants: set[str]
    nested: int = 0
    random: bool = False

    def plan(self) -> list[OnnxNode | ModuleBegins | ModuleEnds]:
        """Return the order of execution: nodes, and beginnings and ends of modules."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for path in (node.module, *ancestors(node.module)):
                first.setdefault(path, place)
                last[path] = place
        begins: dict[int, list[OnnxModule]] = defaultdict(list)
        ends: dict[int, list[OnnxModule]] = defaultdict(list)
        for path, module in self.modules.items():
            if path in first and path and module.called:
                begins[first[path]].append(module)
                ends[last[path]].insert(0, module)
        plan: list[OnnxNode | ModuleBegins | ModuleEnds] = []
        for place, node in enumerate(self.nodes):
            plan += map(ModuleBegins, begins[place])
            plan.append(node)
            plan += map(ModuleEnds, ends[place])
        return plan
