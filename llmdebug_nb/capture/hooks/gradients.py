"""Gradients, by hooks on autograd's nodes: these, other than backward hooks of modules, change no bit of them.

A call gets two kinds of gradient: what arrives for its outputs (role ``input``: it goes into the backward
pass of the call) and what the call itself passes on to its inputs (role ``output``). The second is found on
the edges by which the call's part of the graph is left; several for one input are added up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch

_MANY = 4096

# (call, role, slot, gradient)
Observe = Callable[[OpenCall, str, str, torch.Tensor], None]


class _Sum:
    """The gradient of one input, from as many edges as lead to it."""

    def __init__(self, edges: int) -> None:
        self.missing = edges
        self.value: torch.Tensor | None = None
        self.lock = threading.Lock()

    def add(self, gradient: torch.Tensor) -> None:
        with self.lock, torch.no_grad():
            self.missing -= 1
            self.value = gradient if self.value is None else self.value + gradient


class Gradients:
    """The node hooks of one session; ``off`` takes all of them off."""

    def __init__(
        self, roles: tuple[str, ...], guarded: Callable[..., None], observe: Observe
    ) -> None:
        self._roles, self._guarded, self._observe = roles, guarded, observe
        self._handles: list[Any] = []
        self._parameters: dict[
            int, Any
        ] = {}  # id of a parameter -> its node, which holds it and stays the same one
        self._watched: set[int] = set()
        self._open: dict[int, tuple[OpenCall, str, _Sum]] = {}
        self._lock = threading.Lock()

    def begin(self, call: OpenCall, inputs: Iterable[tuple[str, Any]]) -> None:
        """A call begins: note where its part of the graph will start. Before it runs: it may write to its inputs."""
        if torch.is_grad_enabled():
            call.since = pytorch.autograd_clock()
            call.edges = [
                (slot, self._edge(leaf))
                for slot, leaf in inputs
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]

    def end(self, call: OpenCall, outputs: Iterable[tuple[str, Any]]) -> None:
        """A call has ended: hook the nodes at both ends of its part of the graph."""
        if call.since is None:
            return
        roots = []
        for slot, leaf in outputs:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                continue
            node, number = self._edge(leaf)
            roots.append(node)
            if "input" in self._roles:
                self._hook(node.register_prehook, self._arrived(call, slot, number))
        if roots and call.edges and "output" in self._roles:
            self._hook_exits(call, roots)
        call.edges = ()

    def parameter(
        self, call: Callable[[], OpenCall | None], slot: str, parameter: torch.Tensor
    ) -> None:
        """Observe what each backward pass adds to a parameter's gradient; ``call()``: what it is recorded with, if."""
        if id(parameter) in self._watched or not parameter.requires_grad or not parameter.is_leaf:
            return
        self._watched.add(id(parameter))
        node, _ = self._edge(parameter)

        def adds(gradients: tuple[torch.Tensor | None, ...]) -> None:
            now = call()
            if now is not None and gradients[0] is not None:
                self._guarded(self._observe, now, "grad", slot, gradients[0])

        self._hook(node.register_prehook, adds)

    def finish(self) -> None:
        """A backward pass is over: record the sums that wait for an edge which it did not use."""
        with self._lock:
            waiting, self._open = list(self._open.values()), {}
        for call, slot, total in waiting:
            if total.value is not None:
                self._guarded(self._observe, call, "output", slot, total.value)

    def off(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._parameters.clear()
        self._open.clear()

    def _edge(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return the node and the number of its output that the gradient of ``tensor`` arrives at."""
        node = tensor.grad_fn or self._parameters.get(id(tensor)) or pytorch.accumulator_of(tensor)
        if type(tensor) is torch.nn.Parameter:
            self._parameters[id(tensor)] = node
        return node, tensor.output_nr

    def _hook(self, register: Callable[..., Any], hook: Callable[..., None]) -> None:
        if len(self._handles) >= _MANY:
            self._handles = [handle for handle in self._handles if pytorch.is_hooked(handle)]
        self._handles.append(register(hook))

    def _arrived(self, call: OpenCall, slot: str, number: int) -> Callable[..., None]:
        def arrives(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[number]
            if gradient is not None:
                self._guarded(self._observe, call, "input", slot, gradient)

        return arrives

    def _hook_exits(self, call: OpenCall, roots: list[Any]) -> None:
        """Hook every node of the call's part of the graph from which an edge leads to an input."""
        wanted: dict[Any, list[str]] = {}
        for slot, edge in call.edges:
            wanted.setdefault(edge, []).append(slot)
        since = call.since or 0
        exits: list[tuple[Any, int, list[str]]] = []
        counts: dict[str, int] = {}
        seen, stack = set(), list(roots)
        while stack:
            node = stack.pop()
            if node in seen or pytorch.clock_of(node) < since:
                continue
            seen.add(node)
            for place, edge in enumerate(node.next_functions):
                if edge[0] is None:
                    continue
                slots = wanted.get(edge)
                if slots is None:
                    stack.append(edge[0])
                    continue
                exits.append((node, place, slots))
                for slot in slots:
                    counts[slot] = counts.get(slot, 0) + 1
        sums = {slot: _Sum(count) for slot, count in counts.items()}
        for node, place, slots in exits:
            self._hook(node.register_hook, self._passes(call, place, slots, sums))

    def _passes(
        self, call: OpenCall, place: int, slots: list[str], sums: dict[str, _Sum]
    ) -> Callable[..., None]:
        def passes(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
            gradient = gradients[place]
            if gradient is not None:
                for slot in slots:
                    self._guarded(self._add, call, slot, sums[slot], gradient)

        return passes

    def _add(self, call: OpenCall, slot: str, total: _Sum, gradient: torch.Tensor) -> None:
        total.add(gradient)
        with self._lock:
            if total.missing > 0:
                self._open[id(total)] = (call, slot, total)
                return
            self._open.pop(id(total), None)
        value, total.value = total.value, None  # held on to, the engine would have to copy it
        if value is not None:
            self._observe(call, "output", slot, value)
