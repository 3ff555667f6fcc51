"""The sessions of ONNX Runtime that are recorded: their choice, their runs and their results.

Our own session (`exposed_session.py`) runs in place of the program's session. The first runs are
made on both sessions. If their results differ in any bit, the program gets its own session's
results from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.compat import onnxruntime_api
from llmdebug_nb.capture.compat.onnxruntime_api import Feed, tensor_of
from llmdebug_nb.capture.onnx import node_times
from llmdebug_nb.capture.onnx.exposed_session import ExposedSession
from llmdebug_nb.capture.onnx.graph import ModuleBegins, OnnxGraph, OnnxModule, OnnxNode
from llmdebug_nb.capture.onnx.run_recorder import FollowedSession, RunRecorder
from llmdebug_nb.capture.onnx.session_runs import SessionRuns
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.paths import ancestors
from llmdebug_nb.core.records import RootCall

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, RunOptions

_CHECKED = 2  # input shapes with which both sessions run, to compare their results
_CACHE_NAMES = ("past", "cache")
_FALLBACK = "InferenceSession"
_UNKNOWN_INPUTS = (
    "a run with inputs that were bound before the recording began, or by address, is not recorded"
)
_OTHER_BITS = (
    "the session gives other bits than the recorded graph, which runs beside it; "
    "the program gets its own results"
)


class Sessions:
    """The sessions that one recording follows: the given ones, or any that runs."""

    def __init__(self, host: SessionRuns, sessions: Sequence[InferenceSession], only: bool) -> None:
        """``only``: no other sessions are recorded.

        Raises:
            CaptureError: the model of a session is gone.
        """
        self._host, self._options = host, host.options
        self._only = only
        self._followed: dict[int, FollowedSession] = {}
        self._operators = OperatorFilter(host.options.apis)
        self._busy = False
        for session in sessions:
            self._follow(session)

    def __len__(self) -> int:
        return len(self._followed)

    def start(self) -> None:
        """Listen to the runs of sessions."""
        onnxruntime_api.listeners.add(self)

    def stop(self) -> None:
        """Stop listening, and write the times of nodes."""
        onnxruntime_api.listeners.remove(self)
        for followed in self._followed.values():
            if followed.exposed is not None:
                node_times.write(
                    followed, self._options, self._host.recorder.sink, self._host.notes
                )
                followed.exposed.close()

    @property
    def labels(self) -> list[str]:
        return [followed.label for followed in self._followed.values()]

    @property
    def keeps_any(self) -> bool:
        """The filters ask for a module."""
        return any(kept for followed in self._followed.values() for kept in followed.kept.values())

    @property
    def operators(self) -> list[str]:
        """The names of the operators in all graphs."""
        exposed = [one.exposed for one in self._followed.values() if one.exposed is not None]
        return sorted({node.op for one in exposed for node in one.graph.nodes})

    # -- which sessions -------------------------------------------------------------------------

    def _follow(self, session: InferenceSession, may_fail: bool = True) -> FollowedSession:
        exposed = None
        try:
            exposed = ExposedSession(session, "kernel" in self._options.profile)
            if exposed.problem:
                self._host.problems[exposed.problem] += 1
        except CaptureError as error:
            if may_fail:
                onnxruntime_api.model_of(session)  # raises at once if the model is gone
            problem = f"only the inputs and outputs of a session are recorded: {error}"
            self._host.problems[problem] += 1
        label = (exposed.graph.modules[""].type if exposed is not None else "") or _FALLBACK
        followed = FollowedSession(session, exposed, label, self._host.next_prefix(label))
        self._followed[id(session)] = followed
        self._host.add_session(session, followed.topology())
        if exposed is not None:
            self._note_limits(exposed)
        self.select(followed)
        return followed

    def _note_limits(self, exposed: ExposedSession) -> None:
        notes, graph = self._host.notes, exposed.graph
        if graph.nested:
            notes.append(
                f"of {graph.nested} If, Loop or Scan nodes only the outputs are recorded, "
                "not what runs inside"
            )
        if graph.random:
            notes.append(
                "the graph draws random numbers: the recording has drawn its own, "
                "beside the program's run"
            )
        if exposed.hidden:
            hidden = len(exposed.hidden)
            notes.append(f"{hidden} values that are not tensors (sequences, maps) are not recorded")

    def select_all(self) -> None:
        """Apply the filters anew."""
        for followed in self._followed.values():
            self.select(followed)

    def select(self, followed: FollowedSession) -> None:
        """Apply the filters to a session: which modules are recorded, which values are needed."""
        exposed = followed.exposed
        graph = exposed.graph if exposed is not None else None
        modules = graph.modules if graph is not None else {"": OnnxModule("")}
        followed.kept = {}
        for path, module in modules.items():
            name = followed.path(path)
            wanted = selection.selects(self._options, (name, path), module.type)
            followed.kept[path] = wanted and self._host.selects_module(name)
        followed.needed = []
        if exposed is not None:
            needed = self._needed(followed, exposed.graph)
            outputs = exposed.graph.outputs
            followed.needed = [name for name in needed if name in exposed.kinds or name in outputs]

    def _needed(self, followed: FollowedSession, graph: OnnxGraph) -> list[str]:
        """Return the outputs of the graph and the values that are recorded."""
        names = dict.fromkeys(graph.outputs)
        for step in followed.plan:
            if isinstance(step, OnnxNode) and self._is_wanted(followed, step):
                names |= dict.fromkeys([*step.inputs, *step.outputs])
            elif isinstance(step, ModuleBegins) and followed.kept[step.module.path]:
                module = step.module
                names |= dict.fromkeys([*module.inputs, *module.results, *module.more])
        return list(names)

    def _is_wanted(self, followed: FollowedSession, node: OnnxNode) -> bool:
        inside = any(followed.kept.get(path) for path in (node.module, *ancestors(node.module)))
        return inside and node.op in self._operators and self._begins(node.op)

    def _begins(self, op: str) -> bool:
        """Tell whether an operator's name begins as requested, if operators are so filtered."""
        is_filtered = self._options.opname and self._options.operators
        return not is_filtered or selection.starts_with_any(op, self._options.opname)

    # -- runs -----------------------------------------------------------------------------------

    def ran(
        self, session: InferenceSession, names: Sequence[str] | None, feed: Feed,
        options: RunOptions | None, own: Callable[[], list[object]],
    ) -> list[object]:  # fmt: skip
        """Run our session in place of the program's, if the step is recorded, and record it."""
        begun = self._host.guarded(self._begin, session, feed)
        if begun is None:
            return own()
        followed, root, on = begun
        try:
            self._busy = True
            if not on:
                return own()
            wanted = list(names or [one.name for one in session.get_outputs()])
            exposed = followed.exposed
            if exposed is None or not exposed.same:
                return self._run_beside(followed, root, wanted, feed, own)
            return self._run_instead(followed, exposed, root, wanted, feed, options, own)
        finally:
            self._end(on)

    def _run_beside(
        self, followed: FollowedSession, root: RootCall, wanted: list[str], feed: Feed,
        own: Callable[[], list[object]],
    ) -> list[object]:  # fmt: skip
        """Run both sessions; the program gets its own results."""
        values = self._values(followed, feed)
        results = own()
        seen = values or dict(zip(wanted, results, strict=False))
        self._host.guarded(self._record, followed, root, feed, seen)
        return results

    def _run_instead(
        self, followed: FollowedSession, exposed: ExposedSession, root: RootCall, wanted: list[str],
        feed: Feed, options: RunOptions | None, own: Callable[[], list[object]],
    ) -> list[object]:  # fmt: skip
        """Run our session; the program gets its results, except in the first runs."""
        values = self._values(followed, feed, options)
        if values is None:
            return own()  # raises if the program's call is at fault
        known = all(name in values for name in wanted)
        results = [values[name] for name in wanted] if known else own()
        shapes = tuple(getattr(value, "shape", None) for value in feed.values())
        if shapes not in followed.checked and len(followed.checked) < _CHECKED:
            followed.checked.add(shapes)
            ours, results = results, own()
            if not all(_same(a, b) for a, b in zip(ours, results, strict=True)):
                exposed.same = False
                self._host.notes.append(_OTHER_BITS)
        self._host.guarded(self._record, followed, root, feed, values)
        return results

    def ran_unseen(
        self, session: InferenceSession, feed: Feed | None, own: Callable[[], object]
    ) -> object:
        """Run our session before the program's, in ways to run that it can't replace.

        The program's run may overwrite what is bound. ``feed``: None if the inputs are unknown.
        """
        if feed is None:
            if self._host.active and (id(session) in self._followed or not self._only):
                self._host.problems[_UNKNOWN_INPUTS] += 1
            return own()
        begun = self._host.guarded(self._begin, session, feed)
        if begun is not None:
            followed, root, on = begun
            try:
                self._busy = True
                values = self._values(followed, feed) if on else None
                if values is not None:
                    self._host.guarded(self._record, followed, root, feed, values)
            finally:
                self._end(on)
        return own()

    def _begin(
        self, session: InferenceSession, feed: Feed
    ) -> tuple[FollowedSession, RootCall, bool] | None:
        """Begin a root call, and tell whether it is recorded; None if the run is not followed."""
        if self._busy or not self._host.active:
            return None
        followed = self._followed.get(id(session))
        if followed is None and self._only:
            return None
        if not self._host.thread.outermost():
            self._host.problems["a session that runs inside of a module is not recorded"] += 1
            return None
        if followed is None:
            self._busy = True
            try:
                followed = self._follow(session, may_fail=False)
            finally:
                self._busy = False
        if self._host.selection_changed():
            self.select_all()
        root, on = self._host.begin_run(session, followed.path(""), _inputs(feed))
        return followed, root, on

    def _end(self, on: bool) -> None:
        self._busy = False
        self._host.guarded(self._host.end_run, on)

    def _values(
        self, followed: FollowedSession, feed: Feed, options: RunOptions | None = None
    ) -> dict[str, object] | None:
        """Run our session and return the needed values; None if there is none or it fails."""
        exposed = followed.exposed
        if exposed is None:
            return None

        def run() -> dict[str, object]:
            followed.ran.append(self._host.thread.root_call)
            return exposed.run(followed.needed, feed, options)

        return self._host.guarded(run)

    def _record(
        self, followed: FollowedSession, root: RootCall, feed: Feed, seen: Mapping[str, object]
    ) -> None:
        """Record a run as if its modules and operators had been called."""
        values = {name: tensor_of(value) for name, value in (*feed.items(), *seen.items())}
        recorder = RunRecorder(self._host, followed, root, values)
        if self._options.logits:
            recorder.record_logits()
        else:
            recorder.record(lambda node: self._is_wanted(followed, node))


def _inputs(feed: Feed) -> dict[str, object]:
    """Return the input tensors by name, with the key-value cache under a model's usual names."""
    values = {name: tensor_of(value) for name, value in feed.items()}
    tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
    cached = [
        tensor.numel()
        for name, tensor in tensors.items()
        if any(word in name for word in _CACHE_NAMES)
    ]
    inputs: dict[str, object] = dict(tensors)
    if cached:
        inputs |= {"use_cache": True, "past_key_values": True if any(cached) else None}
    return inputs


def _same(a: object, b: object) -> bool:
    """Tell whether two results are equal in every bit."""
    import numpy

    if not isinstance(a, numpy.ndarray) or not isinstance(b, numpy.ndarray) or a.dtype == object:
        return type(a) is type(b) and bool(numpy.all(a == b))
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
