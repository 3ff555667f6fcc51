"""A recording of compiled code: root calls are followed by hooks on the root alone, and what runs in them by its graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from llmdebug_nb.capture.compat import dynamo, inductor, pytorch
from llmdebug_nb.capture.compiled.graphs import Graphs
from llmdebug_nb.capture.compiled.origins import Frame
from llmdebug_nb.capture.hooks import autograd
from llmdebug_nb.capture.hooks.modules import Watch
from llmdebug_nb.capture.recorder import Recorder, Sink
from llmdebug_nb.capture.session import Session
from llmdebug_nb.core.errors import CaptureError, EmptyDumpError, OptionError, nearest
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node

_GENERATE = (
    "generate() of what torch.compile returned runs the model uncompiled; compile its forward instead "
    "(model.forward = torch.compile(model.forward, backend=...)), or record with `with ld.dump(model, graph=...)`"
)


class _Function(nn.Module):
    """Stands for a compiled function that no module calls."""


class CompiledSession(Session):
    """Records what `torch.compile` compiles: with `backend` as its backend.

    The models that were given are compiled with it from `start` to `stop`; with none given, the outermost module (or compiled
    function) is followed that runs when `backend` is first called. ``reference``: a second recorder, of the graph that kernels are made
    of, run node by node on the same inputs.
    """

    def __init__(
        self, options: DumpOptions, sink: Sink, describe: Callable[[nn.Module, str], list[Node]],
        models: Sequence[nn.Module] = (), rank: int = 0, reference: Sink | None = None,
    ) -> None:  # fmt: skip
        """Raises what `Session` raises, and CaptureError where there is no compiler for the CPU."""
        self.reference = Recorder(reference, options) if reference is not None else None
        self._wrapped = {id(pytorch.compiled_root(model)): model for model in models}
        self._bare: Watch | None = None
        self._frame: FrameType | None = None
        self._stack = contextlib.ExitStack()
        self._generated = False
        self._before = 0
        super().__init__(options, sink, describe, models, rank)
        for recorder in self.recorders:
            recorder.knows_by_place = False  # kernels write past version counters
        if self.reference is not None:
            self.observer.record = functools.partial(
                self._see_both, self.observer.record, self.reference.record
            )
        self.graphs = Graphs(self, options)
        self._check()

    def _check(self) -> None:
        """Refuse settings that there are not, and a machine that can't compile for the CPU."""
        if self.options.graph == "fx":
            return
        try:
            inductor.check_config(self.options.compiler_config or {})
        except KeyError as error:
            name = str(error.args[0])
            raise OptionError(
                f"compiler_config: Inductor has no setting {name!r}{nearest(name, inductor.settings())}"
            ) from None
        on_cpu = (
            any(p.is_cpu for model in self._models for p in model.parameters())
            or not torch.cuda.is_available()
        )
        why = inductor.no_compiler() if on_cpu else None
        if why is not None:
            raise CaptureError(
                f"Inductor has no C++ compiler to work with ({why}); install one, or record with graph='fx'"
            )

    @staticmethod
    def _see_both(
        see: Callable[..., None], reference: Callable[..., None], call: Any, role: str, found: Any
    ) -> None:
        """Record what the model was given in both dumps."""
        found = list(found)
        see(call, role, found)
        if call.level == "module" and role == "input":
            reference(call, role, found)

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        self.active = True
        self._tracker.start()
        self.observer.start()
        if self.observer.backward:
            autograd.listeners.add(self)
        if self.profile is not None:
            self._stack.enter_context(dynamo.compiling(self.profile.aside))
        for model in self._models:
            self._stack.enter_context(dynamo.compiled_with(model, self.graphs.backend))
            inner = pytorch.compiled_root(model)
            if inner is not model:
                self._stack.enter_context(dynamo.compiled_with(inner, self.graphs.backend))
            self._watches[id(inner)][0].attach()

    def _unhook(self) -> None:
        super()._unhook()
        self._stack.close()
        self._frame = None

    @property
    def recorders(self) -> list[Recorder]:
        return [self.recorder, *([self.reference] if self.reference is not None else [])]

    def refusal(self) -> CaptureError | None:
        if not self._models and self._generated and not self.graphs.ran:
            return EmptyDumpError(f"nothing was recorded: {_GENERATE}")
        if not self._models and not self.graphs.ran:
            return EmptyDumpError(
                "nothing was recorded: nothing was compiled with this backend, or what was has not run"
            )
        return super().refusal()

    # -- roots --------------------------------------------------------------------------------

    @property
    def _sees_compiled(self) -> bool:
        return True

    def _entries(self, root: nn.Module) -> list[nn.Module]:
        return [root]

    def _watch(self, root: nn.Module, nodes: list[Node], prefix: str, attach: bool = False) -> None:
        entry = self._wrapped.get(id(root), root)
        super()._watch(root, nodes, prefix, attach)
        first = self._watches[id(root)][0]
        first.hooked = [root, entry] if entry is not root else [root]

    def _hook(self, root: nn.Module, on: bool) -> None:
        """Hooks inside would be compiled with the model."""

    def follow_compiled(self, frame: Frame) -> None:
        """Something is compiled: where no model was given, what runs is the root."""
        if self._roots or not self.active:
            return
        module, call = dynamo.outermost_call()
        if module is not None and call is not None:
            self._wrapped[id(pytorch.compiled_root(module))] = module
            self._adopt(module)
            watch = self._watches[id(pytorch.compiled_root(module))][0]
            watch.hooked = [module]
            watch.attach()
            watch.begin_late(
                tuple(call.f_locals.get("args", ())), dict(call.f_locals.get("kwargs", {}))
            )
            self.thread.inside[-1:] = [(watch, call)]
            self.notes.append(
                "what the first call of the model gave back is not in it, as recording began inside that call"
            )
            return
        owner = (
            next((m for m in frame.modules() if next(m.parameters(), None) is not None), None)
            or _Function()
        )
        self._adopt(owner)
        self._bare = self._watches[id(owner)][0]

    def enter_compiled(self) -> None:
        """A graph runs: outside of all modules, the compiled function around it is the root call."""
        watch = self._bare
        if watch is None:
            return
        _, frame = dynamo.outermost_call()
        if frame is self._frame and frame is not None:
            return
        self._frame = frame
        if self.thread.on:
            self.commit()
        kwargs = dict(frame.f_locals.get("kwargs", {})) if frame is not None else {}
        call = self._tracker.begin(watch.root, "", True, (), kwargs)
        self.thread.begin(call, self.demand.root_call(call, watch.root))

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().enter(watch, args, kwargs)
        self._before = self.graphs.ran

    def leave(self, watch: Watch) -> None:
        if self.thread.on and len(self.thread.inside) == 1 and self.graphs.ran == self._before:
            self.problems[
                f"a call of {watch.op} ran uncompiled: only what went in and out of it is recorded"
            ] += 1
        super().leave(watch)

    def _follow(self, model: nn.Module) -> nn.Module | None:
        root = super()._follow(model)
        if not self._models and root is not None and not self._generated:
            self._watches[id(root)][0].attach()
        self._generated = True
        return root

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module of a root that is followed; None for any other."""
        watch = self._owners.get(id(module))
        return watch.path if watch is not None else None

    def asks_for(self, path: str) -> bool:
        """Tell whether the filters ask for what runs in a module: for it, or for one around it."""
        if not (self.options.layers or self.options.types):
            return True
        return any(
            watch.kept
            and (watch.path == path or not watch.path or path.startswith(f"{watch.path}."))
            for watches in self._watches.values()
            for watch in watches
        )
