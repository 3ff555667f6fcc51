"""One run of an ONNX graph on its way into the dump: as if its modules and operators had been called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.onnx.exposed_session import ExposedSession, first_line
from llmdebug_nb.capture.onnx.graph import OnnxModule, OnnxNode
from llmdebug_nb.core import records
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.paths import ancestors

LEVEL = "onnx"


class Host(Protocol):
    """What recording a run needs of its session."""

    options: DumpOptions
    thread: Any
    recorder: Any
    observer: Any
    problems: Any


class FollowedSession:
    """One session that is followed. ``label``: its root. ``prefix``: of its paths, "" for the first root."""

    def __init__(self, session: Any, tap: ExposedSession | None, label: str, prefix: str) -> None:
        self.session, self.tap, self.label, self.prefix = session, tap, label, prefix
        self.plan: list[tuple[str, Any]] = tap.graph.plan() if tap is not None else []
        self.kept: dict[str, bool] = {}
        self.weighed = False
        self.said: set[tuple[str, int]] = (
            set()
        )  # calls of which the dump says already what node they are
        self.checked: set[tuple[Any, ...]] = set()
        self.needed: list[str] = []
        self.ran: list[int] = []  # root calls in which ours ran

    def path(self, path: str) -> str:
        """Return the path of a module of it in the run."""
        return (self.prefix + path).rstrip(".") if path else self.prefix.rstrip(".")


class RunRecorder:
    """One run on its way into the dump. ``values``: by name; an input has the tensor that the operator before it gave."""

    def __init__(
        self, host: Host, followed: FollowedSession, root: records.RootCall, values: dict[str, Any]
    ) -> None:
        self._host, self._followed, self._root, self.values = host, followed, root, values
        self._observer, self._roles = host.observer, host.options.roles
        self._modules = "module" in host.options.mode
        self._open: dict[str, OpenCall] = {}

    def all(self, asked: Callable[[OnnxNode], bool]) -> None:
        tap = self._followed.tap
        graph = tap.graph if tap is not None else None
        whole = graph.modules[""] if graph is not None else OnnxModule("")
        self._weigh()
        inputs = graph.inputs if graph is not None else list(self.values)
        outputs = graph.outputs if graph is not None else list(self.values)
        known = {one.name for one in self._followed.session.get_inputs()}
        self._begin(
            whole,
            {
                f"kwargs.{name}": self.values[name]
                for name in inputs
                if name in self.values and name in known
            },
        )
        for what, one in self._followed.plan:
            if what == "node":
                self._node(one, asked(one))
            elif what == "begin":
                self._begin(one, {} if one.guessed else self._entering(one))
            elif what == "end":
                self._end(one, self._leaving(one))
        self._end(
            whole,
            {
                name.replace(".", "\\."): self.values[name]
                for name in outputs
                if name in self.values and name not in known
            },
        )

    def logits(self) -> None:
        """Record what the last module of the run gives, and nothing else."""
        last = next(
            (
                one
                for what, one in reversed(self._followed.plan)
                if what == "end" and self._leaving(one)
            ),
            None,
        )
        if last is not None:
            call = self._call(last.path, last.type or "module", "module")
            self._observer.record(call, "output", self._leaving(last).items())

    def _call(self, module: str, op: str, level: str) -> OpenCall:
        path = self._followed.path(module)
        place = path if level == "module" else f"{path}/{op}"
        thread, around = self._host.thread, self._around(module)
        call = OpenCall(place, op, level, path, thread.count(place), self._root.index)
        home = around.home if around is not None else ""
        call.id = thread.next_id(place, level, home)
        call.home = call.id if level == "module" else home
        return call

    def _begin(self, module: OnnxModule, inputs: Mapping[str, Any]) -> None:
        call = self._call(
            module.path,
            module.type or (self._followed.label if not module.path else "Module"),
            "module",
        )
        self._host.recorder.record_call(call)
        call.inherited, asked = True, self._followed.kept[module.path] and self._modules
        call.kept = asked and self._observer.asks_for(call)
        self._open[module.path] = call
        if call.kept:
            self._observer.begin_call(call, list(inputs.items()))

    def _end(self, module: OnnxModule, outputs: Mapping[str, Any]) -> None:
        self._observer.end_call(self._open.pop(module.path), list(outputs.items()))

    def _node(self, node: OnnxNode, asked: bool) -> None:
        """Record a node, or only count it: ids do not depend on what is recorded."""
        around = self._around(node.module)
        if not asked:
            self._host.thread.next_id(
                self._followed.path(node.module), LEVEL, around.home if around is not None else ""
            )
            return
        call = self._call(node.module, node.op, LEVEL)
        call.inherited, call.kept = True, self._observer.asks_for(call)
        if not call.kept:
            return
        recorder = self._host.recorder
        recorder.record_call(call)
        source = (
            recorder.stack_number(list(node.source))
            if node.source and self._host.options.sources
            else None
        )
        within = (around.path, around.number) if around is not None else (None, None)
        recorder.record_operator(
            [
                call.root_call,
                call.path,
                call.number,
                "forward",
                LEVEL,
                call.op,
                source,
                *within,
                None,
                None,
            ]
        )
        if (call.path, call.number) not in self._followed.said:  # it is the same in each run
            self._followed.said.add((call.path, call.number))
            recorder.record(call, LEVEL, self._said(node))
        tensors = [
            (str(at), self.values[name])
            for at, name in enumerate(node.inputs)
            if name in self.values
        ]
        self._observer.begin_call(call, [*tensors, *node.given])
        self._observer.end_call(
            call,
            [
                (str(at), self.values[name])
                for at, name in enumerate(node.outputs)
                if name in self.values
            ],
        )

    def _around(self, module: str) -> OpenCall | None:
        """Return the innermost call that is under way of a module, or of one around it."""
        return next(
            (self._open[path] for path in (module, *ancestors(module)) if path in self._open), None
        )

    def _said(self, node: OnnxNode) -> list[tuple[str, Any]]:
        tap = self._followed.tap
        provider = tap.providers.get(node.name) if tap is not None else None
        return [*node.said, *([("provider", provider)] if provider else [])]

    def _entering(self, module: OnnxModule) -> dict[str, Any]:
        """Return what enters a module, by slot: ``0`` where that is one tensor, else the name of the value."""
        found = {name: value for name in module.inputs if _tells(value := self._value(name))}
        return (
            {"0": next(iter(found.values()))}
            if len(found) == 1
            else {f"kwargs.{name}": value for name, value in found.items()}
        )

    def _leaving(self, module: OnnxModule) -> dict[str, Any]:
        """Return what leaves a module, by slot: what it returns as ``0``, ``1``, anything else by the name of the value."""
        results = [value for name in module.results if _tells(value := self._value(name))]
        more = {
            name.replace(".", "\\."): value
            for name in module.more
            if _tells(value := self._value(name))
        }
        return {**{str(at): value for at, value in enumerate(results)}, **more}

    def _value(self, name: str) -> Any:
        tap = self._followed.tap
        if name not in self.values and tap is not None and tap.has_constant(name):
            try:
                self.values[name] = tap.constant(name)
            except (ValueError, OSError, TypeError):
                self.values[name] = None
        return self.values.get(name)

    def _weigh(self) -> None:
        """Record the weights of each module once, and what it is set to."""
        tap = self._followed.tap
        if self._followed.weighed or tap is None:
            return
        self._followed.weighed = True
        for path, module in tap.graph.modules.items():
            if not self._followed.kept[path]:
                continue
            tensors = {}
            for name, weight in module.weights.items():
                try:
                    tensor = tap.constant(weight.name)
                except (ValueError, OSError, TypeError) as error:
                    self._host.problems[
                        f"weight {weight.name} can't be read: {first_line(error)}"
                    ] += 1
                    continue
                if tensor is not None:
                    tensors[name] = tensor.t().contiguous() if weight.turned else tensor
            call = OpenCall(
                self._followed.path(path),
                module.type or "Module",
                "module",
                None,
                0,
                self._root.index,
            )
            self._host.recorder.record(
                call,
                LEVEL,
                [(f"initializer.{name}", weight.name) for name, weight in module.weights.items()],
            )
            self._observer.record_module(call.path, call.op, module.settings, tensors)


def rows(followed: FollowedSession) -> list[records.Node]:
    """Return the rows of the topology: the modules of a session."""
    graph = followed.tap.graph if followed.tap is not None else None
    if graph is None:
        return [
            records.Node(followed.path(""), followed.label, followed.label, -1, root=followed.label)
        ]
    at = {path: place for place, path in enumerate(graph.modules)}
    found = []
    for path, module in graph.modules.items():
        parent = (
            next((at[one] for one in ancestors(path) if one in at and one != path), -1)
            if path
            else -1
        )
        name = (
            path[len(next(one for one in (*ancestors(path), "") if one in at)) :].lstrip(".")
            if path
            else followed.label
        )
        kind = module.type or (
            "Module" if path and module.called else "ModuleList" if path else followed.label
        )
        params = (
            {slot: followed.tap.shape(weight) for slot, weight in module.weights.items()}
            if followed.tap
            else {}
        )
        found.append(
            records.Node(
                followed.path(path),
                name,
                kind,
                parent,
                params,
                root=followed.prefix.rstrip(".") or followed.label,
            )
        )
    return found


def _tells(value: Any) -> bool:
    """Tell whether a value is one that modules hand on, and no size that a graph computes with."""
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex() or value.dim() > 1
    )
