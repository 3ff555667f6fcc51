"""The modules of a run, with what the topology and the records say of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.align import quantised
from llmdebug_nb.align.sequence import CallFeatures
from llmdebug_nb.core.paths import ancestors, is_operator, module_of
from llmdebug_nb.core.records import Node, Record, Summary

Kind = Callable[[str], str]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class ModuleFacts:
    """A module as the topology and the records describe it.

    ``params``: sorted shapes of its own parameters, without scales. ``place``: index of its first
    record. ``leaves``: the innermost modules inside it.
    """

    path: str
    type: str = ""
    params: Shapes = ()
    place: float = math.inf
    output: Summary | None = None
    weight: Summary | None = None
    children: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many elements its own parameters have."""
        return sum(map(math.prod, self.params))

    @property
    def name(self) -> str:
        """The name in the parent, "" if it is a number."""
        name = self.path.rpartition(".")[2]
        return "" if name.isdigit() else name


class ModuleTree:
    """The modules of a run, by path."""

    def __init__(self, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        self.modules: dict[str, ModuleFacts] = {}
        self._watchers: set[str] = set()  # inside a module that is a leaf though it holds some
        for node in nodes:
            module = self._module(node.path)
            module.type = node.type
            module.params = _sorted_shapes(quantised.without_scales(node.params))
        self._read(records)
        self._make_whole()
        self.leaves = [
            path
            for path, module in self.modules.items()
            if not module.children and path not in self._watchers
        ]
        ran = sum(self.modules[leaf].place < math.inf for leaf in self.leaves)
        if ran * 2 > len(self.leaves):  # the order of calls is more telling
            self.leaves.sort(key=self._place)
        for leaf in self.leaves:
            for path in (leaf, *ancestors(leaf)):
                if path in self.modules:
                    self.modules[path].leaves.append(leaf)

    def _make_whole(self) -> None:
        """Make a leaf of each module that has parameters while the modules inside it have none.

        Programs hang modules that only watch values into those that compute.
        """
        inside: set[str] = set()
        holding = {
            above for path, m in self.modules.items() if m.params for above in ancestors(path)
        }
        for path, module in self.modules.items():
            if module.children and module.params and path not in holding:
                inside.add(path)
                module.children = []
        self._watchers = {path for path in self.modules if not inside.isdisjoint(ancestors(path))}

    def _read(self, records: Iterable[Record]) -> None:
        """Add what the records say of the modules."""
        seen = 0
        known = set()
        for record in records:
            s = record.site
            seen += s.role != "weight"
            kind = s.path, s.role, s.phase, record.op
            if kind in known:  # only the first one of a kind says anything
                continue
            known.add(kind)
            module = self._module(module_of(s.path))
            if s.role == "weight":
                module.weight = module.weight or record.summary
                continue
            if not is_operator(s.path):
                module.type = module.type or record.op
                module.place = min(module.place, seen)
                if s.role == "output" and s.phase == "forward":
                    module.output = module.output or record.summary

    def _module(self, path: str) -> ModuleFacts:
        """Return a module, made with its parents if it is new."""
        module = self.modules.get(path)
        if module is None:
            module = self.modules[path] = ModuleFacts(path)
            if path:
                self._module(path.rpartition(".")[0]).children.append(path)
        return module

    def holding(self, path: str) -> list[str]:
        """Return the children of a module that have parameters in them, as they ran."""
        children = self.modules[path].children if path in self.modules else []
        kept = [
            x for x in children if any(self.modules[leaf].params for leaf in self.modules[x].leaves)
        ]
        return sorted(kept, key=lambda x: self.modules[x].place)

    def size(self, path: str) -> int:
        """Return how many elements the parameters in a module have."""
        return sum(self.modules[leaf].size for leaf in self.modules[path].leaves)

    def _place(self, leaf: str) -> float:
        """Return when a leaf ran, or the module around it that uses its weights."""
        around = (self.modules.get(path) for path in (leaf, *ancestors(leaf)))
        places = (module.place for module in around if module is not None)
        return next((place for place in places if place < math.inf), math.inf)

    def features(self, path: str, kind: Kind, params: bool, layer: str) -> CallFeatures:
        """Return the features of a leaf.

        ``params``: both models have parameter shapes. ``layer``: mine's partner of its layer; a
        leaf without parameters is not known from those of other layers.
        """
        m = self.modules[path]
        by_params = bool(params and m.params)
        shape = m.params if by_params else (m.output.shape if m.output else ())
        return CallFeatures(
            f"{kind(m.type)}{'' if by_params else layer}",
            shape,
            m.name,
            m.weight or m.output,
            shape_identifies=by_params,
        )


def _sorted_shapes(shapes: Iterable[Sequence[int]]) -> Shapes:
    """Return the shapes without the order of parameters and of axes."""
    return tuple(sorted(tuple(sorted(shape)) for shape in shapes))
