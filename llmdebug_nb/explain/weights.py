"""Compare weights: by their records, or else by fingerprints taken when the recording began."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.explain.calls import ComparedCall
from llmdebug_nb.explain.runs import Runs


class Weights:
    """The parameters and buffers that differ, by golden's path of their module.

    Equal fingerprints prove equal weights. Unequal ones prove unequal weights only if dtype and
    shape are the same.
    """

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._runs = runs
        self._rows: dict[str, dict[str, Difference]] = {}
        for d in differences:
            if d.pair.golden and d.pair.mine and d.pair.golden.site.role == "weight":
                self._rows.setdefault(d.pair.golden.site.path, {})[d.pair.golden.site.slot] = d

    def differing(self, call: ComparedCall) -> list[str]:
        """Return the names of the differing weights of the call's module."""
        if call.golden is None or call.mine is None:
            return []
        golden, mine = module_of(call.golden.path), module_of(call.mine.path)
        rows = self._rows.get(golden)
        if rows is not None:
            return [slot for slot, d in rows.items() if d.verdict == "diverged"]
        of_golden = self._runs.golden.fingerprints.get(golden, {})
        of_mine = self._runs.mine.fingerprints.get(mine, {})
        return [
            name
            for name, (kind, fingerprint) in of_golden.items()
            if name in of_mine and of_mine[name][0] == kind and of_mine[name][1] != fingerprint
        ]
