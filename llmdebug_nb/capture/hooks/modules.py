"""Module level: hooks on the modules of a root, present only while a recorded step runs."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Protocol

import torch
from torch import nn

from llmdebug_nb.capture.calls import ThreadState
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.hooks.handles import Handle, Hook, SharedHook, hook
from llmdebug_nb.capture.observer import Observer

Args = tuple[object, ...]
Kwargs = dict[str, object]


class EntryListener(Protocol):
    """Receives the calls of a root's entry modules, and names the receiver of all module calls."""

    thread: ThreadState
    observer: Observer
    guarded: Guarded

    def enter(self, entry: HookedModule, args: Args, kwargs: Kwargs) -> None: ...
    def leave(self, entry: HookedModule) -> None: ...


class HookedModule:
    """One module that is followed.

    ``entry``: a call of it from outside the root's other modules begins a root call; its hooks stay
    for the whole session. ``selected``: the filters select it. ``counted``: its calls count for
    the ids of selected modules. ``fused``: part of a module that only takes its fast path while
    none of its parts has hooks. ``hooked``: the objects with the hooks: the module, and the wrapper
    that `torch.compile` made of it.
    """

    def __init__(
        self,
        listener: EntryListener,
        root: Root,
        module: nn.Module,
        path: str,
        names: tuple[str, ...],
    ) -> None:
        self._listener, self._thread, self._observer = listener, listener.thread, listener.observer
        self.root, self.module, self.path, self.names = root, module, path, names
        self.op = type(module).__name__
        self.hooked: list[nn.Module] = [module]
        self.selected = self.counted = self.entry = self.fused = False
        self._handles: list[Handle] = []
        self._looks = False  # its leaves are noted on the tape

    def attach(self) -> None:
        if self._handles and self._looks == self.selected:
            return
        self.detach()
        self._looks = self.selected
        guarded = self._listener.guarded
        before, after = Hook(guarded, self.begin), Hook(guarded, self._end)
        passing, player = self._observer.passing, self._observer.player
        if passing is not None and not self.entry:
            before = Hook(guarded, self.begin, partial(passing.open, self.path, self.op))
            after = Hook(guarded, self._end, partial(passing.close, self.path))
        elif player is not None and not self.entry:
            looks = self._observer.looks_at(self.selected)
            before = Hook(guarded, self.begin, partial(player.tape.begin, self, looks[0]))
            after = Hook(guarded, self._end, partial(player.tape.end, self, looks[1]))
        if self.fused:
            self._handles = [SharedHook(self.module, before, after)]
        else:
            self._handles = [
                handle for module in self.hooked for handle in hook(module, before, after)
            ]

    def detach(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def begin(self, args: Args, kwargs: Kwargs) -> None:
        """The module is called. Called by its hook, and for a call whose pre-hooks already ran."""
        if pytorch.in_backward():
            if self._observer.recomputes():
                self._begin(args, kwargs, recomputed=True)
            return
        if self.entry:
            self._listener.enter(self, args, kwargs)
            if self._thread.recording:
                # entering may have put our modes on this thread's stack, which are not to see this
                self._listener.guarded(self._begin, args, kwargs, False)
        elif self._thread.recording:
            self._begin(args, kwargs, recomputed=False)

    def _begin(self, args: Args, kwargs: Kwargs, recomputed: bool) -> None:
        self._observer.begin_module(self.path, self.module, self.selected, args, kwargs, recomputed)

    def _end(self, args: Args, kwargs: Kwargs, output: object) -> None:
        """The module has run, or (if the hook is always called) has raised."""
        backward = pytorch.in_backward()
        try:
            if self._thread.recording or backward:
                call = self._thread.leave(self.path)
                raised = output is None and sys.exc_info()[0] is not None
                if call is not None and not raised:
                    self._observer.end_module(call, output)
        finally:
            if self.entry and not backward:
                self._listener.leave(self)


class Root:
    """A root module and its hooked modules, itself first. ``path``: its path in the dump.

    ``hooks_inside``: modules inside the root may be hooked, not only its entry modules.
    """

    def __init__(self, module: nn.Module, path: str, hooks_inside: bool) -> None:
        self.module, self.path, self._hooks_inside = module, path, hooks_inside
        self.modules: list[HookedModule] = []
        self._recording: set[int] = set()  # threads that record it
        self._all: list[nn.Module] = [module]  # of which `weights` are, with their children
        self._children: list[nn.Module | None] = []
        self._lock = threading.RLock()

    @property
    def first(self) -> HookedModule:
        return self.modules[0]

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters of all modules that it has now, as they are now.

        `nn.Module.parameters` walks over the modules: ten times as long.
        """
        if self._children != pytorch.children_in(self._all):
            self._all = [*self.module.modules()]
            self._children = pytorch.children_in(self._all)
        return pytorch.parameters_in(self._all)

    def hook_inside(self, recording: bool, selection_may_change: bool = False) -> None:
        """Hook the modules that count while this or another thread records, otherwise none.

        A step that isn't recorded then costs nothing.
        """
        thread = threading.get_ident()
        if not self._hooks_inside or (
            (thread in self._recording) == recording and not selection_may_change
        ):
            return
        with self._lock:
            (self._recording.add if recording else self._recording.discard)(thread)
            for module in self.modules:
                if self._recording and module.counted:
                    module.attach()
                elif not module.entry:
                    module.detach()

    def detach(self) -> None:
        for module in self.modules:
            module.detach()
