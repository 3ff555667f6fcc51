"""Gradients, by hooks on autograd's nodes: unlike backward hooks of modules, they change no bit.

A call has two kinds of gradient: those that arrive for its outputs (role ``input``: they enter the
backward pass of the call), and those that it passes on to its inputs (role ``output``). The latter
are found on the edges that leave the call's part of the graph; several for one input are summed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.autograd.graph import Node as AutogradNode
from torch.utils.hooks import RemovableHandle

from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.guard import Guarded

_MANY = 4096

# (call, role, slot, gradient)
Record = Callable[[OpenCall, str, str, torch.Tensor], None]
_Edge = tuple[AutogradNode, int]
_Gradients = tuple[torch.Tensor | None, ...]


class _Sum:
    """The gradient of one input, summed over the edges that lead to it."""

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

    def __init__(self, roles: tuple[str, ...], guarded: Guarded, record: Record) -> None:
        self._roles, self._guarded, self._record = roles, guarded, record
        self._handles: list[RemovableHandle] = []
        # id of a parameter -> its node, which holds the parameter and stays the same one
        self._parameters: dict[int, AutogradNode] = {}
        self._watched: set[int] = set()
        self._open: dict[int, tuple[OpenCall, str, _Sum]] = {}
        self._lock = threading.Lock()

    def begin(self, call: OpenCall, inputs: Iterable[Leaf]) -> None:
        """Note where a call's part of the graph starts, before the call can write to its inputs."""
        if torch.is_grad_enabled():
            call.since = pytorch.autograd_clock()
            call.edges = [
                (slot, edge)
                for slot, leaf in inputs
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                if (edge := self._edge(leaf)) is not None
            ]

    def end(self, call: OpenCall, outputs: Iterable[Leaf]) -> None:
        """Hook the nodes at both ends of a call's part of the graph."""
        if call.since is None:
            return
        roots = []
        for slot, leaf in outputs:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                continue
            edge = self._edge(leaf)
            if edge is None:
                continue
            node, number = edge
            roots.append(node)
            if "input" in self._roles:
                self._hook(node.register_prehook, partial(self._arrived, call, slot, number))
        if roots and call.edges and "output" in self._roles:
            self._hook_exits(call, roots)
        call.edges = ()

    def watch_parameter(
        self, begin: Callable[[], OpenCall | None], slot: str, parameter: torch.Tensor
    ) -> None:
        """Record what each backward pass adds to a parameter's gradient.

        ``begin()`` returns the call that it is recorded with, or None if it is not recorded.
        """
        if id(parameter) in self._watched or not parameter.requires_grad or not parameter.is_leaf:
            return
        self._watched.add(id(parameter))
        edge = self._edge(parameter)

        def on_add(gradients: _Gradients) -> None:
            call = begin()
            if call is not None and gradients[0] is not None:
                self._guarded(self._record, call, "grad", slot, gradients[0])

        if edge is not None:
            self._hook(edge[0].register_prehook, on_add)

    def finish(self) -> None:
        """End a backward pass: record the sums that lack an edge which the pass did not use."""
        with self._lock:
            waiting, self._open = list(self._open.values()), {}
        for call, slot, total in waiting:
            if total.value is not None:
                self._guarded(self._record, call, "output", slot, total.value)

    def off(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._parameters.clear()
        self._open.clear()

    def _edge(self, tensor: torch.Tensor) -> _Edge | None:
        """Return the node where the gradient of a tensor arrives, and the number of its output.

        None if `torch.func` wraps it: that has a graph of its own.
        """
        node = tensor.grad_fn or self._parameters.get(id(tensor)) or pytorch.accumulator_of(tensor)
        if node is None:
            return None
        if type(tensor) is torch.nn.Parameter:
            self._parameters[id(tensor)] = node
        return node, tensor.output_nr

    def _hook(self, register: Callable[..., RemovableHandle], hook: Callable[..., None]) -> None:
        if len(self._handles) >= _MANY:
            self._handles = [handle for handle in self._handles if pytorch.is_hooked(handle)]
        self._handles.append(register(hook))

    def _arrived(self, call: OpenCall, slot: str, number: int, gradients: _Gradients) -> None:
        gradient = gradients[number]
        if gradient is not None:
            self._guarded(self._record, call, "input", slot, gradient)

    def _hook_exits(self, call: OpenCall, roots: list[AutogradNode]) -> None:
        """Hook every node of the call's part of the graph from which an edge leads to an input."""
        slots_of: dict[_Edge, list[str]] = {}
        for slot, edge in call.edges:
            slots_of.setdefault(edge, []).append(slot)
        since = call.since or 0
        exits: list[tuple[AutogradNode, int, list[str]]] = []
        counts: dict[str, int] = {}
        seen, stack = set(), list(roots)
        while stack:
            node = stack.pop()
            if node in seen or pytorch.clock_of(node) < since:
                continue
            seen.add(node)
            for place, (next_node, number) in enumerate(node.next_functions):
                if next_node is None:
                    continue
                slots = slots_of.get((next_node, number))
                if slots is None:
                    stack.append(next_node)
                    continue
                exits.append((node, place, slots))
                for slot in slots:
                    counts[slot] = counts.get(slot, 0) + 1
        sums = {slot: _Sum(count) for slot, count in counts.items()}
        for node, place, slots in exits:
            self._hook(node.register_hook, partial(self._left, call, place, slots, sums))

    def _left(
        self, call: OpenCall, place: int, slots: list[str], sums: dict[str, _Sum],
        gradients: _Gradients, _: object,
    ) -> None:  # fmt: skip
        gradient = gradients[place]
        if gradient is not None:
            for slot in slots:
                self._guarded(self._add, call, slot, sums[slot], gradient)

    def _add(self, call: OpenCall, slot: str, total: _Sum, gradient: torch.Tensor) -> None:
        total.add(gradient)
        with self._lock:
            if total.missing > 0:
                self._open[id(total)] = (call, slot, total)
                return
            self._open.pop(id(total), None)
        value, total.value = total.value, None  # if we held it, the engine would have to copy it
        if value is not None:
            self._record(call, "output", slot, value)
