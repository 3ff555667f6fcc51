"""What the nodes of a graph read: results of earlier nodes, inputs of the graph, and the cache.

A result is read when its node has computed it, as ggml may overwrite it later. A node that reads it
through a view has it as an input all the same; the view's shape and strides are noted. Inputs of
the graph (positions, masks) are read as they are; the cache, and what is made of it alone, only
where the recording keeps weights, too, as each step would keep all of it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import torch

from llmdebug_nb.capture.calls import Leaf
from llmdebug_nb.capture.compat.ggml_tensors import Reading, Tensor
from llmdebug_nb.capture.engines.ggml_axes import Shape, tokens_first
from llmdebug_nb.capture.engines.ggml_plan import Plan, Read
from llmdebug_nb.capture.engines.ggml_results import Results
from llmdebug_nb.capture.engines.ggml_weights import Weights
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.ggml import NodeFacts, Source, View


class Sources:
    """Reads what the nodes of one pass over a graph read.

    ``results``: of the nodes so far. ``plan``: of the graph. ``weights``: also reads
    the cache; None: it is not wanted. ``problems``: counts what can't be read.
    """

    def __init__(
        self, library: Reading, results: Results, plan: Plan,
        weights: Weights | None, prefix: str, problems: Counter[str],
    ) -> None:  # fmt: skip
        self._library, self._results, self._plan = library, results, plan
        self._weights, self._prefix, self._problems = weights, prefix, problems
        self._inputs: dict[int, torch.Tensor] = {}  # of the graph

    def facts(self, node: Tensor, shape: Shape) -> tuple[list[Read], NodeFacts]:
        """Return the inputs of a node, and what is known of it."""
        read: list[Read] = []
        op, device = self._library.op(node), self._library.device(node)
        facts = NodeFacts(list(shape.ne), [], shape.tokens, self._prefix, device)
        for slot, pointer in enumerate(node.src):
            if not pointer:
                continue
            source = pointer.contents
            kind, ne = self._library.type_name(source.type), [int(n) for n in source.ne]
            if self._library.is_weight(source):
                facts.sources.append(Source(slot, kind, ne, name_of(source)))
                continue
            address = ctypes.addressof(source)
            base, seen = self._plan.base(address), source
            if op == "VIEW":  # it takes nothing but what it is: its source lies as it does itself
                seen, address, ne = node, ctypes.addressof(node), [int(n) for n in node.ne]
            view = self._view(seen, address, base) if base in self._results else None
            read.append(Read(str(slot), address, base, view is not None))
            facts.sources.append(Source(slot, kind, ne, view=view))
        return read, facts

    def of(self, node: Tensor, read: Sequence[Read]) -> list[Leaf]:
        """Return the inputs of a node that was just computed."""
        inputs: list[Leaf] = []
        for slot, address, base, computed in read:
            values = self._results[base] if computed else self._read(node, address, base)
            if values is not None:
                inputs.append((slot, values))
            elif computed:
                self._problems[_GONE] += 1
        return inputs

    def _view(self, source: Tensor, address: int, base: int) -> View | None:
        """Return how a source lies in an earlier result; None if it is a copy of it."""
        made = self._plan.of(base)
        if made is None:
            return None
        shape = made.shape
        if address == base:
            return View(list(shape.ne), shape.tokens)
        whole = Tensor.from_address(base)
        storage = ctypes.addressof(source.view_src.contents) if source.view_src else address
        under = ctypes.addressof(whole.view_src.contents) if whole.view_src else base
        offset = (source.data or 0) - (whole.data or 0)
        if storage not in (base, under) or offset < 0:
            return None
        return View(list(shape.ne), shape.tokens, [int(n) for n in source.nb], offset)

    def _read(self, node: Tensor, address: int, base: int) -> torch.Tensor | None:
        """Return a source that no node of this pass computed; None if it is not wanted, or gone."""
        source = Tensor.from_address(address)
        if address in self._inputs:
            return self._inputs[address]
        is_input = address == base and self._library.op(source) == "NONE"
        if not (is_input or self._weights is not None) or _overlap(node, source):
            return None
        read = self._library.values if self._weights is None else self._weights.values
        try:
            values = tokens_first(read(source), None)
        except CaptureError as error:
            self._problems[str(error)] += 1
            return None
        if is_input:
            self._inputs[address] = values
        return values


_GONE = "an input of a node was let go: more nodes read it than in a pass of one token"


def name_of(tensor: Tensor) -> str:
    return bytes(tensor.name).decode(errors="replace")


def _overlap(node: Tensor, source: Tensor) -> bool:
    """Tell whether a node may have overwritten a source: it was computed in its place."""
    (first, ends), (begins, last) = _span(node), _span(source)
    return first <= last and begins <= ends


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte, and of one near the last element."""
    start = tensor.data or 0
    steps = zip(tensor.ne, tensor.nb, strict=True)
    return start, start + sum((int(n) - 1) * int(step) for n, step in steps)
