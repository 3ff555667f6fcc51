"""The tensors that leave a program: what a comparison is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from llmdebug_nb.core.paths import ancestors, is_operator
from llmdebug_nb.core.records import Record, Site


class Results:
    """The tensors that leave a model: outputs of the outermost recorded calls, and gradients.

    A part of the model that is called behind the rest, as a head that computes logits, is outermost
    too; a dump of another tool does not tell, as its records may have another order. Without
    modules, the last output of each step.
    """

    def __init__(self, records: Iterable[Record | None]) -> None:
        # by pass and path: the last record of modules
        self._modules: dict[tuple[object, ...], dict[str, int]] = defaultdict(dict)
        self._in_order = False
        last: dict[tuple[int, int, int], Record] = {}
        for record in records:
            if record is None:
                continue
            site = record.site
            self._in_order = self._in_order or record.producer is not None
            if not is_operator(site.path) and site.role != "weight":
                of_pass = self._modules[_pass(site)]
                of_pass[site.path] = max(of_pass.get(site.path, -1), record.id)
            if site.role == "output" and site.phase == "forward":
                last[site.rank, site.generation, site.step] = record
        self._last = set() if self._modules else {record.id for record in last.values()}

    def is_outermost(self, record: Record) -> bool:
        """Tell whether a record is a module's, and no module around it gives anything later."""
        site = record.site
        if is_operator(site.path):
            return False
        of_pass = self._modules.get(_pass(site), {})
        around = [of_pass[path] for path in ancestors(site.path) if path in of_pass]
        if around and not self._in_order:
            return False
        return all(last < record.id for last in around)

    def __contains__(self, record: object) -> bool:
        if not isinstance(record, Record):
            return False
        if record.site.role == "grad":
            return True
        of_module = record.site.role == "output" and self.is_outermost(record)
        return of_module or record.id in self._last


def _pass(site: Site) -> tuple[object, ...]:
    return site.rank, site.generation, site.step, site.phase
