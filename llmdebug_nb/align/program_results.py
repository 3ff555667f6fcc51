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
        known = [record for record in records if record is not None]
        self._in_order = any(record.producer is not None for record in known)
        # by pass and path: the last record of modules
        self._modules: dict[tuple[object, ...], dict[str, int]] = defaultdict(dict)
        for record in known:
            site = record.site
            if not is_operator(site.path) and site.role != "weight":
                of_pass = self._modules[_pass(site)]
                of_pass[site.path] = max(of_pass.get(site.path, -1), record.id)
        self._last = set() if self._modules else _last(known)

    def is_outermost(self, record: Record) -> bool:
        """Tell whether a record is a module's, and no module around it gives anything later."""
        site = record.site
        if is_operator(site.path):
            return False
        of_pass = self._modules.get(_pass(site), {})
        for path in ancestors(site.path):
            last = of_pass.get(path)
            if last is not None and (last >= record.id or not self._in_order):
                return False
        return True

    def __contains__(self, record: object) -> bool:
        if not isinstance(record, Record):
            return False
        if record.site.role == "grad":
            return True
        of_module = record.site.role == "output" and self.is_outermost(record)
        return of_module or record.id in self._last


def _last(records: Iterable[Record]) -> set[int]:
    """Return the ids of the last output of each step."""
    last: dict[tuple[int, int, int], int] = {}
    for record in records:
        site = record.site
        if site.role == "output" and site.phase == "forward":
            last[site.rank, site.generation, site.step] = record.id
    return set(last.values())


def _pass(site: Site) -> tuple[object, ...]:
    return site.rank, site.generation, site.step, site.phase
