"""The nodes of an exported graph: which one it is that makes a module's error, by its name.

The operator that a node is made of, called on what the graph computed with, is what it should have given (`traced.py`); the first that does not is to blame.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.core.findings import FOLDED, INNER, Difference
from llmdebug_nb.core.records import EXPORTED, Record
from llmdebug_nb.explain import causes
from llmdebug_nb.explain.calls import Call, Key
from llmdebug_nb.explain.replay import quiet, rounding
from llmdebug_nb.explain.runs import NotAgain, Runs, Side
from llmdebug_nb.explain.traced import Fx, Graph, Node, Values, read

_WRONG = 64.0  # units of rounding: nodes may be several steps of one operator
_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Blamed:
    """A node, why, and what that makes of the cause (None: it stays)."""

    node: Node
    why: str = ""
    cause: str | None = None


def is_crossed(differences: Sequence[Difference]) -> bool:
    """Tell whether one run is of an exported graph, and the other is not."""
    return any(d.pair.why in (FOLDED, INNER) for d in differences)


def compared(differences: Sequence[Difference]) -> list[Difference]:
    """Return the rows that say something: what a graph has and a model does not, by nature, is no evidence."""
    return [d for d in differences if d.pair.why not in (FOLDED, INNER)]


class Search:
    """Finds the node that is behind a finding."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._graphs = Graph(runs.golden), Graph(runs.mine)

    def find(
        self, call: Call, cause: str, weights: list[str], rows: list[Difference]
    ) -> Blamed | None:
        """Return the node that is to blame for a call; None where there is none, or where it can't be told.

        ``weights``: the names of those that differ. ``rows``: those inside of it that diverge.
        """
        for key, graph, side in (
            (call.mine, self._graphs[1], self._runs.mine),
            (call.golden, self._graphs[0], self._runs.golden),
        ):
            nodes = graph.nodes(key) if key is not None else []
            if key is None or not nodes:
                continue
            if "/" in key.path:
                return next((Blamed(node) for node in nodes if node.key == key), None)
            other = self._runs.golden if side is self._runs.mine else self._runs.mine
            known = [
                r
                for d in rows
                for r in (d.pair.golden if side is self._runs.mine else d.pair.mine,)
                if r is not None
            ]
            return self._in_module(key, graph, side, cause, weights, _Reference(other, known))
        return None

    def _in_module(
        self, key: Key, graph: Graph, side: Side, cause: str, weights: list[str], reference: _Reference
    ) -> Blamed | None:  # fmt: skip
        nodes = graph.inside(key)
        for name in weights if cause == causes.WEIGHT else ():
            initializer = graph.weight(key.path, name)
            for node in nodes:
                if initializer is not None and any(
                    text == initializer
                    for slot, (_, text) in node.said.items()
                    if slot.startswith("initializer.")
                ):
                    return Blamed(node, f"whose initializer {initializer} that is")
        eps = side.attributes.get(key.path, {}).get("eps")
        if cause == causes.SCALAR and eps is not None:
            for node in nodes:
                if eps in side.scalars(node.key).values():
                    return Blamed(node)
        if cause in (causes.WEIGHT, causes.SCALAR):
            return Blamed(nodes[0]) if len(nodes) == 1 else None
        return self._checked(nodes, graph, side, key, reference) or (
            Blamed(nodes[0]) if len(nodes) == 1 else None
        )

    def _checked(
        self, nodes: list[Node], graph: Graph, side: Side, key: Key, reference: _Reference
    ) -> Blamed | None:
        """Return the first node that does not give what the operator does that it is made of, called on what the graph computed."""
        groups: dict[str, list[Node]] = {}
        for node in nodes:
            if node.fx:
                groups.setdefault(node.fx, []).append(node)
        values = Values(graph, side, key)
        for fx, group in groups.items():
            made = graph.made(group[-1])
            try:
                said = read(fx)
                if made is None:
                    continue
                masked = self._masked(group, said, values, made, reference)
                if masked is not None:
                    return masked
                units = self._units(values.computed(said, made), side.load(made))
            except (NotAgain, ValueError, RuntimeError):
                continue
            if units > _WRONG:
                why = f"which should give aten.{said[1]}({said[2]}) as in the traced program, and is {units:.2g} × eps/2 off that on what it was given"
                return Blamed(group[-1], why)
        return None

    def _units(self, wanted: torch.Tensor, recorded: torch.Tensor) -> float:
        return self._runs.error(wanted, recorded) / (
            rounding([str(wanted.dtype), str(recorded.dtype)]) / 2
        )

    def _masked(
        self, group: list[Node], said: Fx, values: Values, made: Record, reference: _Reference
    ) -> Blamed | None:
        """Return the node of an attention that has a mask of its own, where the causal one in its place gives what the other run has, and its own does not."""
        if not said[1].startswith(_ATTENTION):
            return None
        node, mask = next(
            ((n, m) for n in group if (m := values.mask(n)) is not None), (None, None)
        )
        if node is None or mask is None:
            return None
        scale = re.search(r"scale: ([\d.e-]+)", said[3])
        attend: Callable[..., torch.Tensor] = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            scale=float(scale[1]) if scale else None,
        )
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(mask.shape[-1] - mask.shape[-2])
        recorded = values.load(made)
        with quiet():
            for given in values.attentions(said, group):
                own = attend(*given, attn_mask=mask)
                right = attend(*given, attn_mask=causal)
                if (
                    own.shape != recorded.shape
                    or self._units(own, recorded) > _WRONG
                    or self._units(right, recorded) <= _WRONG
                ):
                    continue
                rows = right.transpose(1, 2).flatten(2)
                if any(
                    one.numel() == rows.numel()
                    and self._units(one.reshape(rows.shape).to(rows.dtype), rows) <= _WRONG
                    for one in reference.tensors()
                ):
                    return Blamed(
                        node,
                        "whose mask is not the causal one: with that, it gives what the other run has",
                        causes.WRONG_MASK,
                    )
        return None


@dataclass(frozen=True)
class _Reference:
    """Tensors of the other run that differ: what the graph should have computed."""

    side: Side
    records: list[Record]

    def tensors(self) -> Iterator[torch.Tensor]:
        for record in self.records:
            with contextlib.suppress(NotAgain):
                yield self.side.load(record)


def words(blamed: Blamed) -> str:
    """Return ``node node_Add_218 (Onnx.Add)``, and why."""
    return (
        f"node {blamed.node.name} ({blamed.node.op}{'' if blamed.node.op.startswith(EXPORTED) else ' of the graph'})"
        + (f", {blamed.why}" if blamed.why else "")
    )
