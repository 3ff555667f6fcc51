"""An ONNX graph as a model: which node ran in which module, and what went in and out of each.

`torch.onnx.export(dynamo=True)` notes for each node the modules around it, the node of the traced program, and where in the source it
stands (``pkg.torch.onnx.*`` in ``metadata_props``, written by ``torch/onnx/_internal/exporter/_core.py``). Other exporters put the modules into the node's name
(``/model/layers.0/mlp/MatMul``). An optimiser drops both but keeps the names of values, so all is read off the graph as it was
exported, and looked up by the values that a node of the optimised graph still gives. What a new node gives lies where it is used.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmdebug_nb.capture.onnx.proto import (
    Scalar,
    attributes,
    common,
    meta,
    shortest,
    small,
    strings,
    taken,
)
from llmdebug_nb.core.paths import ancestors, within
from llmdebug_nb.core.records import EXPORTED

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SLICED = re.compile(r"\.slice\([^)]*\)")  # what torch.export calls model.layers[:n]
_PART = 200  # characters of a scalar that a dump keeps
_LONGEST = 2000
_RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
    }
)
_PRODUCTS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "Conv", "ConvTranspose"}
)
_NESTED = frozenset({"If", "Loop", "Scan"})


@dataclass(slots=True)
class Weight:
    """``name`` of the initializer; ``turned``: it lies transposed there, as exporters put the weight of a linear layer."""

    name: str
    turned: bool = False


@dataclass(slots=True)
class OnnxNode:
    """``op``: ``Onnx.MatMul``. ``module``: path, ``""`` for the root. ``given``: attributes and small constants. ``said``: what else is known of it."""

    name: str
    op: str
    inputs: list[str]
    outputs: list[str]
    module: str = ""
    given: list[Scalar] = field(default_factory=list)
    said: list[Scalar] = field(default_factory=list)
    source: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}/{self.op}"


@dataclass(slots=True)
class OnnxModule:
    """A module by what enters and leaves it: names of values. ``results``: what it returns, as far as that shows; ``more``: what else of it is used outside.

    ``called``: it is, and does not only hold others. ``guessed``: it is only known by the names of its weights, so what enters it is not.
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


