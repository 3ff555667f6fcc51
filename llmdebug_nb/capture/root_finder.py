"""Finds the models to follow: those given, those that `generate` runs, and others that run."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from llmdebug_nb.capture import runtimes, unhookable
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.hooks.inspection import find_entries, find_fused
from llmdebug_nb.capture.hooks.modules import EntryListener, HookedModule, Root
from llmdebug_nb.capture.session_parts import Parts
from llmdebug_nb.capture.source_lines import forward_of
from llmdebug_nb.core import interrupts
from llmdebug_nb.core.errors import CaptureError
from llmdebug_nb.core.records import Node

# ``describe(model, prefix)``: the modules of a model, paths with that prefix
Describe = Callable[[nn.Module, str], list[Node]]


class RootFinder:
    """Turns models into roots whose calls a listener receives.

    ``any_model``: with no model given, every outermost module with parameters becomes a root.
    ``compiled``: the models are compiled while they are recorded. Hooks inside would be compiled
    with them, so only the root itself gets hooks, and only when the caller attaches them.
    """

    def __init__(
        self,
        parts: Parts,
        listener: EntryListener,
        describe: Describe,
        *,
        any_model: bool,
        compiled: bool = False,
        found: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        """``found``: is called with each model that nobody has given, before its first call."""
        self._parts, self._listener, self._describe = parts, listener, describe
        self._any_model, self._compiled = any_model, compiled
        self._looks_inside = compiled or parts.options.force_eager
        self._found = found
        self._stop_watching: Callable[[], None] = lambda: None

    def adopt(self, model: nn.Module) -> Root | None:
        """Follow a model. If it can't be followed, return None and report the reason.

        Raises CaptureError: a model that the user named can't be followed.
        """
        module = pytorch.unwrapped(model)
        if self._looks_inside:
            module = pytorch.compiled_root(module)
        known = self._parts.roots.get(module)
        if known is not None:
            return known
        # what an engine compiled is never traced again, whatever hooks there are
        is_safe = self._looks_inside or runtimes.engine_compiles(module)
        why = None if is_safe else unhookable.why_compiled(module)
        why = unhookable.why_script(module) or why
        if why is None:
            return self._add(module)
        if not self._any_model:
            raise CaptureError(why)
        self._parts.guard.problems[why] += 1
        return None

    def _add(self, module: nn.Module) -> Root:
        roots = self._parts.roots
        prefix = roots.next_prefix(type(module).__name__)
        nodes = self._describe(module, prefix)
        roots.add_nodes(nodes)
        self._add_code(module)
        root = Root(module, nodes[0].path, hooks_inside=not self._compiled)
        entries = [module] if self._compiled else find_entries(module)
        entry_ids, fused_ids = {id(entry) for entry in entries}, find_fused(module)
        for node, part in zip(nodes, module.modules(), strict=True):
            hooked = HookedModule(self._listener, root, part, node.path, _names(node, prefix))
            hooked.entry, hooked.fused = id(part) in entry_ids, id(part) in fused_ids
            root.modules.append(hooked)
        roots.add(root)
        self._parts.steps.add_root(module, nodes[0].root)
        for hooked in root.modules:
            if hooked.entry and not self._compiled:
                hooked.attach()
        return root

    def _add_code(self, module: nn.Module) -> None:
        """Keep each forward: its first line, as a stack of one frame, and its text."""
        if not self._parts.options.sources:
            return
        each = {vars(part).get("forward") or type(part): part for part in module.modules()}
        for forward in map(forward_of, each.values()):
            if forward is not None:
                for recorder in self._parts.recorders:
                    recorder.sources.stack_number([str(forward.first)], [forward.line], 1)
                    recorder.sources.keep_function(forward.code, forward.first.line)

    @interrupts.unbroken
    def follow(self, model: nn.Module) -> nn.Module | None:
        """Return the root that a `generate` of a model concerns, or None."""
        root = self._parts.roots.related(model)
        if root is None and self._any_model and self._parts.guard.active:
            root = self.adopt(model)
        return root.module if root is not None else None

    # -- without a given model --------------------------------------------------------------------

    def watch_all(self) -> Callable[[], None]:
        """Follow every outermost module that runs; return how to stop that."""
        return nn.modules.module.register_module_forward_pre_hook(self._before_any).remove

    def watch_inside(self) -> Callable[[], None]:
        """Until a root call runs, let it begin in any module of a root; return how to stop that.

        A wrapper's `generate` may call the model that it wraps, several levels down.
        """
        watch = nn.modules.module.register_module_forward_pre_hook(self._before_inside)
        self._stop_watching = watch.remove
        return watch.remove

    def _before_inside(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not pytorch.tracing() and not pytorch.in_backward():
            self._parts.guard.run(self._enter_inside, module, args)

    def _enter_inside(self, module: nn.Module, args: tuple[object, ...]) -> None:
        hooked = self._parts.roots.hooked(module)
        if hooked is None:
            return
        if hooked.entry or not self._parts.thread.outermost():
            self._stop_watching()
        elif next(module.children(), None) is not None:  # an embedding on its own is no model
            hooked.entry = True
            hooked.attach()
            hooked.begin(args, pytorch.hooked_kwargs())

    def _before_any(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not pytorch.tracing() and not pytorch.in_backward():
            self._parts.guard.run(self._follow_outermost, module, args)

    def _follow_outermost(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if (
            not self._parts.thread.outermost()
            or self._parts.roots.holds(module)
            or next(module.parameters(), None) is None
        ):
            return
        if self.adopt(module) is not None:
            root = self._parts.roots.get(module)
            if root is not None:
                self._found(root.module)
                # hooks added in a pre-hook only fire from the next call on
                root.first.begin(args, pytorch.hooked_kwargs())


def _names(node: Node, prefix: str) -> tuple[str, ...]:
    """Return the names that a filter may use: path and aliases, with and without prefix."""
    names = (node.path, *node.aliases)
    return (*names, *(name.removeprefix(prefix) for name in names)) if prefix else names
