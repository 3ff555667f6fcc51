"""Sessions of ONNX Runtime that are recorded: which ones, which of their runs, and what the program gets.

Ours (`exposed_session.py`) runs in place of the program's own; the first runs are made on both, and where they do not agree bit for bit, the program
gets its own from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.compat import onnxruntime_api
from llmdebug_nb.capture.compat.onnxruntime_api import tensor_of
from llmdebug_nb.capture.onnx import node_times, run_recorder
from llmdebug_nb.capture.onnx.exposed_session import ExposedSession
from llmdebug_nb.capture.onnx.graph import OnnxGraph, OnnxModule, OnnxNode
from llmdebug_nb.capture.onnx.run_recorder import FollowedSession, RunRecorder
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.core import records
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.paths import ancestors

_CHECKED = 2  # shapes of inputs with which a session and ours are both run, to see that they agree
_PAST = ("past", "cache")
_FALLBACK = "InferenceSession"


class Host(run_recorder.Host, Protocol):
    """What following sessions needs of a recording."""

    notes: list[str]
    active: bool

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any: ...
    def place(self, label: str) -> str: ...
    def adds(self, session: Any, nodes: list[records.Node]) -> None: ...
    def begin_run(
        self, session: Any, root: str, given: dict[str, Any]
    ) -> tuple[records.RootCall, bool]: ...
    def end_run(self, on: bool) -> None: ...
    def asks_for(self, path: str) -> bool: ...


class Sessions:
    """The sessions that one recording follows: those given, or with none given any that runs."""

    def __init__(self, host: Host, given: Sequence[Any], only: bool) -> None:
        """``only``: other sessions are not recorded. Raises CaptureError for a session that can't be."""
        self._host, self._options = host, host.options
        self._only = only
        self._followed: dict[int, FollowedSession] = {}
        self._wanted = OperatorFilter(host.options.apis)
        self._busy = False
        for session in given:
            self._follow(session)

    def __len__(self) -> int:
        return len(self._followed)

    def start(self) -> None:
        onnxruntime_api.listeners.add(self)

    def stop(self) -> None:
        onnxruntime_api.listeners.remove(self)
        for followed in self._followed.values():
            if followed.tap is not None:
                node_times.write(self._host, followed)
                followed.tap.close()

    @property
    def labels(self) -> list[str]:
        return [followed.label for followed in self._followed.values()]

    @property
    def keeps_any(self) -> bool:
        return any(kept for followed in self._followed.values() for kept in followed.kept.values())

    @property
    def operators(self) -> list[str]:
        """Return the names of the operators that there are."""
        return sorted(
            {node.op for one in self._followed.values() if one.tap for node in one.tap.graph.nodes}
        )

    # -- which sessions -------------------------------------------------------------------------

    def _follow(self, session: Any, may_fail: bool = True) -> FollowedSession:
        tap = None
        try:
            tap = ExposedSession(session, "kernel" in self._options.profile)
            if tap.problem:
                self._host.problems[tap.problem] += 1
        except CaptureError as error:
            if may_fail:
                onnxruntime_api.model_of(session)  # what it was made of is gone: said at once
            self._host.problems[
                f"a session is recorded only by what goes in and out of it: {error}"
            ] += 1
        label = (tap.graph.modules[""].type if tap is not None else "") or _FALLBACK
        followed = FollowedSession(session, tap, label, self._host.place(label))
        self._followed[id(session)] = followed
        self._host.adds(session, run_recorder.rows(followed))
        self._say(tap)
        self.select(followed)
        return followed

    def _say(self, tap: ExposedSession | None) -> None:
        if tap is None:
            return
        if tap.graph.nested:
            self._host.notes.append(
                f"what runs inside {tap.graph.nested} If, Loop or Scan is not in it, only what they give"
            )
        if tap.graph.random:
            self._host.notes.append(
                "the graph draws random numbers: what is recorded was drawn anew, beside the program's own run"
            )
        if tap.hidden:
            self._host.notes.append(
                f"{len(tap.hidden)} values that are no tensors (sequences, maps) are not in it"
            )

    def select_all(self) -> None:
        for followed in self._followed.values():
            self.select(followed)

    def select(self, followed: FollowedSession) -> None:
        """Decide which modules are asked for, and which values are needed for that."""
        graph = (
            followed.tap.graph
            if followed.tap is not None
            else OnnxGraph([], {"": OnnxModule("")}, [], [], set())
        )
        followed.kept = {}
        for path, module in graph.modules.items():
            name = followed.path(path)
            asked = selection.keeps(
                self._options, (name, path), module.type
            ) and self._host.asks_for(name)
            followed.kept[path] = asked
        followed.needed = self._needed(followed, graph) if followed.tap is not None else []

    def _needed(self, followed: FollowedSession, graph: OnnxGraph) -> list[str]:
        """Return the values that are recorded, and what the graph gives."""
        names = dict.fromkeys(graph.outputs)
        for what, one in followed.plan:
            if what == "node" and self._asked(followed, one):
                names |= dict.fromkeys([*one.inputs, *one.outputs])
            elif what == "begin" and followed.kept[one.path]:
                names |= dict.fromkeys([*one.inputs, *one.results, *one.more])
        kinds = followed.tap.kinds if followed.tap is not None else {}
        return [name for name in names if name in kinds or name in graph.outputs]

    def _asked(self, followed: FollowedSession, node: OnnxNode) -> bool:
        inside = any(followed.kept.get(path) for path in (node.module, *ancestors(node.module)))
        return inside and node.op in self._wanted and self._begins(node.op)

    def _begins(self, op: str) -> bool:
        """Tell whether an operator's name begins as is asked for, where operators are filtered by that."""
        return not (self._options.opname and self._options.operators) or selection.begins(
            op, self._options.opname
        )

    # -- runs -----------------------------------------------------------------------------------

    def ran(
        self,
        session: Any,
        names: Any,
        feed: Mapping[str, Any],
        options: Any,
        own: Callable[[], Any],
    ) -> Any:
        """A session is run: run ours in its place where a step is recorded, and record what it gives."""
        begun = self._host.guarded(self._begin, session, feed)
        if begun is None:
            return own()
        followed, call, on = begun
        tap: ExposedSession | None = followed.tap
        try:
            if not on:
                return own()
            if tap is None or not tap.same:
                seen = (
                    self._host.guarded(self._run, followed, feed, None) if tap is not None else None
                )
                result = own()
                wanted = list(names or [one.name for one in session.get_outputs()])
                self._host.guarded(
                    self._record,
                    followed,
                    call,
                    feed,
                    seen or dict(zip(wanted, result, strict=False)),
                )
                return result
            seen = self._host.guarded(self._run, followed, feed, options)
            if seen is None:  # the program's own run says what is wrong, if anything is
                return own()
            wanted = list(names or [one.name for one in session.get_outputs()])
            result = (
                [seen[name] for name in wanted] if all(name in seen for name in wanted) else own()
            )
            shapes = tuple(getattr(value, "shape", None) for value in feed.values())
            if shapes not in followed.checked and len(followed.checked) < _CHECKED:
                followed.checked.add(shapes)
                result = self._agree(tap, result, own())
            self._host.guarded(self._record, followed, call, feed, seen)
            return result
        finally:
            self._busy = False
            self._host.guarded(self._host.end_run, on)

    def ran_unseen(
        self, session: Any, feed: Mapping[str, Any] | None, own: Callable[[], Any]
    ) -> Any:
        """A session is run in a way in which ours can't take its place: it runs beside it, before what is bound may be overwritten."""
        if feed is None:
            if self._host.active and (id(session) in self._followed or not self._only):
                self._host.problems[
                    "a run with inputs that were bound before the recording began, or by address, is not in it"
                ] += 1
            return own()
        begun = self._host.guarded(self._begin, session, feed)
        if begun is not None:
            followed, call, on = begun
            try:
                seen = (
                    self._host.guarded(self._run, followed, feed, None)
                    if on and followed.tap is not None
                    else None
                )
                if seen is not None:
                    self._host.guarded(self._record, followed, call, feed, seen)
            finally:
                self._busy = False
                self._host.guarded(self._host.end_run, on)
        return own()

    def _begin(
        self, session: Any, feed: Mapping[str, Any]
    ) -> tuple[FollowedSession, records.RootCall, bool] | None:
        """Number a run that begins; None where it is not followed."""
        if self._busy or not self._host.active:
            return None
        followed = self._followed.get(id(session))
        if followed is None and self._only:
            return None
        if not self._host.thread.outermost():
            self._host.problems["a session that runs inside of a module is not in it"] += 1
            return None
        if followed is None:
            self._busy = True
            try:
                followed = self._follow(session, may_fail=False)
            finally:
                self._busy = False
        tensors = {name: tensor_of(value) for name, value in feed.items()}
        past = [
            t
            for name, t in tensors.items()
            if isinstance(t, torch.Tensor) and any(word in name for word in _PAST)
        ]
        given: dict[str, Any] = {
            name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)
        }
        if past:
            given |= {
                "use_cache": True,
                "past_key_values": True if any(t.numel() for t in past) else None,
            }
        call, on = self._host.begin_run(session, followed.path(""), given)
        self._busy = True
        return followed, call, on

    def _run(
        self, followed: FollowedSession, feed: Mapping[str, Any], options: Any
    ) -> dict[str, Any]:
        assert followed.tap is not None
        followed.ran.append(self._host.thread.root_call)
        return followed.tap.run(followed.needed, feed, options)

    def _agree(self, tap: ExposedSession, ours: list[Any], theirs: list[Any]) -> list[Any]:
        """Return what the program gets: its own. Where ours is not the same bit for bit, it is not used in its place again."""
        if not all(_same(a, b) for a, b in zip(ours, theirs, strict=True)):
            tap.same = False
            self._host.notes.append(
                "the session gives other bits than the graph that is recorded, which is run beside it; the program gets its own"
            )
        return theirs

    # -- records --------------------------------------------------------------------------------

    def _record(
        self,
        followed: FollowedSession,
        root: records.RootCall,
        feed: Mapping[str, Any],
        seen: dict[str, Any],
    ) -> None:
        """Record a run as if its modules and operators had been called."""
        values = {name: tensor_of(value) for name, value in (*feed.items(), *seen.items())}
        recording = RunRecorder(self._host, followed, root, values)
        if self._options.logits:
            recording.logits()
        else:
            recording.all(lambda node: self._asked(followed, node))


def _same(a: Any, b: Any) -> bool:
    """Tell whether two arrays are the same bit for bit."""
    if not hasattr(a, "tobytes") or not hasattr(b, "tobytes") or a.dtype == object:
        return type(a) is type(b) and bool(getattr(a == b, "all", lambda: a == b)())
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
