"""A recording, from start to stop: roots, steps and hooks, and what became of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from llmdebug_nb.capture import generation, selection
from llmdebug_nb.capture.calls import OpenCall, ThreadState
from llmdebug_nb.capture.compat import pytorch, torch_modes
from llmdebug_nb.capture.compat.onnxruntime_api import is_session
from llmdebug_nb.capture.hooks import autograd
from llmdebug_nb.capture.hooks.modules import (
    Watch,
    attributes_of,
    find_entries,
    find_fused,
    weights_of,
)
from llmdebug_nb.capture.observer import Observer
from llmdebug_nb.capture.onnx.sessions import Sessions
from llmdebug_nb.capture.recorder import Recorder, Sink
from llmdebug_nb.capture.recording_filter import RecordingFilter
from llmdebug_nb.capture.steps import StepTracker
from llmdebug_nb.capture.timing.profiler import Profile
from llmdebug_nb.core.errors import CaptureError, EmptyDumpError
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node, RootCall


class Session:
    """Records some models (``models``), or whatever outermost modules run (none given), into a sink.

    Several sessions may run at once; each one owns its hooks. All hooks are off after `stop`.
    """

    def __init__(
        self,
        options: DumpOptions,
        sink: Sink,
        describe: Callable[[nn.Module, str], list[Node]],
        models: Sequence[Any] = (),
        rank: int = 0,
    ) -> None:
        """``describe(model, prefix)``: the rows of its topology. ``models``: modules, and sessions of ONNX Runtime.

        Raises:
            CaptureError: the model can't be recorded. EmptyDumpError: the filters match none of its modules.
            OptionError: the control file can't be read.
        """
        self.options = options
        self.recorder = Recorder(sink, options)
        self.active = False
        self.problems: Counter[str] = Counter()  # what went wrong in our own work -> how often
        self.notes: list[str] = []  # what else is to be known of the recording
        self.thread = ThreadState()
        self.profile = Profile.of(options, sink, self.notes)
        self.follows_calls = options.operators or options.logits or self.profile is not None
        self.observer = Observer(
            self, options, bool(models), not models or any(map(_is_module, models))
        )
        self._describe = describe
        self._models = tuple(filter(_is_module, models))
        self._any = not models  # whatever runs is recorded
        self._labelled = 0
        self._nodes: list[Node] = []
        self._watches: dict[int, list[Watch]] = {}  # id of root -> its modules
        self._owners: dict[int, Watch] = {}  # id of module -> its watch
        self._roots: dict[int, nn.Module] = {}
        self._recording: dict[int, set[int]] = {}  # id of root -> threads that need its hooks
        self._lock = threading.RLock()
        self._tracker = StepTracker(options.warmup, self._follow)
        self.demand = RecordingFilter(options, rank, self._tracker.round_of)
        self._finder: Any = None
        self._undo: list[Callable[[], None]] = []
        self.sessions: Any = None
        self._pid = os.getpid()
        try:
            for model in self._models:
                self._adopt(model)
            self.sessions = Sessions(
                self, [model for model in models if is_session(model)], bool(models)
            )
            if models:
                self._refuse_empty_selection()
        except BaseException:
            self._unhook()
            raise

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        self.active = True
        self.observer.select_ids(*self.demand.calls)
        if self.options.force_eager:
            self._undo.append(pytorch.force_eager())
        self._tracker.start()
        self.observer.start()
        if self.observer.backward:
            autograd.listeners.add(self)
        self.sessions.start()
        if self._any:
            self._finder = nn.modules.module.register_module_forward_pre_hook(self._find_root)

    def stop(self, ended_by: str | None = None) -> None:
        """Take every hook off and close the sink. ``ended_by``: name of the exception that ended the block.

        Raises:
            StoreError: the dump could not be completed; all that was committed is there.
        """
        self._unhook()
        self.notes += self.observer.ids.notes()
        if self.demand.trouble:
            self.problems[self.demand.trouble] += 1
        self.commit()
        failure = next(
            (recorder.failure for recorder in self.recorders if recorder.failure is not None), None
        )
        ended_by = ended_by or (str(failure) if failure else next(iter(self.problems), None))
        for recorder in self.recorders:
            meta = {
                "complete": ended_by is None,
                "ended_by": ended_by,
                "lost": dict(recorder.lost),
                "problems": dict(self.problems),
                "notes": self.notes,
                "recorded": recorder.records,
                "distinct": recorder.distinct,
                "unpaired": self.observer.unpaired,
            }
            recorder.sink.close(meta)
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Take every hook off, and leave what was written alone: it belongs to the process that this one was forked from."""
        self._unhook()

    @property
    def generations(self) -> generation.Listener:
        """What is callback of each `generate`."""
        return self._tracker

    @property
    def recorders(self) -> list[Recorder]:
        """What is written to: one dump, or several."""
        return [self.recorder]

    def commit(self) -> None:
        """A root call is over: make what was recorded of it part of the dump."""
        calls = self._tracker.take()
        for recorder in self.recorders:
            recorder.end_call(calls)

    def _unhook(self) -> None:
        self.active = False
        if self.profile is not None:
            self.profile.ends_here()
        self._tracker.stop()
        if self.sessions is not None:
            self.sessions.stop()
        autograd.listeners.remove(self)
        self.observer.stop()
        if self._finder is not None:
            self._finder.remove()
        for watches in self._watches.values():
            for watch in watches:
                watch.detach()
        while self._undo:
            self._undo.pop()()

    def pause(self, backward: bool = False) -> None:
        """Record nothing more until `resume`; with ``backward``, still the gradients of what was recorded."""
        self.demand.paused = True
        self.thread.after = False
        self.observer.paused = not backward

    def resume(self) -> None:
        self.demand.paused = self.observer.paused = False

    def on_call_end(
        self, callback: Callable[[OpenCall, RootCall, list[tuple[str, Any]]], None]
    ) -> None:
        """Tell of each recorded call when it has ended: the call, the root call that it is in, and what it gave, by slot."""
        self.observer.on_call_end = lambda call, output: callback(
            call, self._tracker.calls[call.root_call], output
        )

    @property
    def nodes(self) -> list[Node]:
        """The modules of the roots that are followed by now."""
        return self._nodes

    def step(self) -> int:
        """End the step by hand; from then on only this does. Return the number of the step that begins."""
        return self._tracker.advance()

    def stepping(self) -> None:
        """Count steps by hand from now on, beginning with 0."""
        self._tracker.by_hand()

    def save(self, name: str, value: Any, gradients: bool = True) -> None:
        """Record the tensors in ``value`` as the output of ``save/name``, and their gradients; also during a pause."""
        call = self._tracker.here()
        if self.demand.step(call):
            self.guarded(self.observer.record_saved, f"save/{name}", value, call, gradients)

    def followed(self) -> list[tuple[str, nn.Module]]:
        """Return the root modules that were recorded, each with the prefix of its paths."""
        return [(self._watches[number][0].path, root) for number, root in self._roots.items()]

    def progress(self) -> tuple[list[int], int, int, bool]:
        """Return the steps of all root calls so far, how many tensors were recorded and bytes kept, and whether it rests."""
        steps = [call.step for call in self._tracker.calls]
        return (
            steps,
            self.recorder.records,
            self.recorder.written,
            self.demand.paused or not self.demand.enabled,
        )

    def refusal(self) -> CaptureError | None:
        """Return the error that explains an empty recording, or None where something was recorded."""
        if self.recorder.records:
            return None
        if self.problems:
            return CaptureError(next(iter(self.problems)))
        why = selection.why_empty(
            self.options,
            roots=[type(root).__name__ for root in self._roots.values()],
            sessions=self.sessions.labels,
            steps=sorted({call.step for call in self._tracker.calls}),
            steps_came=any(map(self.demand.step, self._tracker.calls)),
            nodes=self._nodes,
            kept=self._keeps_any,
            names=self.observer.seen,
            ids=self.observer.ids,
            operators=self.sessions.operators,
            enabled=self.demand.enabled,
            devices=[
                str(p.device)
                for root in self._roots.values()
                for p in [next(root.parameters(), None)]
                if p is not None
            ],
            rank=self.demand.rank,
        )
        return EmptyDumpError(f"nothing was recorded: {why}")

    # -- roots --------------------------------------------------------------------------------

    def _adopt(self, root: nn.Module) -> bool:
        """Follow a root module. False where it can't be, with the reason noted."""
        root = pytorch.unwrapped(root)
        root = pytorch.compiled_root(root) if self._sees_compiled else root
        if id(root) in self._roots:
            return True
        why = None if self._sees_compiled else selection.why_compiled(root)
        if isinstance(root, torch.jit.ScriptModule):
            name = type(root).__name__
            why = f"{name} is a TorchScript module, which takes no hooks; record the module it was made from"
        if why is not None:
            if not self._any:
                raise CaptureError(why)
            self.problems[why] += 1
            return False
        prefix = self.place(type(root).__name__)
        self._watch(root, self._add_nodes(self._describe(root, prefix)), prefix)
        return True

    def place(self, label: str) -> str:
        """Return what the paths of the next root begin with: nothing for the first one."""
        number, self._labelled = self._labelled, self._labelled + 1
        return f"{label}~{number}." if number else ""

    def _add_nodes(self, nodes: list[Node]) -> list[Node]:
        """Add the modules of a root to the topology."""
        start = len(self._nodes)
        nodes = [
            Node(
                n.path,
                n.name,
                n.type,
                n.parent + start if n.parent >= 0 else -1,
                n.params,
                n.aliases,
                n.root,
            )
            for n in nodes
        ]
        for recorder in self.recorders:
            recorder.sink.nodes(nodes, start)
        self._nodes += nodes
        return nodes

    def _watch(self, root: nn.Module, nodes: list[Node], prefix: str, attach: bool = True) -> None:
        modules = list(root.modules())
        entries, fused = {id(module) for module in self._entries(root)}, find_fused(root)
        watches = []
        for node, module in zip(nodes, modules, strict=True):
            watch = Watch(self, root, module, node.path, _names(node, prefix))
            watch.entry, watch.fused = id(module) in entries, id(module) in fused
            self._owners.setdefault(id(module), watch)
            watches.append(watch)
        self._roots[id(root)] = root
        self._watches[id(root)] = watches
        self._select(watches)
        self._tracker.add_root(root, nodes[0].root)
        for watch in watches:
            if watch.entry and attach:
                watch.attach()

    def _entries(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules whose outermost call begins a root call."""
        return find_entries(root)

    @property
    def _sees_compiled(self) -> bool:
        """What is compiled can be recorded all the same."""
        return self.options.force_eager

    def _select(self, watches: Sequence[Watch]) -> None:
        asked = self.demand.modules([watch.path for watch in watches], self._nodes)
        for watch, is_asked in zip(watches, asked, strict=True):
            watch.kept = is_asked and selection.keeps(self.options, watch.names, type(watch.module))
        for watch, counted in zip(watches, self._counted(watches), strict=True):
            watch.counted = counted

    def _counted(self, watches: Sequence[Watch]) -> Iterable[bool]:
        """Tell of each module whether its calls count, as it is recorded or ids are numbered by it."""
        alone = [selection.is_called_nowhere(watch.module) for watch in watches]
        shared = any(node.aliases for node in self._nodes)  # may be called inside any other
        if self.follows_calls or shared or self.demand.calls[0]:
            return [True] * len(watches)
        return selection.counted(
            [watch.path for watch in watches], [watch.kept for watch in watches], alone
        )

    def _refuse_empty_selection(self) -> None:
        if not self.demand.may_change and not self._keeps_any:
            raise EmptyDumpError(
                f"nothing to record: {selection.nothing_matches(self.options, self._nodes)}"
            )

    @property
    def _keeps_any(self) -> bool:
        """Tell whether the filters ask for any module of what is followed."""
        hooked = any(watch.kept for watches in self._watches.values() for watch in watches)
        return hooked or (self.sessions is not None and self.sessions.keeps_any)

    def _follow(self, model: nn.Module) -> nn.Module | None:
        """Return the root that a `generate` of ``model`` concerns: itself, one inside it, or one that it is part of."""
        if id(model) in self._roots:
            return model
        inside = {id(module) for module in model.modules()}
        for number, root in self._roots.items():
            if number in inside or any(module is model for module in root.modules()):
                return root
        if self._any and self.active and self._adopt(model):
            return model
        return None

    def _find_root(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Global pre-hook: an outermost module with parameters that is not yet followed is a new root."""
        if not pytorch.tracing() and not pytorch.in_backward():
            self.guarded(self._follow_outermost, module, args)

    def _follow_outermost(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (
            not self.thread.outermost()
            or id(module) in self._owners
            or next(module.parameters(), None) is None
        ):
            return
        if self._adopt(module) and id(module) in self._watches:
            self._watches[id(module)][0].begin_late(args, pytorch.hooked_kwargs())

    # -- root calls ---------------------------------------------------------------------------

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An entry module is called: outermost, it begins a root call."""
        outermost = self.thread.outermost()
        self.thread.inside.append((watch, pytorch.module_call_frame()))
        if not outermost:
            return
        if self.demand.changed():
            self.observer.select_ids(*self.demand.calls)
            for watches in self._watches.values():
                self._select(watches)
        call = self._tracker.begin(watch.root, watch.path, watch.module is watch.root, args, kwargs)
        on = self.demand.root_call(call, watch.root)
        self.thread.begin(call, on, self._watches[id(watch.root)][0].path)
        self._hook(watch.root, on)
        self.observer.root_begins(on)
        if self.profile is not None:
            self.profile.root_begins(call.index, self.thread.within, on)
        if on:
            self._observe_parameters(watch.root)

    def leave(self, watch: Watch) -> None:
        """An entry module's call is over: the outermost one's ends the root call."""
        inside = self.thread.inside
        while inside and inside.pop()[0] is not watch:
            pass
        if inside:
            return
        was_on = self.thread.on
        if self.profile is not None:
            self.profile.ends_here()
        self.observer.root_ends()
        self.thread.end()
        if was_on:
            self.commit()
        if self._over() and not (self.observer.backward and torch.is_grad_enabled()):
            self._rest()

    # -- sessions of ONNX Runtime ---------------------------------------------------------------

    def adds(self, session: Any, nodes: list[Node]) -> None:
        """A session is followed: its modules are part of the topology."""
        self._add_nodes(nodes)
        self._tracker.add_root(session, nodes[0].root)

    def asks_for(self, path: str) -> bool:
        """Tell whether the control file asks for a module."""
        return self.demand.modules([path], self._nodes)[0]

    def begin_run(self, session: Any, root: str, given: dict[str, Any]) -> tuple[RootCall, bool]:
        """Number a run of a session that begins, and tell whether it is recorded. ``root``: its path. ``given``: its inputs by name, and what is known of its cache."""
        if self.demand.changed():
            self.sessions.select_all()
        if given.get("use_cache") and given.get("past_key_values") is None:
            self._tracker.ends_series(session)  # with an empty cache, another text begins
        call = self._tracker.begin(session, "", True, (), given)
        on = self.demand.root_call(call)
        self.thread.begin(call, on, root)
        return call, on

    def end_run(self, on: bool) -> None:
        """A run of a session is over."""
        self.thread.end()
        self.thread.after = False
        if on:
            self.commit()

    # -- when a step is over ----------------------------------------------------------------------

    def _over(self) -> bool:
        """Tell whether the last step that was asked for is over."""
        last = self.demand.last
        return last is not None and self.thread.step >= last and not self._tracker.manual

    def _rest(self) -> None:
        """Go out of the way until the next generation: what is left are the hooks that notice its root calls."""
        for root in self._roots.values():
            self._hook(root, False)
        self.observer.rest()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass of this thread."""
        pushed = self.guarded(self._backward_begins) or []
        try:
            yield
        finally:
            self.guarded(self._backward_ends, pushed)
            if self.active and self._over() and not pytorch.in_backward():
                self._rest()

    def _backward_begins(self) -> list[Any]:
        if self.profile is not None and not pytorch.in_backward():
            self.profile.backward_begins()
        return self.observer.backward_begins()

    def _backward_ends(self, pushed: list[Any]) -> None:
        if self.profile is not None and not pytorch.in_backward():
            self.profile.ends_here()
        self.observer.backward_ends(pushed)

    def _hook(self, root: nn.Module, on: bool) -> None:
        """Hook the modules that are recorded or counted, or none: a step that wasn't asked for costs nothing."""
        threads = self._recording.setdefault(id(root), set())
        if (threading.get_ident() in threads) == on and not self.demand.may_change:
            return
        with self._lock:
            (threads.add if on else threads.discard)(threading.get_ident())
            for watch in self._watches[id(root)]:
                if threads and watch.counted:
                    watch.attach()
                elif not watch.entry:
                    watch.detach()

    def _observe_parameters(self, root: nn.Module) -> None:
        if self.options.operators:
            self.recorder.add_weights(root.parameters())
        for watch in self._watches[id(root)]:
            if watch.kept:
                weights = weights_of(watch.module)
                if not self.observer.weighed:
                    self.observer.record_module(
                        watch.path, watch.op, attributes_of(watch.module), weights
                    )
                self.observer.watch_parameters(watch.path, watch.op, weights)
        self.observer.weighed = True

    # -- what hooks and modes tell ------------------------------------------------------------

    def listening(self) -> bool:
        return self.active and self.observer.listening()

    def recomputes(self) -> bool:
        """Tell whether a module that is called in a backward pass is a checkpoint's recomputation of interest."""
        return self.observer.backward and torch.is_grad_enabled()

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do our own work without ever disturbing the program: an error of ours is noted, not raised, and no time of it is the program's."""
        return (
            self._guarded(work, *args)
            if self.profile is None
            else self.profile.ours(self._guarded, work, *args)
        )

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        if not self.active or os.getpid() != self._pid:
            return None
        try:
            if torch_modes.watched():
                with torch_modes.unseen():
                    return work(*args)
            return work(*args)
        except Exception as error:  # the program must go on as if nobody watched; the dump says it
            self.problems[
                f"{type(error).__name__} while recording: {str(error).partition(chr(10))[0]}"
            ] += 1
            return None


def _is_module(model: Any) -> bool:
    return isinstance(model, nn.Module)


def _names(node: Node, prefix: str) -> tuple[str, ...]:
    """Return the names that a filter may mean: path and aliases, for a second root also without its prefix."""
    names = (node.path, *node.aliases)
    return (*names, *(name.removeprefix(prefix) for name in names)) if prefix else names
