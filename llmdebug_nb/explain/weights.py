"""Weights, compared first: by their records where the run has them, else by the fingerprints taken when it began."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.explain.calls import Call
from llmdebug_nb.explain.runs import Runs


class Weights:
    """Which parameters and buffers differ, by golden's path of their module.

    Equal fingerprints prove that two weights are equal, and so do unequal ones that they are not, if dtype and shape are
    the same; of weights in other dtypes, fingerprints say nothing.
    """

    def __init__(self, differences: Sequence[Difference], runs: Runs) -> None:
        self._runs = runs
        self._judged: dict[str, dict[str, Difference]] = {}
        for d in differences:
            if d.pair.golden and d.pair.mine and d.pair.golden.site.role == "weight":
                self._judged.setdefault(d.pair.golden.site.path, {})[d.pair.golden.site.slot] = d

    def differing(self, call: Call) -> list[str]:
        """Return the names of the weights of the call's module that differ."""
        if call.golden is None or call.mine is None:
            return []
        golden, mine = (key.path.partition("/")[0] for key in (call.golden, call.mine))
        judged = self._judged.get(golden)
        if judged is not None:
            return [slot for slot, d in judged.items() if d.verdict == "diverged"]
        ours, theirs = (
            self._runs.golden.fingerprints.get(golden, {}),
            self._runs.mine.fingerprints.get(mine, {}),
        )
        return [
            name for name in ours
            if name in theirs and ours[name][0] == theirs[name][0] and ours[name][1] != theirs[name][1]
        ]  # fmt: skip

    def row(self, call: Call) -> Difference | None:
        """Return the row of the first weight that differs, where weights were recorded."""
        if call.golden is None:
            return None
        judged = self._judged.get(call.golden.path.partition("/")[0], {})
        return next((d for d in judged.values() if d.verdict == "diverged"), None)
