"""The tensors that leave a program: what a comparison is about."""

from __future__ import annotations

from collections.abc import Iterable

from llmdebug_nb.core.paths import ancestors, is_operator
from llmdebug_nb.core.records import Record, Site


class Results:
    """The tensors that leave a model: outputs of the outermost recorded modules, and gradients.

    Without modules, the last output of each step.
    """

    def __init__(self, records: Iterable[Record | None]) -> None:
        self._modules: set[str] = set()
        last: dict[tuple[int, int, int], Record] = {}
        for record in records:
            if record is None:
                continue
            site = record.site
            if not is_operator(site.path):
                self._modules.add(site.path)
            if site.role == "output" and site.phase == "forward":
                last[site.rank, site.generation, site.step] = record
        self._last = set() if self._modules else {record.id for record in last.values()}

    def is_outermost(self, site: Site) -> bool:
        """Tell whether no recorded module is around the module of a site."""
        return not is_operator(site.path) and self._modules.isdisjoint(ancestors(site.path))

    def __contains__(self, record: object) -> bool:
        if not isinstance(record, Record):
            return False
        if record.site.role == "grad":
            return True
        of_module = record.site.role == "output" and self.is_outermost(record.site)
        return of_module or record.id in self._last
