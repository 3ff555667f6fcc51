"""A recording of compiled code: hooks notice calls of the root, graphs show what runs in them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType

import torch
from torch import nn

from llmdebug_nb.capture import runtimes
from llmdebug_nb.capture.compat import dynamo, pytorch
from llmdebug_nb.capture.compat.inductor import settings as inductor
from llmdebug_nb.capture.compiled.graphs import Graphs
from llmdebug_nb.capture.compiled.origins import Frame
from llmdebug_nb.capture.hooks.modules import Args, HookedModule, Kwargs, Root
from llmdebug_nb.capture.root_calls import RootCalls
from llmdebug_nb.capture.root_finder import Describe, RootFinder
from llmdebug_nb.capture.runtime import Engine
from llmdebug_nb.capture.session import Session
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.core.errors import CaptureError, EmptyDumpError, OptionError, nearest
from llmdebug_nb.core.options import DumpOptions

_GENERATE = (
    "generate() of what torch.compile returned runs the model uncompiled; compile its forward "
    "instead (model.forward = torch.compile(model.forward, backend=...)), or record with "
    "`with ld.dump(model, graph=...)`"
)
_NOT_RUN = "nothing was compiled with this backend, or the compiled code has not run"
_LATE = "the result of the model's first call is missing, as recording began inside that call"


class _Function(nn.Module):
    """Stands for a compiled function that no module calls."""


class CompiledModules:
    """The source of calls of compiled code, with `graphs.backend` as the backend.

    Given models are compiled with it from `start` to `stop`. With none given, the outermost module
    (or compiled function) is followed that runs when the backend is first called.
    """

    def __init__(
        self, parts: Parts, models: Sequence[nn.Module], describe: Describe,
        engines: Sequence[Engine] = (),
    ) -> None:  # fmt: skip
        """``engines``: those that run some of the models.

        Raises CaptureError: a model can't be recorded.
        """
        self._parts, self._models, self._engines = parts, models, engines
        self._calls = RootCalls(parts)
        self.thread, self.observer, self.guarded = parts.thread, parts.observer, parts.guard.run
        self._finder = RootFinder(parts, self, describe, any_model=not models, compiled=True)
        self._given = [root for model in models if (root := self._adopt(model)) is not None]
        for recorder in parts.recorders:
            recorder.devices.recognizes = False  # kernels write without counting versions
        self.graphs = Graphs(parts, self._follow_compiled, self._enter_compiled)
        self._function: Root | None = None  # the root, if it is a compiled function
        self._frame: FrameType | None = None  # of its last call
        self._contexts = contextlib.ExitStack()
        self._generated = False
        self._graphs_before = 0  # how many graphs ran before the root call

    def _adopt(self, model: nn.Module) -> Root | None:
        """Follow a given model; if `torch.compile` wraps it, calls of the wrapper count as well."""
        root = self._finder.adopt(model)
        if root is not None and root.module is pytorch.compiled_root(model) is not model:
            root.first.hooked = [root.module, model]
        return root

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._calls.start(self._follow)
        profile = self._parts.profile
        if profile is not None:
            self._contexts.enter_context(dynamo.compiling(profile.aside))
        for model in self._models:
            inner = pytorch.compiled_root(model)
            for module in [model] if inner is model else [model, inner]:
                self._contexts.enter_context(dynamo.compiled_with(module, self.graphs.backend))
        for root in self._given:
            root.first.attach()
        for engine in self._engines:
            engine.start(self._parts)
            self._contexts.callback(engine.stop)

    def stop(self) -> None:
        self._calls.stop()
        self._parts.roots.detach()
        self._contexts.close()
        self._frame = None

    def refusal(self) -> CaptureError | None:
        if self._models or self.graphs.ran:
            return None
        return EmptyDumpError(f"nothing was recorded: {_GENERATE if self._generated else _NOT_RUN}")

    def _follow(self, model: nn.Module) -> nn.Module | None:
        """Return the root that a `generate` of a model concerns, or None."""
        module = self._finder.follow(model)
        root = self._parts.roots.get(module) if module is not None else None
        if root is not None and not self._models and not self._generated:
            root.first.attach()
        self._generated = True
        return module

    # -- root calls -----------------------------------------------------------------------------

    def enter(self, entry: HookedModule, args: Args, kwargs: Kwargs) -> None:
        self._calls.enter(entry, args, kwargs)
        self._graphs_before = self.graphs.ran

    def leave(self, entry: HookedModule) -> None:
        thread = self.thread
        if thread.recording and len(thread.entries) == 1 and self.graphs.ran == self._graphs_before:
            self._parts.guard.problems[
                f"a call of {entry.op} ran uncompiled: only its inputs and outputs are recorded"
            ] += 1
        self._calls.leave(entry)

    # -- reports of graphs ------------------------------------------------------------------------

    def _follow_compiled(self, frame: Frame) -> None:
        """Follow what is being compiled, if no model was given: it becomes the root."""
        if any(self._parts.roots) or not self._parts.guard.active:
            return
        module, call = dynamo.outermost_call()
        if module is None or call is None:
            owners = (one for one in frame.modules() if next(one.parameters(), None) is not None)
            self._function = self._finder.adopt(next(owners, None) or _Function())
            return
        root = self._finder.adopt(module)
        if root is None:
            return
        root.first.hooked = [module]
        root.first.attach()
        args, kwargs = call.f_locals.get("args", ()), call.f_locals.get("kwargs", {})
        root.first.begin(tuple(args), dict(kwargs))
        self.thread.entries[-1:] = [(root.first, call)]
        self._parts.notes.append(_LATE)

    def _enter_compiled(self) -> None:
        """Begin a root call when a graph of a compiled function runs outside of all modules."""
        root, parts = self._function, self._parts
        if root is None:
            return
        _, frame = dynamo.outermost_call()
        if frame is self._frame and frame is not None:
            return
        self._frame = frame
        if self.thread.recording:
            parts.commit()
        kwargs = dict(frame.f_locals.get("kwargs", {})) if frame is not None else {}
        call = parts.steps.begin(root.module, "", True, (), kwargs)
        self.thread.begin(call, parts.filter.selects(call, root.module))


def compiled_session(
    options: DumpOptions,
    sink: Sink,
    describe: Describe,
    models: Sequence[object] = (),
    rank: int = 0,
    reference: Sink | None = None,
) -> Session:
    """Make the session that records what `torch.compile` compiles, by its ``backend``.

    ``models``: modules and engines; an engine's own settings of Inductor hold for its model.
    ``reference``: sink of a second dump, of the graph that kernels are made of, run node by node on
    the same inputs.

    Raises:
        CaptureError: a model can't be recorded, or there is no compiler for the CPU. OptionError:
        an option has no meaning. EmptyDumpError: the filters match none of the modules.
    """
    engines = runtimes.engines_in(models)
    modules = [model for model in models if isinstance(model, nn.Module)]
    modules += [engine.model for engine in engines]
    options = _with_settings(options, [engine.compiler_settings for engine in engines])
    parts = Parts.build(
        options, sink, rank, restricted=bool(models), operators=True, reference=reference
    )
    source = CompiledModules(parts, modules, describe, engines)
    session = Session(parts, source, backend=source.graphs.backend)
    if models:
        session.refuse_empty_selection()
    _check_compiler(options, modules)
    return session


def _with_settings(options: DumpOptions, engines: Sequence[Mapping[str, object]]) -> DumpOptions:
    """Add the settings of engines that Inductor knows; those that the user gives go before."""
    if options.graph == "fx" or not engines:
        return options
    known = set(inductor.settings())
    found = {name: value for each in engines for name, value in each.items() if name in known}
    return replace(options, compiler_config={**found, **(options.compiler_config or {})})


def _check_compiler(options: DumpOptions, models: Sequence[nn.Module]) -> None:
    """Refuse unknown settings of the compiler, and a machine that can't compile for the CPU."""
    if options.graph == "fx":
        return
    try:
        inductor.check_config(options.compiler_config or {})
    except KeyError as error:
        name = str(error.args[0])
        near = nearest(name, inductor.settings())
        raise OptionError(f"compiler_config: Inductor has no setting {name!r}{near}") from None
    parameters = (parameter for model in models for parameter in model.parameters())
    on_cpu = not torch.cuda.is_available() or any(one.is_cpu for one in parameters)
    why = inductor.no_compiler() if on_cpu else None
    if why is not None:
        raise CaptureError(
            f"Inductor has no C++ compiler to work with ({why}); install one, "
            "or record with graph='fx'"
        )
