"""A recording, from start to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import nn

from llmdebug_nb.capture import runtimes
from llmdebug_nb.capture.calls import Leaf, OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.generation import GenerateListener
from llmdebug_nb.capture.graph_sources import GraphSources
from llmdebug_nb.capture.root_calls import RootCalls
from llmdebug_nb.capture.root_finder import Describe, RootFinder
from llmdebug_nb.capture.runtime import Engine, GraphFacts
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import CaptureError, EmptyDumpError, OptionError
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node, RootCall

if TYPE_CHECKING:
    from llmdebug_nb.capture.empty_dump import EmptyDump
    from llmdebug_nb.capture.intervention import Intervention

# ``(call, root_call, outputs)``
OnCallEnd = Callable[[OpenCall, RootCall, list[Leaf]], None]
# compiles a traced program: a backend of `torch.compile`
Backend = Callable[..., Callable[..., object]]


class Progress(NamedTuple):
    """The progress of a recording. ``steps``: of all root calls so far. ``written``: bytes kept."""

    steps: list[int]
    records: int
    written: int
    paused: bool


class ModuleSource(Protocol):
    """A source of module calls. ``refusal()``: why it saw none, if it can tell."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def refusal(self) -> CaptureError | None: ...


class Session:
    """One recording: its parts, and the sources that calls come from.

    Several sessions may run at once; each one owns its hooks. All hooks are off after `stop`.
    ``graphs``: those of other runtimes that are followed, None if none are.
    ``backend``: None without a graph to compile.
    """

    def __init__(
        self,
        parts: Parts,
        modules: ModuleSource,
        backend: Backend | None = None,
    ) -> None:
        self._parts, self._modules = parts, modules
        self.graphs: GraphSources | None = None
        self.backend = backend

    @property
    def _graphs(self) -> list[GraphFacts]:
        return [] if self.graphs is None else self.graphs.graphs()

    # -- life -----------------------------------------------------------------------------------

    @interrupts.unbroken
    def start(self) -> None:
        interrupts.watch(self)  # until `abandon`
        self._parts.guard.active = True
        self._modules.start()
        if self.graphs is not None:
            self.graphs.start()

    @interrupts.unbroken
    def stop(self, ended_by: str | None = None) -> None:
        """Take every hook off and close the dump.

        ``ended_by``: name of the exception that ended the block.

        Raises:
            StoreError: the dump could not be completed; all that was committed is there.
        """
        self.abandon()
        parts = self._parts
        parts.commit()
        failures = [each.values.failure for each in parts.recorders if each.values.failure]
        settings, graphs = parts.settings(), self._graphs
        with ExitStack() as all_of:
            for recorder in reversed(parts.recorders):
                all_of.callback(recorder.sink.close, {
                    **parts.closing(recorder, ended_by),
                    "settings": settings,
                    "coarse": [what for each in graphs for what in each.coarse],
                    "rounding": max((each.rounding for each in graphs), default=0.0),
                    "value_rounding": max((each.value_rounding for each in graphs), default=0.0),
                    "products": {p: kind for each in graphs for p, kind in each.products.items()},
                })  # fmt: skip
        if failures:
            raise failures[0]

    @interrupts.unbroken
    def abandon(self) -> None:
        """Take every hook off and leave the dump alone: it may belong to the parent process."""
        self._parts.guard.active = False
        with ExitStack() as all_of:  # each one, whatever another one raises
            all_of.callback(interrupts.unwatch, self)
            all_of.callback(self._modules.stop)
            if self.graphs is not None:
                all_of.callback(self.graphs.stop)
            if self._parts.profile is not None:
                all_of.callback(self._parts.profile.ends_here)

    def pause(self, backward: bool = False) -> None:
        """Pause until `resume`; ``backward``: gradients of earlier calls are still recorded."""
        self._parts.observer.pause(backward)

    def resume(self) -> None:
        self._parts.observer.resume()

    # -- steps and values of the program ----------------------------------------------------------

    def step(self) -> int:
        """End the step, and return the number of the next. From then on, only `step` ends steps."""
        return self._parts.steps.advance()

    def alarm(self, reason: str) -> None:
        """Keep the steps of the option ``last`` for good. Raises CaptureError without that."""
        if self._parts.ring is None:
            raise CaptureError("an alarm keeps the last steps: record with last=8, for example")
        self._parts.ring.alarms.raise_by_hand(reason)

    def count_steps_by_hand(self) -> None:
        """Count steps by hand from now on, beginning with 0."""
        self._parts.steps.count_by_hand()

    def run_again(self, generation: int, step: int, substitution: Intervention | None) -> None:
        """Record what follows as this step. ``substitution``: tensors that are put in."""
        self._parts.steps.begin_at(generation, step)
        self._parts.observer.substitution = substitution

    def save(self, name: str, value: object, gradients: bool = True) -> None:
        """Record the tensors in a value as the output of ``save/name``, with their gradients.

        It also works during a pause.
        """
        parts, call = self._parts, self._parts.steps.current()
        if parts.filter.selects_step(call):
            record = parts.observer.record_saved
            parts.guard.run(record, f"save/{name}", value, call, gradients)

    def on_call_end(self, callback: OnCallEnd) -> None:
        """Call ``callback(call, root_call, outputs)`` when a recorded call ends."""
        calls = self._parts.steps.calls

        @interrupts.let_through
        def call_back(call: OpenCall, outputs: list[Leaf]) -> None:
            callback(call, calls[call.root_call], outputs)

        self._parts.observer.on_call_end = call_back

    # -- the result -------------------------------------------------------------------------------

    @property
    def generations(self) -> GenerateListener:
        """The listener of `generate`."""
        return self._parts.steps

    @property
    def nodes(self) -> list[Node]:
        """The modules of the roots that are followed by now."""
        return self._parts.roots.nodes

    def followed(self) -> list[tuple[str, nn.Module]]:
        """Return the root modules, each with its path in the dump."""
        return [(root.path, root.module) for root in self._parts.roots]

    def progress(self) -> Progress:
        parts, recorder = self._parts, self._parts.recorder
        steps = [call.step for call in parts.steps.calls]
        paused = parts.filter.paused or not parts.filter.enabled
        return Progress(steps, recorder.records, recorder.values.policy.written, paused)

    def refusal(self) -> CaptureError | None:
        """Return the error that explains an empty recording, or None if it isn't empty."""
        refusal = self._modules.refusal()
        if refusal is not None or self._parts.recorder.records:
            return refusal
        if self._parts.guard.problems:
            return CaptureError(next(iter(self._parts.guard.problems)))
        return EmptyDumpError(f"nothing was recorded: {self._empty_dump().reason()}")

    def refuse_empty_selection(self) -> None:
        """Raise EmptyDumpError if the filters select no module and can't change."""
        parts = self._parts
        if not parts.filter.may_change and not self._selects_any:
            from llmdebug_nb.capture.empty_dump import nothing_matches

            why = nothing_matches(parts.options, parts.roots.nodes)
            raise EmptyDumpError(f"nothing to record: {why}")

    @property
    def _selects_any(self) -> bool:
        return self._parts.roots.select_any or any(each.kept for each in self._graphs)

    def _empty_dump(self) -> EmptyDump:
        from llmdebug_nb.capture.empty_dump import EmptyDump

        parts = self._parts
        roots = [root.module for root in parts.roots]
        parameters = [next(root.parameters(), None) for root in roots]
        return EmptyDump(
            options=parts.options,
            roots=[type(root).__name__ for root in roots],
            sessions=[each.label for each in self._graphs],
            operators=sorted({name for each in self._graphs for name in each.operators}),
            devices=[str(first.device) for first in parameters if first is not None],
            steps=sorted({call.step for call in parts.steps.calls}),
            steps_came=any(map(parts.filter.selects_step, parts.steps.calls)),
            no_request=parts.filter.no_request,
            nodes=parts.roots.nodes,
            selected=self._selects_any,
            names=parts.observer.names.seen,
            ids=parts.observer.names.ids,
            enabled=parts.filter.enabled,
            rank=parts.filter.rank,
        )


