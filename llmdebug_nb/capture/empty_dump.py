"""Explains why a recording is empty."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from llmdebug_nb.capture.execution_ids import WantedIds
from llmdebug_nb.capture.operators.kinds import OperatorFilter
from llmdebug_nb.capture.selection import is_device
from llmdebug_nb.core.errors import nearest
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Node


def nothing_matches(options: DumpOptions, nodes: Sequence[Node]) -> str:
    """Name the filter that matched no module, with the nearest names that would match."""
    paths = [name for node in nodes for name in (node.path, *node.aliases) if name]
    classes = sorted({node.type for node in nodes})
    if options.layers and not any(
        fnmatchcase(path, glob) for glob in options.layers for path in (*paths, "")
    ):
        near = nearest(options.layers[0].replace("*", ""), paths)
        globs = ", ".join(options.layers)
        return f"layers {globs!r} matches none of the {len(paths)} modules{near}"
    if options.types:
        wanted = ", ".join(t if isinstance(t, str) else t.__name__ for t in options.types)
        within = " under layers " + ", ".join(options.layers) if options.layers else ""
        near = nearest(wanted, classes)
        return f"types {wanted!r} matches none of the module types{within}{near}"
    if options.opname:
        near = nearest(options.opname[0], classes)
        return f"no module type begins with opname {', '.join(options.opname)!r}{near}"
    return "the model has no modules"


@dataclass(frozen=True, kw_only=True)
class EmptyDump:
    """The state of a recording that recorded nothing.

    ``roots``: classes of the models followed; ``devices``: theirs. ``sessions``: labels of the
    runtimes' models followed; ``operators``: names in their graphs. ``steps``: those seen;
    ``steps_came``: one of them is selected. ``selected``: the filters select any module.
    ``no_request``: why none of the requests was recorded, if requests are selected.
    ``names``: full names of the calls seen, if the filters use them. ``rank``: of this process,
    None if it is not selected.
    """

    options: DumpOptions
    roots: Sequence[str]
    sessions: Sequence[str]
    operators: Sequence[str]
    devices: Sequence[str]
    steps: Sequence[int]
    steps_came: bool
    no_request: str | None
    nodes: Sequence[Node]
    selected: bool
    names: Collection[str]
    ids: WantedIds
    enabled: bool
    rank: int | None

    def reason(self) -> str:
        """Explain why nothing was recorded."""
        return (
            self._nothing_ran()
            or self._nothing_selected()
            or self._no_step_came()
            or self._no_call_matched()
            or "the selected modules did not run in the selected steps"
        )

    def _nothing_ran(self) -> str | None:
        if self.steps:
            return None
        if self.sessions:
            return (
                f"{self.sessions[0]} was not run in this block: its session's run() was never "
                "called, nor a request of a compiled model"
            )
        if not self.roots:
            return "no module was called in this block; run a model in it"
        return (
            f"neither {self.roots[0]} nor a part of it was called in this block (a method such as"
            " model.forward(...) goes past hooks: call model(...))"
        )

    def _nothing_selected(self) -> str | None:
        options = self.options
        if not self.roots and not self.sessions:
            return "no module was called in this block; run a model in it"
        if self.rank is None:
            return f"ranks {options.ranks} do not include the rank of this process"
        if not self.enabled:
            return f"the control file {options.control} switched the recording off"
        if not self.selected and (self.sessions or not options.operators):
            return nothing_matches(options, self.nodes)
        wanted = options.device
        if wanted is not None and not any(is_device(torch.device(d), wanted) for d in self.devices):
            devices = ", ".join(sorted(set(self.devices))) or "none"
            return f"device {wanted} was asked for, and the models ran on {devices}"
        return None

    def _no_step_came(self) -> str | None:
        options, first, last = self.options, self.steps[0], self.steps[-1]
        if self.steps_came:
            return None
        if self.no_request is not None:
            return self.no_request
        if options.rounds is not None:
            return f"rounds {options.rounds} never came; steps seen: {first} to {last}"
        seen = f"{first}-{last}" if len(self.steps) > 1 else f"{first}"
        return f"tokens {options.tokens} never came; steps seen: {seen}"

    def _no_call_matched(self) -> str | None:
        options = self.options
        for option, wanted in (("contains", options.contains), ("scope", options.scope)):
            if wanted and self.names:
                near, texts = nearest(wanted[0], sorted(self.names)), ", ".join(wanted)
                return f"{option} {texts!r} matches none of the {len(self.names)} calls seen{near}"
        if self.ids.unmatched:
            return self.ids.why_none()
        if not options.children and not options.ids:
            return "children=False without ids records layers alone, and none ran; leave it out"
        if options.overflow is not None:
            return "no call overflowed: all results were finite"
        apis, opname = ", ".join(options.apis or ()), ", ".join(options.opname)
        if (
            self.sessions
            and apis
            and not any(map(OperatorFilter(options.apis).__contains__, self.operators))
        ):
            near = nearest(options.apis[0], self.operators, 6)
            return f"apis {apis!r} matches none of the graph's operators{near}"
        if opname:
            return (
                f"no module or operator that begins with {opname!r} ran in the steps that were "
                "asked for"
            )
        if options.operators and apis:
            return (
                f"none of the operators {apis!r} ran in the modules and steps that were asked for"
            )
        return None
