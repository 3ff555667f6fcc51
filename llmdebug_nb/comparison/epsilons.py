"""How finely the two runs round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.comparison.noise import kind_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.findings import Verdict
from llmdebug_nb.core.records import Record

_COARSEST = epsilon("bfloat16")


def told(stated: float) -> float:
    """Return the epsilon that a program states of its values, 0 if it is too coarse to judge by.

    The limits were measured on programs down to bfloat16. Rounding beyond that explains bugs, too:
    by 6 bits, 3 of 12 wrong conversions are found (`benchmarks/engines/llamacpp.py`).
    """
    return stated if stated <= _COARSEST else 0.0


def says(label: str, coarse: Sequence[str], stated: float, verdict: Verdict, limit: float) -> str:
    """Return a sentence on the coarse rounding that a program states; "" if none is needed.

    ``limit``: the largest of any row.
    """
    if not coarse or verdict not in ("within_noise", "diverged"):
        return ""
    text = f"{label} computes with {'; '.join(coarse)}: "
    if not told(stated):
        if verdict == "within_noise":
            return ""
        return (
            f"{text}the limits do not know rounding so coarse, and findings may be nothing else;"
            " llmdebug opcheck on a run with weights=True says whether each node computed rightly;"
            " llmdebug doctor says whether the file is the checkpoint's"
        )
    if verdict == "diverged":
        return f"{text}the limits know that rounding, and findings are beyond it"
    return (
        f"{text}that explains errors up to {limit:.2g}, so smaller bugs do not show;"
        " llmdebug doctor compares the file's weights and settings with the model's"
    )


class Epsilons:
    """The machine epsilon that counts for a pair: that of the coarser side.

    Values that passed through a coarser dtype stay as coarse, whatever dtype they are kept in: the
    weights of a checkpoint, or what autocast computes. A run that is coarser than the other one
    throughout may round accordingly. If only some of its tensors are, that rounding is the
    difference. Weights and what is computed of them are two questions. ``stated``: what the
    programs of golden and mine say of all their values, 0 if nothing.
    """

    def __init__(
        self, measured: Sequence[Measured], stated: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._stated = stated
        own = [m for m in measured if m.pair.at_its_place and m.pair.golden and m.pair.mine]
        self._throughout = {
            (weights, side): self._is_throughout([m for m in own if _is_weight(m) is weights], side)
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

    def both(self, m: Measured) -> tuple[float, float]:
        """Return the epsilons of golden and mine, by their dtypes, their values and programs."""
        (golden, mine), (its, own) = _by_dtype(m), m.rounded
        for_golden, for_mine = (0.0, 0.0) if _is_weight(m) else self._stated
        return (
            max(golden, its, for_golden) if golden else 0.0,
            max(mine, own, for_mine) if mine else 0.0,
        )

    def _is_throughout(self, measured: Sequence[Measured], side: int) -> bool:
        """Tell whether a side is coarser than the other one in most of what is compared."""
        epsilons = [both for both in map(self.both, measured) if all(both)]
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
