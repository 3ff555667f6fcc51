"""The reference run of a program that is stepped through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmdebug_nb.align.modules import ModuleTree
from llmdebug_nb.align.tree import partners
from llmdebug_nb.core.records import Node, Site
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch


class Golden:
    """The reference run. Modules are matched as in a comparison, by the module trees alone."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._golden_path: dict[str, str] = {}  # path of mine -> path of golden
        self._matched = 0

    def match(self, nodes: Sequence[Node]) -> None:
        """Match the modules that the program is known to have by now."""
        if len(nodes) == self._matched:
            return
        self._matched = len(nodes)
        pairs = partners(ModuleTree(self.run.nodes, ()), ModuleTree(nodes, ()), {})
        single = {there: here[0] for there, (here, _) in pairs.items() if len(here) == 1}
        uses = Counter(single.values())  # a fused module answers to several: leave it out
        self._golden_path = {here: there for there, here in single.items() if uses[here] == 1}

    def tensors(self, site: Site, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return golden's tensors for the inputs or outputs of a call, by slot.

        ``site``: the call and role, in mine. ``live``: the call's tensors of that role. A single
        tensor on each side counts as a pair, whatever the slots are called.
        """
        module, slash, operator = site.path.partition("/")
        records = self.run.records(
            path=self._golden_path.get(module, module) + slash + operator, call=site.call,
            generation=site.generation, step=site.step, phase="forward", role=site.role,
        )  # fmt: skip
        recorded = {
            record.site.slot: self.run.load(record)
            for record in records
            if record.payload is not None and record.kept is None
        }
        if len(recorded) == len(live) == 1:
            return dict(zip(live, recorded.values(), strict=True))
        return recorded