@dataclass(slots=True)
class OnnxGraph:
    """``nodes`` in an order in which they can run. ``modules``: by path, parents first. ``constants``: values that are no result of a node."""

    nodes: list[OnnxNode]
    modules: dict[str, OnnxModule]
    inputs: list[str]
    outputs: list[str]
    constants: set[str]
    nested: int = 0
    random: bool = False

    def plan(self) -> list[tuple[str, Any]]:
        """Return what happens in order: a module begins, a node runs, a module ends."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for path in (node.module, *ancestors(node.module)):
                first.setdefault(path, place)
                last[path] = place
        begins: dict[int, list[str]] = defaultdict(list)
        ends: dict[int, list[str]] = defaultdict(list)
        for path in self.modules:
            if path in first and path and self.modules[path].called:
                begins[first[path]].append(path)
                ends[last[path]].insert(0, path)
        steps: list[tuple[str, Any]] = []
        for place, node in enumerate(self.nodes):
            steps += [("begin", self.modules[path]) for path in begins[place]]
            steps.append(("node", node))
            steps += [("end", self.modules[path]) for path in ends[place]]
        return steps


def read(model: Any, optimised: Any | None = None) -> OnnxGraph:
    """Return the graph that runs: ``optimised``, or ``model`` itself where that runs as it is; both are onnx.ModelProto without their external data."""
    home = _Home(model.graph)
    graph = model.graph if optimised is None else optimised.graph
    return home.graph_of(graph)


class _Home:
    """What the exported graph says of each value: the module and node that it comes from."""

    def __init__(self, graph: Any) -> None:
        self.exported = graph
        self.shapes = {one.name: tuple(one.dims) for one in graph.initializer}
        self.small = {one.name: small(one) for one in graph.initializer}
        self.maker = {value: node for node in graph.node for value in node.output if value}
        self.place = {
            value: place for place, node in enumerate(graph.node) for value in node.output if value
        }
        self.users: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for value in node.input:
                self.users[value].append(node)
        self.types: dict[str, str] = {}
        self.guessed: set[str] = set()
        self.called: set[str] = (
            set()
        )  # paths of modules that are called, and do not only hold others
        self.scopes = [self._said(node) for node in graph.node]
        self.known = any(scope is not None for scope in self.scopes)
        self._fill(graph.node)
        self.module = {
            value: scope or ""
            for node, scope in zip(graph.node, self.scopes, strict=True)
            for value in node.output
        }

    # -- which module ---------------------------------------------------------------------------

    def _said(self, node: Any) -> str | None:
        """Return the module that a node says it is of; None where it says nothing."""
        noted = meta(node)
        scopes = strings(noted.get("name_scopes"))
        if scopes and scopes[0] == _NO_MODULE:
            return ""
        if len(scopes) > 1:
            paths = [_SLICED.sub("", scope) for scope in scopes[:-1]]
            self.called.update(paths)
            for path, kind in zip(paths, strings(noted.get("class_hierarchy")), strict=False):
                self.types.setdefault(path, kind.rpartition(".")[2])
            return paths[-1]
        parts = node.name.split("/")
        if len(parts) > 1 and not parts[0]:
            paths = [".".join(parts[1:end]) for end in range(1, len(parts))]
            self.called.update(paths)
            return paths[-1]
        return self._by_weight(node)

    def _by_weight(self, node: Any) -> str | None:
        """Return the module whose weight a node alone uses."""
        for value in node.input:
            if value in self.shapes and "." in value and len(self.users[value]) == 1:
                path = str(value).rpartition(".")[0]
                self.guessed.add(path)
                self.called.add(path)
                return path
        return None

    def _fill(self, nodes: Sequence[Any]) -> None:
        """Put a node that says nothing, as a quantiser's, in the innermost module that makes what it takes or uses what it gives."""
        at = {id(node): place for place, node in enumerate(nodes)}
        if not self.known or (not self.types and self.guessed):
            return  # only single nodes are known: the rest lies in the root
        known = {scope for scope in self.scopes if scope is not None}
        holders = {above for scope in known for above in ancestors(scope)} | {""}

        def holder(scope: str) -> str:
            """Return a module that may hold further nodes: none that holds no other module does."""
            return scope if scope in holders else next(iter(ancestors(scope)), "")

        before, after = list(self.scopes), list(self.scopes)
        for place, node in enumerate(nodes):
            if before[place] is None:
                makers = [self.maker[value] for value in node.input if value in self.maker]
                before[place] = next(
                    (holder(made) for one in makers if (made := before[at[id(one)]]) is not None),
                    None,
                )
        for place in range(len(nodes) - 1, -1, -1):
            if after[place] is None:
                users = {
                    after[at[id(user)]]
                    for value in nodes[place].output
                    for user in self.users[value]
                }
                shared = common({one for one in users if one is not None})
                after[place] = "" if shared is None else holder(shared)
        for place, scope in enumerate(self.scopes):
            if scope is None:
                taken_from, used_in = before[place], after[place] or ""
                deeper = (
                    taken_from
                    if used_in and taken_from is not None and within(taken_from, used_in)
                    else used_in
                )
                self.scopes[place] = deeper

    # -- the graph that runs --------------------------------------------------------------------

    def graph_of(self, graph: Any) -> OnnxGraph:
        constants = {one.name for one in graph.initializer} | {
            one.values.name for one in graph.sparse_initializer
        }
        numbers = self.small
        if graph is not self.exported:
            numbers = {**numbers, **{one.name: small(one) for one in graph.initializer}}
        inputs = [one.name for one in graph.input if one.name not in constants]
        nodes = [self._node(node, constants, numbers) for node in self._in_order(graph)]
        self._place_new(nodes)
        paths = (
            {path for node in nodes for path in (node.module, *ancestors(node.module))}
            | set(self.module.values())
            | {""}
        )
        modules = {
            path: OnnxModule(
                path,
                self.types.get(path, ""),
                called=path in self.called,
                guessed=path in self.guessed,
            )
            for path in sorted(paths, key=self._first(paths))
        }
        found = OnnxGraph(nodes, modules, inputs, [one.name for one in graph.output], constants)
        found.nested = sum(node.op_type in _NESTED for node in graph.node)
        found.random = any(node.op_type in _RANDOM for node in graph.node)
        self._edges(found)
        return found

    def _first(self, paths: Iterable[str]) -> Any:
        """Return the order of modules: parents first, siblings as they ran."""
        seen: dict[str, int] = {}
        for place, scope in enumerate(self.scopes):
            for path in (scope or "", *ancestors(scope or "")):
                seen.setdefault(path, place)
        return lambda path: (seen.get(path, len(self.scopes)), path.count("."), path)

    def _in_order(self, graph: Any) -> list[Any]:
        """Return the nodes so that each runs after what it takes, and otherwise as in the exported graph: an optimiser mixes modules up."""
        if graph is self.exported:
            return list(graph.node)
        nodes = list(graph.node)
        maker = {value: place for place, node in enumerate(nodes) for value in node.output if value}
        needs = [{maker[value] for value in taken(node) if value in maker} for node in nodes]
        after: dict[int, list[int]] = defaultdict(list)
        rank = [0.0] * len(nodes)
        for place, node in enumerate(nodes):  # as onnxruntime wrote it, it is in an order already
            known = [self.place[value] for value in node.output if value in self.place]
            rank[place] = (
                min(known)
                if known
                else max((rank[one] for one in needs[place]), default=-1.0) + 0.5
            )
            for one in needs[place]:
                after[one].append(place)
        left = [len(one) for one in needs]
        ready = [(rank[place], place) for place, count in enumerate(left) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, place = heapq.heappop(ready)
            order.append(nodes[place])
            for one in after[place]:
                left[one] -= 1
                if not left[one]:
                    heapq.heappush(ready, (rank[one], one))
        return order if len(order) == len(nodes) else nodes

    def _node(self, node: Any, constants: set[str], numbers: dict[str, Any]) -> OnnxNode:
        known = next((value for value in node.output if value in self.maker), None)
        noted = meta(self.maker[known]) if known is not None else {}
        module = self.module.get(known) if known is not None else None
        found = OnnxNode(
            node.name,
            EXPORTED + node.op_type,
            list(node.input),
            list(node.output),
            module if module is not None else "?",
        )
        found.given = list(attributes(node))
        for place, value in enumerate(node.input):
            if numbers.get(value) is not None:
                found.given.append((str(place), numbers[value]))
            elif value in constants:
                found.said.append((f"initializer.{place}", value))
        found.said.insert(0, ("node", node.name or next(iter(node.output), "")))
        if node.domain:
            found.said.append(("domain", node.domain))
        if noted.get("fx_node"):
            text = noted["fx_node"][:_LONGEST]
            found.said += [
                (f"fx.{at}" if at else "fx", text[at : at + _PART])
                for at in range(0, len(text), _PART)
            ]
        frames = [
            f"{file}:{line} {where}"
            for file, line, where in _FRAME.findall(noted.get("stack_trace", ""))
        ]
        found.source = tuple(frames[::-1])
        return found

    def _place_new(self, nodes: list[OnnxNode]) -> None:
        """Put nodes that the exported graph lacks where what they give is used."""
        users: dict[str, list[OnnxNode]] = defaultdict(list)
        for node in nodes:
            for value in node.inputs:
                users[value].append(node)
        for node in reversed(nodes):
            if node.module == "?":
                node.module = (
                    common(
                        {
                            user.module
                            for value in node.outputs
                            for user in users[value]
                            if user.module != "?"
                        }
                    )
                    or ""
                )

    # -- what enters and leaves -----------------------------------------------------------------

    def _edges(self, found: OnnxGraph) -> None:
        """Say of each module what enters and leaves it, by the exported graph; and its weights and settings."""
        outputs = set(found.outputs)
        inside = {value: self.module[value] for value in self.module if value}
        used: dict[str, set[str]] = defaultdict(set)
        for node, scope in zip(self.exported.node, self.scopes, strict=True):
            for value in taken(node):
                used[value].add(scope or "")
            self._settled(found, node, scope or "")
        for value, makers in {**dict.fromkeys(found.inputs), **inside}.items():
            self._edge(found, value, makers, used[value], value in outputs)
        for value in found.constants:
            scopes = used.get(value, ())
            if (
                len(self.shapes.get(value, ())) > 1
                and self.small.get(value) is None
                and not self._is_weight(found, value)
            ):
                for scope in scopes:
                    found.modules[scope].inputs.append(value)
        for module in found.modules.values():
            if not module.results:
                rest = module.more
                module.results, module.more = (rest[-1:], rest[:-1]) if module.path else ([], rest)

    def _edge(
        self, found: OnnxGraph, value: str, made: str | None, used: set[str], is_output: bool
    ) -> None:
        """Note a value with the modules that it enters, and those that it leaves."""
        for path in {path for scope in used for path in (scope, *ancestors(scope))}:
            if path and (made is None or not within(made, path)):
                found.modules[path].inputs.append(value)
        for path in (made, *ancestors(made)) if made is not None else ():
            outside = any(not within(scope, path) for scope in used)
            if not path or not (outside or is_output):
                continue
            # what is also used inside left it on a way of its own: common subexpressions, key-value caches
            sink = outside and not any(within(scope, path) for scope in used)
            module = found.modules[path]
            (module.results if sink else module.more).append(value)

    def _settled(self, found: OnnxGraph, node: Any, scope: str) -> None:
        """Note the weights and settings that a node of a module has."""
        module = found.modules.get(scope)
        if module is None:
            return
        for place, value in enumerate(node.input):
            if (
                not module.called
                or value not in self.shapes
                or (self.small.get(value) is not None and "." not in value)
            ):
                continue
            unnamed = "." not in value
            if not unnamed:
                name = value.rpartition(".")[2]
            elif node.op_type in _PRODUCTS and place in (1, 2):
                name = ("weight", "bias")[place - 1]
            else:
                continue
            flat = (
                len(self.shapes[value]) == 2 and node.op_type in ("MatMul", "Gemm") and place == 1
            )
            turned = (
                unnamed and flat and not any(a.name == "transB" and a.i for a in node.attribute)
            )
            module.weights.setdefault(name, Weight(value, turned))
        eps = self._eps(node)
        if eps is not None:
            module.settings["eps"] = eps

    def _eps(self, node: Any) -> float | None:
        """Return the epsilon that a node is given, as an attribute or as what is added below a square root."""
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                return shortest(attribute.f)
        if node.op_type == "Add" and any(
            user.op_type in ("Sqrt", "Rsqrt") for user in self.users[node.output[0]]
        ):
            return next(
                (self.small[v] for v in node.input if isinstance(self.small.get(v), float)), None
            )
        return None

    def _is_weight(self, found: OnnxGraph, value: str) -> bool:
        return any(
            weight.name == value
            for scope in found.modules.values()
            for weight in scope.weights.values()
        )
