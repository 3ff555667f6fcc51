"""Find the node of an exported graph that makes a module's error.

The exporter notes which operator each node stands for. That operator is replayed on the values
that the graph computed (`replay/onnx_values.py`). The first node whose result differs is the cause.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.align.reasons import OF_GRAPH
from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import EXPORTED, CallKey, Record
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.execution import quiet
from llmdebug_nb.replay.onnx_values import ExportedGraph, FxCall, GraphNode, GraphValues, read
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import unit
from llmdebug_nb.replay.runs import Runs, Side

_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class BlamedNode:
    """A node, the evidence against it, and its cause; with None the finding keeps its cause."""

    node: GraphNode
    why: str = ""
    cause: str | None = None


def is_crossed(differences: Sequence[Difference]) -> bool:
    """Tell whether one run is of an exported graph, and the other is not."""
    return any(d.pair.reason in OF_GRAPH for d in differences)


def comparable(differences: Sequence[Difference]) -> list[Difference]:
    """Leave out the rows that only a graph, or only a model, can have.

    A graph's operators belong to no call of the model, even if a tensor of it holds their values.
    """
    return [d for d in differences if d.pair.reason not in OF_GRAPH and d.pair.at_its_place]


class NodeSearch:
    """Finds the node behind a finding."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._graphs = ExportedGraph(runs.golden), ExportedGraph(runs.mine)

    def find(
        self, call: ComparedCall, cause: str, weights: list[str], rows: list[Difference]
    ) -> BlamedNode | None:
        """Return the node that causes the error of a call, or None if no node is sure to.

        ``weights``: names of the weights that differ. ``rows``: diverged rows inside the call.
        """
        runs = self._runs
        of_mine = [d.pair.mine for d in rows if d.pair.mine is not None]
        of_golden = [d.pair.golden for d in rows if d.pair.golden is not None]
        for key, graph, side, other, known in (
            (call.mine, self._graphs[1], runs.mine, runs.golden, of_golden),
            (call.golden, self._graphs[0], runs.golden, runs.mine, of_mine),
        ):
            nodes = graph.nodes(key) if key is not None else []
            if key is None or not nodes:
                continue
            if is_operator(key.path):
                return next((BlamedNode(node) for node in nodes if node.key == key), None)
            reference = _Reference(other, known)
            return _ModuleSearch(runs, graph, side, key, reference).find(cause, weights)
        return None


@dataclass(frozen=True)
class _Reference:
    """The other run's tensors that differ: the values that the graph should have computed."""

    side: Side
    records: list[Record]

    def tensors(self) -> Iterator[torch.Tensor]:
        for record in self.records:
            with contextlib.suppress(CannotReplay):
                yield self.side.load(record)


class _ModuleSearch:
    """The search in one call of a module."""

    def __init__(
        self, runs: Runs, graph: ExportedGraph, side: Side, key: CallKey, reference: _Reference
    ) -> None:
        self._runs, self._graph, self._side, self._key = runs, graph, side, key
        self._nodes = graph.inside(key)
        self._reference = reference

    def find(self, cause: str, weights: list[str]) -> BlamedNode | None:
        only = BlamedNode(self._nodes[0]) if len(self._nodes) == 1 else None
        if cause == causes.WEIGHT:
            return self._by_weight(weights) or only
        if cause == causes.SCALAR:
            return self._by_eps() or only
        return self._by_value() or only

    def _by_weight(self, weights: list[str]) -> BlamedNode | None:
        """Return the node that has a differing weight as an initializer."""
        for name in weights:
            initializer = self._graph.initializer(self._key.path, name)
            for node in self._nodes if initializer is not None else ():
                facts = node.facts.items()
                if any(s.startswith("initializer.") and t == initializer for s, (_, t) in facts):
                    return BlamedNode(node, f"which has that weight as initializer {initializer}")
        return None

    def _by_eps(self) -> BlamedNode | None:
        """Return the node that has the module's eps as an argument."""
        eps = self._side.attributes.get(self._key.path, {}).get("eps")
        if eps is None:
            return None
        having = (n for n in self._nodes if eps in self._side.scalars(n.key).values())
        return next(map(BlamedNode, having), None)

    def _by_value(self) -> BlamedNode | None:
        """Return the first node whose result differs from that of its operator."""
        groups: dict[str, list[GraphNode]] = {}
        for node in self._nodes:
            if node.fx:
                groups.setdefault(node.fx, []).append(node)
        values = GraphValues(self._graph, self._side, self._key)
        for fx, group in groups.items():
            output = self._graph.output(group[-1])
            try:
                call = read(fx)
                if output is None:
                    continue
                masked = self._wrong_mask(group, call, values, output)
                if masked is not None:
                    return masked
                units = self._units(values.computed(call, output), self._side.load(output))
            except (CannotReplay, ValueError, RuntimeError):
                continue
            if units > constants.OPERATORS_EPSILONS:
                traced = f"aten.{call.operator}({call.args})"
                why = f"which stands for {traced} of the traced program; on the same inputs "
                return BlamedNode(group[-1], f"{why}its result is {units:.2g} × eps/2 off")
        return None

    def _units(self, wanted: torch.Tensor, recorded: torch.Tensor) -> float:
        """Return the error in units of rounding."""
        dtypes = [str(wanted.dtype), str(recorded.dtype)]
        return self._runs.error(wanted, recorded) / unit(dtypes)

    def _wrong_mask(
        self, group: list[GraphNode], call: FxCall, values: GraphValues, output: Record
    ) -> BlamedNode | None:
        """Return the node of an attention whose own mask is wrong.

        A causal mask would give the other run's result; the node's own mask does not.
        """
        if not call.operator.startswith(_ATTENTION):
            return None
        masks = ((node, values.mask(node)) for node in group)
        node, mask = next(((n, m) for n, m in masks if m is not None), (None, None))
        if node is None or mask is None:
            return None
        scale = re.search(r"scale: ([\d.e-]+)", call.kwargs)
        attend: Callable[..., torch.Tensor] = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            scale=float(scale[1]) if scale else None,
        )
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(mask.shape[-1] - mask.shape[-2])
        recorded = values.load(output)
        with quiet():
            for inputs in values.attentions(call, group):
                own, right = attend(*inputs, attn_mask=mask), attend(*inputs, attn_mask=causal)
                if (
                    own.shape != recorded.shape
                    or self._units(own, recorded) > constants.OPERATORS_EPSILONS
                ):
                    continue
                if self._units(right, recorded) > constants.OPERATORS_EPSILONS and self._is_known(
                    right
                ):
                    why = "whose mask is not causal; a causal one gives the other run's result"
                    return BlamedNode(node, why, causes.WRONG_MASK)
        return None

    def _is_known(self, result: torch.Tensor) -> bool:
        """Tell whether the other run has this result of an attention [batch, heads, tokens, n]."""
        rows = result.transpose(1, 2).flatten(2)
        return any(
            one.numel() == rows.numel()
            and self._units(one.reshape(rows.shape).to(rows.dtype), rows)
            <= constants.OPERATORS_EPSILONS
            for one in self._reference.tensors()
        )


def words(blamed: BlamedNode) -> str:
    """Return ``node node_Add_218 (Onnx.Add)``, and why."""
    op = blamed.node.op
    of_graph = "" if op.startswith(EXPORTED) else " of the graph"
    return f"node {blamed.node.name} ({op}{of_graph}){', ' + blamed.why if blamed.why else ''}"
