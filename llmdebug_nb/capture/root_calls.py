"""Root calls of modules: numbers them, and lets their modules and operators be recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from llmdebug_nb.capture import generators
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compat.torch_modes import Mode
from llmdebug_nb.capture.hooks import autograd
from llmdebug_nb.capture.hooks.inspection import attributes_of, weights_of
from llmdebug_nb.capture.hooks.modules import Args, HookedModule, Kwargs, Root
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.determinism import GENERATOR


class RootCalls:
    """Follows the root calls of one recording, and the backward passes after them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.thread, self.observer = parts.thread, parts.observer
        self.guarded = parts.guard.run

    def start(self, follow: Callable[[nn.Module], nn.Module | None]) -> None:
        """Begin. ``follow(model)``: the root that a `generate` of a model concerns, or None."""
        self._parts.steps.start(follow)
        self.observer.start()
        ring = self._parts.ring
        if self.observer.backward or (ring is not None and ring.alarms.watches_losses):
            autograd.listeners.add(self)

    def stop(self) -> None:
        self._parts.steps.stop()
        autograd.listeners.remove(self)
        self.observer.stop()

    def enter(self, entry: HookedModule, args: Args, kwargs: Kwargs) -> None:
        """Enter an entry module: outermost, it begins a root call."""
        outermost = self.thread.outermost()
        self.thread.entries.append((entry, pytorch.module_call_frame()))
        if not outermost:
            return
        interrupts.rewatch()
        parts, root = self._parts, entry.root
        if parts.filter.changed():
            self.observer.names.use_ids(*parts.filter.calls)
            parts.roots.select()
        whole = entry.module is root.module
        call = parts.steps.begin(root.module, entry.path, whole, args, kwargs)
        recording = parts.filter.selects(call, root.module)
        count = self.observer.names.ids.part_ids(parts.roots.nodes)
        self.thread.begin(call, recording, root.path, count)
        root.hook_inside(recording, parts.filter.may_change)
        self.observer.begin_root_call(recording)
        if parts.profile is not None:
            parts.profile.root_begins(call.index, self.thread.step_key, recording)
        if recording:
            if parts.ring is not None:
                parts.ring.running[threading.get_ident()] = call.index
            self._record_weights(root)
            self.thread.generators = generators.states()

    def leave(self, entry: HookedModule) -> None:
        """Leave an entry module: the outermost one ends the root call."""
        entries, parts = self.thread.entries, self._parts
        while entries and entries.pop()[0] is not entry:
            pass
        if entries:
            return
        recorded = self.thread.recording
        if parts.profile is not None:
            parts.profile.ends_here()
        self.observer.end_root_call()
        moved = generators.moved(self.thread.generators, generators.states()) if recorded else []
        if moved:
            call = OpenCall(entry.path, entry.op, "module", entry.path, 0, self.thread.root_call)
            parts.recorder.record_texts(call, GENERATOR, moved)
        self.thread.end()
        if parts.ring is not None:
            parts.ring.running.pop(threading.get_ident(), None)
        if recorded:
            parts.commit()
        if self._is_over() and not (self.observer.backward and torch.is_grad_enabled()):
            self._rest()

    def _record_weights(self, root: Root) -> None:
        observer = self.observer
        if self._parts.options.operators:
            self._parts.recorder.add_weights(root.weights())
        weights = observer.weights
        first = id(root) not in weights.recorded
        if not first and not weights.change:
            return
        chosen = [(each.path, each.op, each.module) for each in root.modules if each.selected]
        for path, op, module in chosen:
            own = weights_of(module) if first or weights.watched else {}
            if first:
                weights.record(path, op, attributes_of(module), own)
            weights.watch(path, op, own)
        weights.recorded.add(id(root))
        weights.record_updates(chosen)

    # -- the end of the last step -----------------------------------------------------------------

    def _is_over(self) -> bool:
        """Return whether the last step that may be recorded is over."""
        last, steps = self._parts.filter.last, self._parts.steps
        return last is not None and self.thread.step >= last and not steps.manual

    def _rest(self) -> None:
        """Leave only the hooks that notice root calls, until the next generation."""
        self._parts.roots.hook_inside(False, self._parts.filter.may_change)
        self.observer.rest()

    # -- backward passes --------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, outputs: Sequence[object]) -> Iterator[None]:
        """A backward pass of this thread, of these tensors."""
        pushed: list[Mode] = []  # made here: an interrupt may come as the guarded work ends
        try:
            if self._parts.ring is not None and not pytorch.in_backward():
                self.guarded(self._parts.ring.alarms.add_losses, outputs)
            self.guarded(self._begin_backward, pushed)
            yield
        finally:
            self.guarded(self._end_backward, pushed)

    def _begin_backward(self, pushed: list[Mode]) -> None:
        profile = self._parts.profile
        if profile is not None and not pytorch.in_backward():
            profile.backward_begins()
        pushed += self.observer.begin_backward()

    def _end_backward(self, pushed: list[Mode]) -> None:
        profile = self._parts.profile
        if profile is not None and not pytorch.in_backward():
            profile.ends_here()
        self.observer.end_backward(pushed)
        if self._is_over() and not pytorch.in_backward():
            self._rest()
