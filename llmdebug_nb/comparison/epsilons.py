"""How finely the two runs round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.comparison.noise import kind_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.records import Record


class Epsilons:
    """The machine epsilon that counts for a pair: that of the coarser side.

    Values that passed through a coarser dtype stay as coarse, whatever dtype they are kept in: the
    weights of a checkpoint, or what autocast computes. A run that is coarser than the other one
    throughout may round accordingly. If only some of its tensors are, that rounding is the
    difference. Weights and what is computed of them are two questions.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        own = [m for m in measured if m.pair.at_its_place and m.pair.golden and m.pair.mine]
        self._throughout = {
            (weights, side): _is_throughout([m for m in own if _is_weight(m) is weights], side)
            for weights in (False, True)
            for side in (0, 1)
        }
        self._of: dict[int, float] = {}  # by the pair's index
        self._kinds: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
        for m in own:
            if m.pair.golden is not None:
                kind = self._kinds[_call_kind(m.pair.golden)]
                kind[m.pair.golden.site.path] = _by_dtype(m)[1]

    def of(self, m: Measured) -> float:
        """Return the epsilon; 0 if neither side rounds."""
        if m.index not in self._of:
            self._of[m.index] = self._coarser(m)
        return self._of[m.index]

    def _coarser(self, m: Measured) -> float:
        golden, mine = _by_dtype(m)
        weight, both = _is_weight(m), self.both(m)
        coarse = (eps for side, eps in enumerate(both) if self._throughout[weight, side])
        return max(golden or mine, *coarse, 0.0)

    def is_odd(self, m: Measured) -> bool:
        """Tell whether mine is coarser than golden here, but in no other call of the kind."""
        golden, mine = _by_dtype(m)
        if m.pair.golden is None or not golden or mine <= golden:
            return False
        kind = self._kinds[_call_kind(m.pair.golden)].items()
        others = [eps for path, eps in kind if path != m.pair.golden.site.path]
        return len(others) > 1 and mine > max(others)

    @staticmethod
    def both(m: Measured) -> tuple[float, float]:
        """Return the epsilons of golden and mine, by their dtypes and their values."""
        (golden, mine), (its, own) = _by_dtype(m), m.rounded
        return (max(golden, its) if golden else 0.0), (max(mine, own) if mine else 0.0)


def _is_throughout(measured: Sequence[Measured], side: int) -> bool:
    """Tell whether a side is coarser than the other one in most of what is compared."""
    epsilons = [both for both in map(Epsilons.both, measured) if all(both)]
    coarser = sum(both[side] > both[1 - side] for both in epsilons)
    return coarser > 0 and coarser >= constants.COARSER_SHARE * len(epsilons)


def _by_dtype(m: Measured) -> tuple[float, float]:
    """Return the epsilons of the dtypes of golden and mine."""
    golden, mine = m.pair.golden, m.pair.mine
    return (
        0.0 if golden is None else epsilon(golden.summary.dtype),
        0.0 if mine is None else epsilon(mine.summary.dtype),
    )


def _is_weight(m: Measured) -> bool:
    return m.pair.either.site.role == "weight"


def _call_kind(record: Record) -> tuple[object, ...]:
    return *kind_of(record), record.site.call
