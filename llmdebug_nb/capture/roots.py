"""The root modules that a recording follows, and the topology of the dump."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from llmdebug_nb.capture import selection
from llmdebug_nb.capture.hooks.modules import HookedModule, Root
from llmdebug_nb.capture.recording_filter import RecordingFilter
from llmdebug_nb.capture.sink import Sink
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node


class Roots:
    """The roots of one recording. ``nodes``: the modules of all of them, as the dump lists them."""

    def __init__(
        self,
        options: DumpOptions,
        recording_filter: RecordingFilter,
        sinks: Sequence[Sink],
        counts_all: bool,
    ) -> None:
        """``counts_all``: calls of all modules are needed, recorded or not."""
        self.nodes: list[Node] = []
        self._options, self._filter, self._sinks = options, recording_filter, sinks
        self._counts_all = counts_all or options.operators or options.logits
        self._roots: dict[int, Root] = {}  # by id of the module
        self._modules: dict[int, HookedModule] = {}  # by id of the module
        self._labelled = 0

    def __iter__(self) -> Iterator[Root]:
        return iter(self._roots.values())

    def get(self, module: nn.Module) -> Root | None:
        """Return the root that a module is, or None."""
        return self._roots.get(id(module))

    def holds(self, module: nn.Module) -> bool:
        """Return whether a module is part of a root."""
        return id(module) in self._modules

    def hooked(self, module: nn.Module) -> HookedModule | None:
        """Return what follows a module of a root, or None for any other module."""
        return self._modules.get(id(module))

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module of a root, or None for any other module."""
        hooked = self._modules.get(id(module))
        return hooked.path if hooked is not None else None

    def related(self, model: nn.Module) -> Root | None:
        """Return the root that a model is, that it holds, or that holds it."""
        if id(model) in self._roots:
            return self._roots[id(model)]
        inside = {id(module) for module in model.modules()}
        for number, root in self._roots.items():
            if number in inside or any(module is model for module in root.module.modules()):
                return root
        return None

    def next_prefix(self, label: str) -> str:
        """Return the prefix of all paths of the next root: none for the first one."""
        number, self._labelled = self._labelled, self._labelled + 1
        return f"{label}~{number}." if number else ""

    def add_nodes(self, nodes: list[Node]) -> None:
        """Add the modules of a root to the topology."""
        start = len(self.nodes)
        nodes = [
            replace(node, parent=node.parent + start) if node.parent >= 0 else node
            for node in nodes
        ]
        for sink in self._sinks:
            sink.nodes(nodes, start)
        self.nodes += nodes

    def add(self, root: Root) -> None:
        self._roots[id(root.module)] = root
        for hooked in root.modules:
            self._modules.setdefault(id(hooked.module), hooked)
        self._select(root)

    def select(self) -> None:
        """Decide again which modules are recorded, after the control file has changed."""
        for root in self:
            self._select(root)

    def _select(self, root: Root) -> None:
        paths = [hooked.path for hooked in root.modules]
        by_control = self._filter.selected_modules(paths, self.nodes)
        for hooked, is_selected in zip(root.modules, by_control, strict=True):
            hooked.selected = is_selected and selection.selects(
                self._options, hooked.names, type(hooked.module)
            )
        if self._counts_every_module():
            counted = [True] * len(paths)
        else:
            selected = [hooked.selected for hooked in root.modules]
            containers = [selection.is_container(hooked.module) for hooked in root.modules]
            counted = selection.counted(paths, selected, containers)
        for hooked, is_counted in zip(root.modules, counted, strict=True):
            hooked.counted = is_counted

    def _counts_every_module(self) -> bool:
        shared = any(node.aliases for node in self.nodes)  # may be called inside any other module
        return self._counts_all or shared or bool(self._filter.calls[0])

    @property
    def select_any(self) -> bool:
        """Whether any module of a root is selected."""
        return any(hooked.selected for root in self for hooked in root.modules)

    def selects_inside(self, path: str) -> bool:
        """Return whether the filters select a module or one around it."""
        if not (self._options.layers or self._options.types):
            return True
        return any(
            hooked.selected
            and (hooked.path == path or not hooked.path or path.startswith(f"{hooked.path}."))
            for root in self
            for hooked in root.modules
        )

    def hook_inside(self, recording: bool, selection_may_change: bool) -> None:
        for root in self:
            root.hook_inside(recording, selection_may_change)

    def detach(self) -> None:
        for root in self:
            root.detach()
