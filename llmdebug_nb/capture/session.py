"""A recording, from start to stop: roots, steps and hooks, and what became of it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llmdebug_nb.capture import compat, selection
from llmdebug_nb.capture.modules import Watch, find_entries
from llmdebug_nb.capture.recorder import Recorder, Sink
from llmdebug_nb.capture.steps import StepTracker
from llmdebug_nb.errors import CaptureError, EmptyDumpError
from llmdebug_nb.options import DumpOptions
from llmdebug_nb.records import Node, RootCall


class _Thread(threading.local):
    """Where one thread stands.

    ``inside``: the entry modules it is in, outermost first, each with the frame of its call.
    ``on``: it runs a root call of a step that was asked for; ``root_call`` is that call's number.
    """

    def __init__(self) -> None:
        self.inside: list[tuple[Watch, Any]] = []
        self.on = False
        self.root_call = 0
        self.step = 0
        self._within: Any = None  # root, generation and step: what call numbers count within
        self._next: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []

    def outermost(self) -> bool:
        """Tell whether no root call is running. An interrupt may have left one without an end."""
        while self.inside and not compat.is_running(self.inside[-1][1]):
            self.inside.pop()
        return not self.inside

    def begin(self, call: RootCall, on: bool) -> None:
        self.on, self.root_call, self.step = on, call.index, call.step
        within = (call.root, call.generation, call.step)
        if within != self._within:
            self._within = within
            self._next.clear()
        self._open.clear()

    def number(self, path: str) -> int:
        """Count a call of ``path`` that begins."""
        number = self._next.get(path, 0)
        self._next[path] = number + 1
        self._open.append((path, number))
        return number

    def finish(self, path: str) -> int | None:
        """Return the number of the call of ``path`` that ends; calls left open inside it had raised."""
        while self._open:
            name, number = self._open.pop()
            if name == path:
                return number
        return None


class Session:
    """Records one model (``model``), or whatever outermost modules run (None), into a sink.

    Several sessions may run at once; each one owns its hooks. All hooks are off after `stop`.
    """

    def __init__(
        self,
        options: DumpOptions,
        sink: Sink,
        describe: Callable[[nn.Module, str], list[Node]],
        model: nn.Module | None = None,
    ) -> None:
        """``describe(model, prefix)``: the rows of its topology.

        Raises:
            CaptureError: the model can't be recorded. EmptyDumpError: the filters match none of its modules.
        """
        self.options = options
        self.roles = options.roles
        self.recorder = Recorder(sink, options.stats_only)
        self.active = False
        self.problems: Counter[str] = Counter()  # what went wrong in our own work -> how often
        self.thread = _Thread()
        self._describe = describe
        self._model = model
        self._nodes: list[Node] = []
        self._watches: dict[int, list[Watch]] = {}  # id of root -> its modules
        self._roots: dict[int, nn.Module] = {}
        self._recording: dict[int, set[int]] = {}  # id of root -> threads that need its hooks
        self._lock = threading.RLock()
        self._tracker = StepTracker(options.warmup, self._follow)
        self._finder: Any = None
        self._pid = os.getpid()
        if model is not None:
            self._adopt(model)
            self._refuse_empty_selection()

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        self.active = True
        self._tracker.start()
        if self._model is None:
            self._finder = nn.modules.module.register_module_forward_pre_hook(self._find_root)

    def stop(self, ended_by: str | None = None) -> None:
        """Take every hook off and close the sink. ``ended_by``: name of the exception that ended the block.

        Raises:
            StoreError: the dump could not be completed; all that was committed is there.
        """
        self.active = False
        self._tracker.stop()
        if self._finder is not None:
            self._finder.remove()
        for watches in self._watches.values():
            for watch in watches:
                watch.detach()
        recorder = self.recorder
        recorder.end_call(self._tracker.take())
        ended_by = ended_by or (str(recorder.failure) if recorder.failure else next(iter(self.problems), None))
        meta = {
            "complete": ended_by is None,
            "ended_by": ended_by,
            "lost": dict(recorder.lost),
            "problems": dict(self.problems),
            "recorded": recorder.records,
            "distinct": recorder.distinct,
        }
        recorder.sink.close(meta)
        if recorder.failure is not None:
            raise recorder.failure

    def refusal(self) -> CaptureError | None:
        """Return the error that explains an empty recording, or None where something was recorded."""
        if self.recorder.records:
            return None
        if self.problems:
            return CaptureError(next(iter(self.problems)))
        if not self._roots:
            return EmptyDumpError("nothing was recorded: no module was called in this block; run a model in it")
        if not self._tracker.calls:
            name = type(next(iter(self._roots.values()))).__name__
            return EmptyDumpError(
                f"nothing was recorded: neither {name} nor a part of it was called in this block (a method such as"
                " model.forward(...) goes past hooks: call model(...))"
            )
        if not any(watch.kept for watches in self._watches.values() for watch in watches):
            return EmptyDumpError(f"nothing was recorded: {selection.nothing_matches(self.options, self._nodes)}")
        steps = sorted({call.step for call in self._tracker.calls})
        seen = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        if not any(step in self.options.tokens for step in steps):
            return EmptyDumpError(f"nothing was recorded: tokens {self.options.tokens} never came; steps seen: {seen}")
        return EmptyDumpError(
            "nothing was recorded: the modules that were asked for did not run in the steps that were"
        )

    # -- roots --------------------------------------------------------------------------------

    def _adopt(self, root: nn.Module) -> bool:
        """Follow a root module. False where it can't be, with the reason noted."""
        if id(root) in self._roots:
            return True
        compiled = next((name for name, module in root.named_modules() if compat.is_compiled(module)), None)
        if compiled is not None:
            where = f"its module {compiled!r}" if compiled else type(root).__name__
            message = (
                f"{where} is compiled by torch.compile, where hooks would be traced or never fire; record the original"
                " module (model._orig_mod, or the one you passed to torch.compile)"
            )
            return self._refuse(message)
        if isinstance(root, torch.jit.ScriptModule):
            message = f"{type(root).__name__} is a TorchScript module, which takes no hooks; record the module it was made from"
            return self._refuse(message)
        number = len(self._roots)
        prefix = f"{type(root).__name__}~{number}." if number else ""
        nodes = self._describe(root, prefix)
        start = len(self._nodes)
        nodes = [
            Node(n.path, n.name, n.type, n.parent + start if n.parent >= 0 else -1, n.params, n.aliases, n.root)
            for n in nodes
        ]
        self.recorder.sink.nodes(nodes, start)
        self._nodes += nodes
        modules = dict(root.named_modules())
        watches = [
            Watch(self, root, module, node.path, selection.keeps(self.options, _names(node, prefix), type(module)))
            for node, module in zip(nodes, modules.values(), strict=True)
        ]
        self._roots[id(root)] = root
        self._watches[id(root)] = watches
        self._tracker.add_root(root, nodes[0].root)
        entries = {id(module) for module in find_entries(root)}
        for watch in watches:
            watch.entry = id(watch.module) in entries
            if watch.entry:
                watch.attach()
        return True

    def _refuse(self, message: str) -> bool:
        if self._model is not None:
            raise CaptureError(message)
        self.problems[message] += 1
        return False

    def _refuse_empty_selection(self) -> None:
        if not any(watch.kept for watches in self._watches.values() for watch in watches):
            for watch in next(iter(self._watches.values())):
                watch.detach()
            raise EmptyDumpError(f"nothing to record: {selection.nothing_matches(self.options, self._nodes)}")

    def _follow(self, model: nn.Module) -> nn.Module | None:
        """Return the root that a `generate` of ``model`` concerns: itself, one inside it, or one that it is part of."""
        if id(model) in self._roots:
            return model
        inside = {id(module) for module in model.modules()}
        for number, root in self._roots.items():
            if number in inside or any(module is model for module in root.modules()):
                return root
        if self._model is None and self.active and self._adopt(model):
            return model
        return None

    def _find_root(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Global pre-hook: an outermost module with parameters that is not yet followed is a new root."""
        if not compat.tracing():
            self.guarded(self._follow_outermost, module, args)

    def _follow_outermost(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.thread.outermost() or self._belongs(module) or next(module.parameters(), None) is None:
            return
        if self._adopt(module):
            # hooks added while the call's pre-hooks run only fire from the next call on
            self._watches[id(module)][0].before(module, args, compat.hooked_kwargs())

    def _belongs(self, module: nn.Module) -> bool:
        return any(watch.module is module for watches in self._watches.values() for watch in watches)

    # -- root calls ---------------------------------------------------------------------------

    def enter(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An entry module is called: outermost, it begins a root call."""
        outermost = self.thread.outermost()
        self.thread.inside.append((watch, compat.call_frame()))
        if outermost:
            call = self._tracker.begin(watch.root, watch.path, watch.module is watch.root, args, kwargs)
            self.thread.begin(call, call.step in self.options.tokens)
            self._hook(watch.root, self.thread.on)

    def leave(self, watch: Watch) -> None:
        """An entry module's call is over: the outermost one's ends the root call."""
        inside = self.thread.inside
        while inside and inside.pop()[0] is not watch:
            pass
        if inside or not self.thread.on:
            return
        self.thread.on = False
        self.recorder.end_call(self._tracker.take())
        last = self.options.tokens.last
        if last is not None and self.thread.step >= last:
            self._hook(watch.root, False)

    def _hook(self, root: nn.Module, on: bool) -> None:
        """Hook the modules asked for, or none: a step that wasn't asked for costs nothing."""
        threads = self._recording.setdefault(id(root), set())
        if (threading.get_ident() in threads) == on:
            return
        with self._lock:
            before = bool(threads)
            (threads.add if on else threads.discard)(threading.get_ident())
            if bool(threads) == before:
                return
            for watch in self._watches[id(root)]:
                if not on and not watch.entry:
                    watch.detach()
                elif on and watch.kept:
                    watch.attach()

    def guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Do our own work without ever disturbing the program: an error of ours is noted, not raised."""
        if not self.active or compat.in_backward() or os.getpid() != self._pid:
            return
        try:
            with compat.unseen():
                work(*args)
        except Exception as error:  # the program must go on as if nobody watched; the dump says it
            self.problems[f"{type(error).__name__} while recording: {str(error).partition(chr(10))[0]}"] += 1


def _names(node: Node, prefix: str) -> tuple[str, ...]:
    """Return the names that a filter may mean: path and aliases, for a second root also without its prefix."""
    names = (node.path, *node.aliases)
    return (*names, *(name.removeprefix(prefix) for name in names)) if prefix else names
