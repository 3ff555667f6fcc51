"""How finely the dtypes of two runs round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llmdebug_nb.comparison.noise import kind_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.findings import Pair
from llmdebug_nb.core.records import Record


class Epsilons:
    """The machine epsilon that counts for a pair: that of the coarser side.

    A program that is coarser than golden throughout may round accordingly. If only some of its
    tensors are coarser, that rounding is the difference, and golden's epsilon counts.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        own = [pair for pair in pairs if pair.at_its_place]
        paired = [(pair, pair.golden) for pair in own if pair.mine is not None]
        epsilons = [self.both(pair) for pair, golden in paired if golden is not None]
        epsilons = [both for both in epsilons if all(both)]
        coarser = sum(mine > golden for golden, mine in epsilons)
        self._throughout = coarser >= constants.COARSER_SHARE * len(epsilons)
        self._kinds: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
        for pair, golden in paired:
            if golden is not None:
                self._kinds[_call_kind(golden)][golden.site.path] = self.both(pair)[1]

    def of(self, pair: Pair) -> float:
        """Return the epsilon; 0 if neither side rounds."""
        golden, mine = self.both(pair)
        return golden if golden and not self._throughout else max(golden, mine)

    def is_odd(self, pair: Pair) -> bool:
        """Tell whether mine is coarser than golden here, but in no other call of the kind."""
        golden, mine = self.both(pair)
        if pair.golden is None or not golden or mine <= golden:
            return False
        kind = self._kinds[_call_kind(pair.golden)].items()
        others = [eps for path, eps in kind if path != pair.golden.site.path]
        return len(others) > 1 and mine > max(others)

    @staticmethod
    def both(pair: Pair) -> tuple[float, float]:
        """Return the epsilons of golden and mine."""
        golden, mine = pair.golden, pair.mine
        return (
            0.0 if golden is None else epsilon(golden.summary.dtype),
            0.0 if mine is None else epsilon(mine.summary.dtype),
        )


def _call_kind(record: Record) -> tuple[object, ...]:
    return *kind_of(record), record.site.call
