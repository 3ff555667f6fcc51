"""Records a ``llama_cpp.Llama``: each pass over its graph as if modules and operators were called.

A pass computes a batch, or a part of it (a *ubatch*) if the batch is larger than ``n_ubatch``. Each
is a step. Their rows have tokens of sequences, see `TokenRow`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.compat.ggml_tensors import Tensor
from llmdebug_nb.capture.compat.llamacpp_api import BatchRow, Context, Llama
from llmdebug_nb.capture.engines.ggml_axes import Shape, tokens_first, tokens_of
from llmdebug_nb.capture.engines.ggml_calls import Computed, GraphCalls
from llmdebug_nb.capture.engines.ggml_graph import Graph, GraphNode, NodeKey, has_values, path_in
from llmdebug_nb.capture.engines.ggml_parameters import parameters_of
from llmdebug_nb.capture.engines.ggml_plan import Described, Plan, Planned, fields_of
from llmdebug_nb.capture.engines.ggml_rounding import epsilon_of, half_precision
from llmdebug_nb.capture.engines.ggml_sources import Sources, name_of
from llmdebug_nb.capture.engines.ggml_weights import Weights
from llmdebug_nb.capture.engines.texts import Texts, parts_of
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.capture.runtime import GraphFacts
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.columns import TOKEN_ROWS
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.ggml import PREFIX, owner_of, text_of
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import RootCall

_FULL = {"f32", "f64", ""}
_UNKNOWN_ROWS = "llama.cpp computed a batch in another order: its rows are not known"
_OUTSIDE = "llama.cpp computed tokens outside of Llama.eval (images, for one): not recorded"


class LlamaSteps:
    """Follows one ``Llama`` for one recording. ``graph``: of one token, computed to see it."""

    def __init__(self, llama: Llama, parts: Parts) -> None:
        """Raises CaptureError: it can't be recorded."""
        self._parts, self._guarded = parts, parts.guard.run
        self._operators = OperatorFilter(parts.options.apis)
        self._raised: BaseException | None = None
        self._probed: list[GraphNode] | None = []
        self._plan, self._begins, self._read = Plan(), (0, b""), set[NodeKey]()
        # addresses of weights that are not recorded yet
        self._weights: dict[str, int] = {}
        self._batch: Sequence[BatchRow] | None = None
        # of the pass that begins: its rows, and those that follow in its batch
        self._rows: Sequence[BatchRow] = ()
        self._behind: Sequence[BatchRow] = ()
        self._calls: GraphCalls | None = None
        self._sources: Sources | None = None
        self._step, self._tokens, self._requests, self._open = -1, 0, 0, False
        known = getattr(llama, "input_ids", None)
        past = [] if known is None else [int(token) for token in known[: llama.n_tokens]]
        self._texts = Texts({0: past} if past else {})
        self._context = Context(llama, self._on_node)
        self._reader = Weights(self._context.library, str(getattr(llama, "model_path", "")))
        try:
            self._see_graph()
        except BaseException:
            self._context.free()
            raise

    def _see_graph(self) -> None:
        self._context.probe()
        probed, self._probed = self._probed or [], None
        if self._raised is not None:
            raise self._raised
        self.graph = Graph(probed)
        begins = next((n for n in self._plan.nodes if n.key.op == "GET_ROWS" and n.weights), None)
        if begins is None:
            raise CaptureError("this model looks no tokens up (no GET_ROWS of a weight)")
        self._begins = _label(Tensor.from_buffer_copy(begins.fields))
        self.label = self._context.architecture
        self._prefix = self._parts.roots.next_prefix(self.label)
        self._parts.roots.add_nodes(self.graph.topology(self.label, self._prefix))
        self._parts.steps.add_root(self, self._prefix.rstrip(".") or self.label)
        self._parts.steps.numbered_by(self, self)
        self.select()

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the ``Llama`` use our context. Raises CaptureError."""
        self._context.put_in(self._around)

    def stop(self) -> None:
        """Let the ``Llama`` use its own context again, with the state that ours has."""
        try:
            self._context.take_out()
        except CaptureError as error:
            self._parts.guard.problems[str(error)] += 1

    def select(self) -> None:
        """Apply the filters: which modules are recorded, and which nodes have to be read."""
        kept = {}
        for path in self.graph.modules():
            name, kind = path_in(self._prefix, path), self.graph.type_of(path, self.label)
            wanted = selection.selects(self._parts.options, (name, path), kind)
            selected = self._parts.filter.selected_modules([name], self._parts.roots.nodes)[0]
            kept[path] = wanted and selected
        self.kept = kept
        nodes, borders = self.graph.nodes, self.graph.borders()
        self._read = {
            key
            for key, node in nodes.items()
            if self._is_inside(node.module) and (key in borders or self._lists(key.op))
        }
        self._read.update(*(nodes[key].sources for key in list(self._read)))
        self._plan = Plan()

    def _is_inside(self, module: str) -> bool:
        return any(self.kept.get(path, False) for path in (module, *ancestors(module)))

    def _lists(self, op: str) -> bool:
        """Tell whether nodes of an operation are recorded themselves."""
        return PREFIX + op in self._operators and not self._parts.options.logits

    def facts(self) -> GraphFacts:
        keys = self.graph.nodes
        kinds = {"weights": {*self.graph.dtypes.values()}, "cache": self._context.cache_types}
        coarse = {what: sorted(types - _FULL) for what, types in kinds.items()}
        halves = half_precision(key.op for key in keys)
        products = self.graph.products().items()
        found = {*coarse["cache"], *(("f16",) if halves else ())}
        of_values = max(map(epsilon_of, found), default=0.0)
        return GraphFacts(
            self.label,
            any(self.kept.values()),
            {PREFIX + key.op for key in keys},
            [*(f"{what} in {', '.join(each)}" for what, each in coarse.items() if each), *halves],
            max([of_values, *map(epsilon_of, coarse["weights"])]),
            of_values,
            {path_in(self._prefix, path): kind for path, kind in products if kind not in _FULL},
        )

    # -- decoding -------------------------------------------------------------------------------

    def _around(self, decode: Callable[[], None], rows: list[BatchRow]) -> None:
        """Decode a batch. What was raised in the callback, an interrupt, is raised behind it."""
        self._batch = rows
        try:
            decode()
        finally:
            self._guarded(self._end_pass)
            self._batch = None
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _on_node(self, address: int, ask: bool) -> bool:
        """Take a node of the graph; nothing leaves this into C. Return whether to go on.

        With ``ask``: return whether its values are wanted; else they are there.
        """
        try:
            if self._probed is not None:
                self._see(address)
                return False
            work = self._asked if ask else self._computed
            return bool(self._guarded(work, address)) or not ask
        except BaseException as error:
            self._raised = self._raised or error
            return not ask

    def _see(self, address: int) -> None:
        planned = self._planned(Tensor.from_address(address), address)
        if not planned.has_values:
            return
        read = [self._plan.of(self._plan.base(at)) for at in _sources(Tensor.from_address(address))]
        shapes = {name: _shape(weight) for name, weight in planned.weights.items()}
        dtypes = {n: self._context.library.type_name(w.type) for n, w in planned.weights.items()}
        self._weights.update({n: ctypes.addressof(w) for n, w in planned.weights.items()})
        known = tuple(each.key for each in read if each is not None and each.has_values)
        assert self._probed is not None
        self._probed.append(GraphNode(planned.key, known, shapes, dtypes))

    def _planned(self, tensor: Tensor, address: int) -> Planned:
        """Find out about a node that is not in the plan yet, and put it there."""
        library, plan = self._context.library, self._plan
        sources = [each.contents for each in tensor.src if each]
        weights = {name_of(each): each for each in sources if library.is_weight(each)}
        key = plan.key(name_of(tensor), library.op(tensor), list(weights))
        valued = has_values(key.op, [library.op(each) for each in sources])
        places = [ctypes.addressof(each) for each in sources]
        shapes = [plan.shape(each) for each in places]
        axis: int | None = 1
        if _label(tensor) != self._begins:
            axis = tokens_of(key.op, tensor.ne, tensor.nb, tensor.op_params, shapes)
        bases = [plan.base(each) for each in places]
        base = address if valued or not places else bases[0]
        shape = Shape(tuple(tensor.ne), tuple(tensor.nb), axis)
        return plan.add(
            Planned(
                address, fields_of(address), key, weights, shape, base, frozenset(bases), valued
            )
        )

    # -- passes ---------------------------------------------------------------------------------

    def _asked(self, address: int) -> bool:
        tensor = Tensor.from_address(address)
        if _label(tensor) == self._begins:
            self._end_pass()
            self._begin_pass(tensor)
        if self._calls is None:
            return False
        planned = self._plan.next(address)
        if planned is None:
            planned = self._planned(tensor, address)
            is_known = planned.key in self.graph.nodes
            planned.wanted = planned.has_values and (planned.key in self._read or not is_known)
        if planned.has_values:
            self._calls.results.read(planned.sources)
        return planned.wanted

    def _begin_pass(self, tensor: Tensor) -> None:
        """Begin a step: its tokens are known now."""
        if self._batch is None:
            self._parts.guard.problems[_OUTSIDE] += 1
            return
        if self._parts.filter.changed():
            self.select()
        ids = next((s.contents for s in tensor.src if s and not self._is_weight(s.contents)), None)
        tokens = [] if ids is None else self._context.library.values(ids).flatten().tolist()
        rows, self._batch = self._batch[: len(tokens)], self._batch[len(tokens) :]
        if [row.token for row in rows] != tokens or not self._context.unified:
            self._parts.guard.problems[_UNKNOWN_ROWS] += 1
            rows = []
        self._step, self._tokens = self._step + 1, len(tokens)
        self._requests = len({row.sequence for row in rows})
        self._rows, self._behind = rows, self._batch
        call = self._parts.steps.begin(self, "", True, (), {})
        recording = self._parts.filter.selects(call)
        self._parts.thread.begin(call, recording, path_in(self._prefix, ""))
        self._plan.begin()
        self._open = True
        if recording:
            self._calls = GraphCalls(self._parts, self, self._prefix, call)
            self._calls.begin({"kwargs.input_ids": torch.tensor(tokens)})
            weights = self._reader if self._parts.options.weights else None
            self._sources = Sources(
                self._context.library, self._calls.results, self._plan, weights, self._prefix,
                self._parts.guard.problems,
            )  # fmt: skip
            if weights is not None:
                self._record_weights(weights)

    def _record_weights(self, weights: Weights) -> None:
        """Record the weights of each module, once."""
        known, self._weights = self._weights, {}
        for name, address in known.items():
            module, slot = owner_of(name)
            if not self.kept.get(module, False):
                continue
            try:
                tensors = {slot: weights.weight(name, Tensor.from_address(address))}
            except CaptureError as error:
                self._parts.guard.problems[str(error)] += 1
                continue
            kind = self.graph.type_of(module, self.label)
            path = path_in(self._prefix, module)
            self._parts.observer.weights.record(path, kind, {}, tensors)

    def _is_weight(self, tensor: Tensor) -> bool:
        return self._context.library.is_weight(tensor)

    def numbered(
        self, index: int, whole: bool, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> RootCall:
        """Number a pass, and note the token of each of its rows; see `steps.Numbering`."""
        rows = self._texts.rows(index, self._rows)
        self._parts.filter.requests.computes(index, parts_of(rows, self._rows, self._behind))
        self._parts.recorder.sink.table(TOKEN_ROWS.name, rows)
        return RootCall(
            index, step=self._step, kind="engine", query=self._tokens, batch=self._requests
        )

    def _computed(self, address: int) -> None:
        calls, sources, planned = self._calls, self._sources, self._plan.of(address)
        if calls is None or sources is None or planned is None:
            return
        tensor = Tensor.from_address(address)
        values = tokens_first(self._context.library.values(tensor), planned.shape.tokens)
        calls.results.add(address, values, self.graph.readers.get(planned.key))
        if planned.described is None:
            planned.described = self._described(calls.module, sources, tensor, planned)
        described = planned.described
        if described.inside:
            inputs = sources.of(tensor, described.sources)
            calls.node(Computed(planned.key, inputs, values, described))

    def _described(
        self, present: str, sources: Sources, tensor: Tensor, planned: Planned
    ) -> Described:
        """Describe a node that was just computed. ``present``: the module that runs."""
        op, node = planned.key.op, self.graph.nodes.get(planned.key)
        module = present if node is None else node.module
        listed = self._lists(op)
        if not self._is_inside(module):
            return Described(module, False, listed, (), (), "")
        read, facts = sources.facts(tensor, planned.shape)
        # without its values a node is not computed again
        text = "" if self._parts.options.stats_only else text_of(facts)
        return Described(
            module, True, listed, read, list(parameters_of(op, tensor.op_params)), text
        )

    def _end_pass(self) -> None:
        if not self._open:
            return
        calls, self._calls, self._open = self._calls, None, False
        self._sources = None
        if calls is not None:
            calls.end()
        self._parts.thread.end()
        self._parts.thread.after_recorded = False
        if calls is not None:
            self._parts.commit()


def _label(tensor: Tensor) -> tuple[int, bytes]:
    """Return the number of the operation of a node, and its name."""
    return tensor.op, tensor.name


def _shape(tensor: Tensor) -> list[int]:
    ne = [int(n) for n in tensor.ne]
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return ne[::-1]


def _sources(tensor: Tensor) -> list[int]:
    """Return the addresses of a node's sources, in their order."""
    return [ctypes.addressof(each.contents) for each in tensor.src if each]
