"""Pairs operators of a backward pass with the forward operators whose gradients they compute."""

from __future__ import annotations

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch


class ForwardOperators:
    """The forward operators of a root call, by the sequence number of the node each one made.

    ``used``: by a backward pass.
    """

    def __init__(self) -> None:
        self._since = 0  # the autograd clock when the root call began
        self._by_node: dict[int, OpenCall] = {}
        self.used = False

    def begin_root_call(self) -> None:
        self._since = pytorch.autograd_clock()
        if self.used:
            self.clear()
            self.used = False

    def clear(self) -> None:
        self._by_node.clear()

    def has_new_node(self) -> bool:
        """Return whether the newest autograd node was made in this root call and is not paired."""
        node = pytorch.autograd_clock() - 1
        return node >= self._since and node not in self._by_node

    def add(self, call: OpenCall) -> None:
        """Pair an operator that has just run with the node it made, if it made one."""
        node = pytorch.autograd_clock() - 1
        if node >= self._since and node not in self._by_node:
            self._by_node[node] = call

    def of_running_node(self) -> OpenCall | None:
        """Return the forward operator whose gradient the running node computes."""
        node = pytorch.running_node()
        return self._by_node.get(pytorch.clock_of(node)) if node is not None else None
