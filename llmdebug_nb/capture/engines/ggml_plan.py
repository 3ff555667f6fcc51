"""What is known of the nodes of a graph before they are computed, from pass to pass.

llama.cpp mostly computes the graph of the pass before once more (``can_reuse`` of
``llama-graph.cpp``): all tensors lie where they lay, and have the same fields. What was found out
about them then still holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmdebug_nb.capture.compat.ggml_tensors import Tensor
from llmdebug_nb.capture.engines.ggml_axes import Shape
from llmdebug_nb.capture.engines.ggml_graph import Keys, NodeKey


class Read(NamedTuple):
    """A source of a node, as an input. ``base``: the node that it is a view of, or itself.

    ``computed``: the result of the base is the input; else the source is read as it is.
    """

    slot: str
    address: int
    base: int
    computed: bool


class Described(NamedTuple):
    """What the records of a node tell. ``module``: that it runs in. ``inside``: that is recorded.

    ``listed``: the node is recorded itself. ``sources``: its inputs. ``facts``: a text, see
    `core.ggml.NodeFacts`; "" if nobody asks for it.
    """

    module: str
    inside: bool
    listed: bool
    sources: Sequence[Read]
    parameters: Sequence[tuple[str, int | float]]
    facts: str


@dataclass(slots=True)
class Planned:
    """A node. ``fields``: the bytes of its tensor. ``base``: of a view, what it is a view of.

    ``sources``: addresses of the nodes that it reads, through views. ``weights``: those that it
    uses, by name. ``has_values``: it is no view. ``wanted``: its values are to be read.
    ``described``: once they were.
    """

    address: int
    fields: bytes
    key: NodeKey
    weights: dict[str, Tensor]
    shape: Shape
    base: int
    sources: frozenset[int]
    has_values: bool
    wanted: bool = False
    described: Described | None = None


def fields_of(address: int) -> bytes:
    """Return the bytes of a ``struct ggml_tensor``."""
    return ctypes.string_at(address, _SIZE)


_SIZE = ctypes.sizeof(Tensor)


class Plan:
    """The nodes of a graph in their order. A pass follows it until one differs."""

    def __init__(self) -> None:
        self.nodes: list[Planned] = []
        self._at = 0
        self._by_address: dict[int, Planned] = {}
        self._keys = Keys()

    def begin(self) -> None:
        """Begin a pass."""
        self._at = 0

    def next(self, address: int) -> Planned | None:
        """Return the next node if it is as it was; else forget it, and all behind it."""
        if self._at == len(self.nodes):
            return None
        known = self.nodes[self._at]
        if known.address == address and known.fields == fields_of(address):
            self._at += 1
            return known
        self._forget()
        return None

    def add(self, node: Planned) -> Planned:
        self.nodes.append(node)
        self._by_address[node.address] = node
        self._at += 1
        return node

    def of(self, address: int) -> Planned | None:
        """Return the node that makes a tensor; None: no node of this graph."""
        return self._by_address.get(address)

    def shape(self, address: int) -> Shape | None:
        node = self._by_address.get(address)
        return None if node is None else node.shape

    def base(self, address: int) -> int:
        """Return what a tensor is a view of, through views of views; itself if it is none."""
        node = self._by_address.get(address)
        return address if node is None else node.base

    def key(self, name: str, op: str, weights: Sequence[str]) -> NodeKey:
        """Return the key of the node that is added next."""
        return self._keys.next(name, op, weights)

    def _forget(self) -> None:
        del self.nodes[self._at :]
        self._by_address = {node.address: node for node in self.nodes}
        self._keys = Keys(node.key for node in self.nodes)