class EagerModules:
    """The source of eager module calls: from the given models, or from every root that runs."""

    def __init__(
        self,
        parts: Parts,
        models: Sequence[nn.Module],
        describe: Describe,
        any_model: bool,
        engines: Sequence[Engine] = (),
    ) -> None:
        """``engines``: those that run some of the models.

        Raises CaptureError: a model can't be recorded.
        """
        self._parts, self._any_model, self._engines = parts, any_model, engines
        self._calls = RootCalls(parts)
        self._finder = RootFinder(
            parts, self._calls, describe, any_model=any_model, found=self._found
        )
        self._undo: list[Callable[[], None]] = []
        try:
            for model in models:
                self._finder.adopt(model)
        except BaseException:
            parts.roots.detach()
            raise

    def start(self) -> None:
        self._parts.observer.names.use_ids(*self._parts.filter.calls)
        if self._parts.options.force_eager:
            self._undo.append(pytorch.force_eager())
        for engine in self._engines:
            self._follow(engine)
        self._calls.start(self._finder.follow)
        watch = self._finder.watch_all if self._any_model else self._finder.watch_inside
        self._undo.append(watch())

    def _follow(self, engine: Engine) -> None:
        if self._parts.options.force_eager:
            self._undo.append(engine.run_eagerly())
        engine.start(self._parts)
        self._undo.append(engine.stop)

    def _found(self, model: nn.Module) -> None:
        """Follow the engine that calls a model which nobody has given, if one does."""
        engine = runtimes.engine_calling(model)
        if engine is not None:
            self._follow(engine)

    def stop(self) -> None:
        self._calls.stop()
        self._parts.roots.detach()
        while self._undo:
            self._undo.pop()()

    def refusal(self) -> None:
        return None


def eager_session(
    options: DumpOptions,
    sink: Sink,
    describe: Describe,
    models: Sequence[object] = (),
    rank: int = 0,
) -> Session:
    """Make the session that records the given models, or else every outermost module that runs.

    ``models``: modules, and models of `RUNTIMES`. ``describe(model, prefix)``: its topology.

    Raises:
        CaptureError: a model can't be recorded. OptionError: the control file can't be read, or
            requests are selected without an engine.
        EmptyDumpError: the filters match none of the modules.
    """
    modules = [model for model in models if isinstance(model, nn.Module)]
    engines = runtimes.engines_in(models)
    modules += [engine.model for engine in engines]
    batching = [each for each in runtimes.RUNTIMES if each.requests]
    is_asked = options.requests is not None and models
    if is_asked and not any(each.is_model(model) for each in batching for model in models):
        names = ", ".join(each.name for each in batching)
        raise OptionError(
            f"requests {options.requests} are of an engine ({names}), and none was given:"
            " leave requests out, or record the engine, as in dump(llm, requests=…)"
        )
    parts = Parts.build(
        options, sink, rank, restricted=bool(models), operators=not models or bool(modules)
    )
    source = EagerModules(parts, modules, describe, not models, engines)
    session = Session(parts, source)
    try:
        others = [model for model in models if not isinstance(model, nn.Module)]
        session.graphs = GraphSources(parts, others, only=bool(models))
        if models:
            session.refuse_empty_selection()
    except BaseException:
        session.abandon()
        raise
    return session
