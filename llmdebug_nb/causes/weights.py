"""Compare weights: by their records, or else by fingerprints taken when the recording began."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmdebug_nb.causes import causes
from llmdebug_nb.causes.updates import Updates
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.runs import Runs


class Weights:
    """The parameters and buffers that differ, by golden's path of their module.

    Equal fingerprints prove equal weights. Unequal ones prove unequal weights only if dtype and
    shape are the same.
    """

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._runs = runs
        self.updates = Updates(differences, runs)
        self._rows: dict[str, dict[str, Difference]] = {}
        for d in differences:
            if d.pair.golden and d.pair.mine and d.pair.golden.site.role == "weight":
                self._rows.setdefault(d.pair.golden.site.path, {})[d.pair.golden.site.slot] = d

    def blamed(self, call: ComparedCall, row: Difference) -> tuple[str, str]:
        """Return a cause and a clause, which is "" unless weights make the error of a row."""
        words = self._words(call)
        return (causes.WEIGHT, words) if words else self.updates.blamed(call, row)

    def _words(self, call: ComparedCall) -> str:
        """Return a clause on the differing weights of the call's module, "" for none."""
        names = self.differing(call)
        if not names:
            return ""
        rows = self._rows.get(module_of(call.path), {})
        moved = all(name in rows and _holds_the_same(rows[name]) for name in names)
        several, listed = len(names) > 1, ", ".join(names[: constants.NAMES_SHOWN])
        if moved:
            has = "hold golden's values" if several else "holds golden's values"
            return f"its parameter{'s' * several} {listed} {has}, but in other places"
        return f"its parameter{'s' * several} {listed} differ{'s' * (not several)}"

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


def _holds_the_same(row: Difference) -> bool:
    """Tell whether two weights hold the same values in other places, by their statistics.

    Rounding is the same, so extremes and zeros are equal; sums are added in another order.
    """
    assert row.pair.golden is not None
    assert row.pair.mine is not None
    theirs, ours = row.pair.golden.summary, row.pair.mine.summary
    exact = [(s.dtype, s.numel, s.min, s.max, s.zero, s.nan, s.inf) for s in (theirs, ours)]
    if exact[0] != exact[1] or theirs.numel < 2 or theirs.l2norm is None or theirs.mean is None:
        return False
    size = theirs.l2norm
    sums = (theirs.mean, ours.mean, size / math.sqrt(theirs.numel)), (size, ours.l2norm, size)
    return all(b is not None and abs(a - b) <= constants.SAME_SUM * scale for a, b, scale in sums)
