"""The sessions of ONNX Runtime that are recorded: their choice, their runs and their results.

Our own session (`exposed_session.py`) runs in place of the program's session. The first runs are
made on both sessions. If their results differ in any bit, the program gets its own session's
results from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from llmdebug_nb.capture.compat import onnxruntime_api
from llmdebug_nb.capture.compat.onnxruntime_api import Feed, tensor_of
from llmdebug_nb.capture.graphs.followed_graph import FollowedGraph
from llmdebug_nb.capture.graphs.followed_graphs import FollowedGraphs
from llmdebug_nb.capture.onnx import node_times
from llmdebug_nb.capture.onnx.exposed_session import ExposedSession
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.records import RootCall

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, RunOptions

_CHECKED = 2  # input shapes with which both sessions run, to compare their results
_FALLBACK = "InferenceSession"
_UNKNOWN_INPUTS = (
    "a run with inputs that were bound before the recording began, or by address, is not recorded"
)
_OTHER_BITS = (
    "the session gives other bits than the recorded graph, which runs beside it; "
    "the program gets its own results"
)


class Sessions(FollowedGraphs):
    """The sessions that one recording follows: the given ones, or any that runs."""

    kind = "a session"
    listeners = onnxruntime_api.listeners

    def __init__(self, parts: Parts, sessions: Sequence[InferenceSession], only: bool) -> None:
        """``only``: no other sessions are recorded.

        Raises:
            CaptureError: the model of a session is gone.
        """
        super().__init__(parts, only)
        for session in sessions:
            self._followed[id(session)] = self._follow(session)

    def stop(self) -> None:
        """Stop listening, and write the times of nodes."""
        self.listeners.remove(self)
        for followed in self._followed.values():
            if followed.exposed is not None:
                sink, notes = self._parts.recorder.sink, self._parts.notes
                node_times.write(followed, self._options, sink, notes)
                followed.exposed.close()

    def _follow(self, session: InferenceSession, may_fail: bool = True) -> FollowedGraph:
        exposed = None
        try:
            exposed = ExposedSession(session, "kernel" in self._options.profile)
            if exposed.problem:
                self._problems[exposed.problem] += 1
        except CaptureError as error:
            if may_fail:
                onnxruntime_api.model_of(session)  # raises at once if the model is gone
            problem = f"only the inputs and outputs of a session are recorded: {error}"
            self._problems[problem] += 1
        fed = {one.name for one in session.get_inputs()}
        followed = FollowedGraph(self._parts, session, fed, exposed, _FALLBACK)
        if exposed is not None:
            self._note_limits(exposed.graph, "If, Loop or Scan")
            if exposed.hidden:
                self._parts.notes.append(
                    f"{len(exposed.hidden)} values that are not tensors (sequences, maps)"
                    " are not recorded"
                )
        return followed

    # -- runs -----------------------------------------------------------------------------------

    def ran(
        self, session: InferenceSession, names: Sequence[str] | None, feed: Feed,
        options: RunOptions | None, own: Callable[[], list[object]],
    ) -> list[object]:  # fmt: skip
        """Run our session in place of the program's, if the step is recorded, and record it."""
        begun = self._guarded(self._begin_run, session, feed)
        if begun is None:
            return own()
        followed, root, on = begun
        try:
            self._busy = True
            if not on:
                return own()
            wanted = list(names or [one.name for one in session.get_outputs()])
            exposed = self._exposed(followed)
            if exposed is None or not exposed.same:
                return self._run_beside(followed, root, wanted, feed, own)
            return self._run_instead(followed, exposed, root, wanted, feed, options, own)
        finally:
            self._end(on)

    def _run_beside(
        self, followed: FollowedGraph, root: RootCall, wanted: list[str], feed: Feed,
        own: Callable[[], list[object]],
    ) -> list[object]:  # fmt: skip
        """Run both sessions; the program gets its own results."""
        values = self._values(followed, feed)
        results = own()
        seen = values or dict(zip(wanted, results, strict=False))
        self._guarded(self._record_run, followed, root, feed, seen)
        return results

    def _run_instead(
        self, followed: FollowedGraph, exposed: ExposedSession, root: RootCall, wanted: list[str],
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
                self._parts.notes.append(_OTHER_BITS)
        self._guarded(self._record_run, followed, root, feed, values)
        return results

    def ran_unseen(
        self, session: InferenceSession, feed: Feed | None, own: Callable[[], object]
    ) -> object:
        """Run our session before the program's, in ways to run that it can't replace.

        The program's run may overwrite what is bound. ``feed``: None if the inputs are unknown.
        """
        if feed is None:
            if self._parts.guard.active and (id(session) in self._followed or not self._only):
                self._problems[_UNKNOWN_INPUTS] += 1
            return own()
        begun = self._guarded(self._begin_run, session, feed)
        if begun is not None:
            followed, root, on = begun
            try:
                self._busy = True
                values = self._values(followed, feed) if on else None
                if values is not None:
                    self._guarded(self._record_run, followed, root, feed, values)
            finally:
                self._end(on)
        return own()

    def _exposed(self, followed: FollowedGraph) -> ExposedSession | None:
        """Return our session."""
        return followed.exposed if isinstance(followed.exposed, ExposedSession) else None

    def _values(
        self, followed: FollowedGraph, feed: Feed, options: RunOptions | None = None
    ) -> dict[str, object] | None:
        """Run our session and return the needed values; None if there is none or it fails."""
        exposed = self._exposed(followed)
        if exposed is None:
            return None

        def run() -> dict[str, object]:
            followed.ran.append(self._parts.thread.root_call)
            return exposed.run(followed.needed, feed, options)

        return self._guarded(run)

    def _begin_run(
        self, session: InferenceSession, feed: Feed
    ) -> tuple[FollowedGraph, RootCall, bool] | None:
        """Begin a root call, and tell whether it is recorded; None if the run is not followed."""
        follow = functools.partial(self._follow, session, may_fail=False)
        followed = self._followed_by(id(session), follow)
        return None if followed is None else (followed, *self._begin(followed, _tensors(feed)))

    def _record_run(
        self, followed: FollowedGraph, root: RootCall, feed: Feed, seen: Mapping[str, object]
    ) -> None:
        self._record(followed, root, {**_tensors(feed), **_tensors(seen)})


def _tensors(values: Mapping[str, object]) -> dict[str, object]:
    return {name: tensor_of(value) for name, value in values.items()}


def _same(a: object, b: object) -> bool:
    """Tell whether two results are equal in every bit."""
    import numpy

    if not isinstance(a, numpy.ndarray) or not isinstance(b, numpy.ndarray) or a.dtype == object:
        return type(a) is type(b) and bool(numpy.all(a == b))
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
