"""How finely the two runs round."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.comparison.differences import Verdict
from llmdebug_nb.comparison.measured import Measured
from llmdebug_nb.comparison.siblings import kind_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.kernels.ggml_blocks import is_of_blocks
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.run import Run

_COARSEST = epsilon("bfloat16")


@dataclass(frozen=True)
class Stated:
    """What a program states of its rounding: see `Run` for the fields."""

    coarse: Sequence[str] = ()
    rounding: float = 0.0
    value_rounding: float = 0.0
    products: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Stated:
        return cls(run.coarse, run.rounding, run.value_rounding, run.products)

    @property
    def rounds_factors(self) -> bool:
        """Whether it rounds what it multiplies, see `input_rounding.py`."""
        return any(map(is_of_blocks, self.products.values()))

    @property
    def told(self) -> float:
        """The epsilon of all its values that limits allow for."""
        return told(self.rounding) or told(self.value_rounding)

    @property
    def of_matches(self) -> float:
        """The epsilon within which its tensors are looked for in another program."""
        return max(self.told, _COARSEST if self.rounds_factors else 0.0)


def told(stated: float) -> float:
    """Return the epsilon that a program states of its values, 0 if it is too coarse to judge by.

    The limits were measured on programs down to bfloat16. Rounding beyond that explains bugs, too:
    by 6 bits, 3 of 12 wrong conversions are found (`benchmarks/engines/llamacpp.py`).
    """
    return stated if stated <= _COARSEST else 0.0


def says(label: str, stated: Stated, verdict: Verdict, limit: float, logits: float = 0.0) -> str:
    """Return a sentence on the coarse rounding that a program states; "" if none is needed.

    ``limit``: the largest of any row. ``logits``: the largest error of logits.
    """
    if not stated.coarse or verdict not in ("within_noise", "diverged"):
        return ""
    text = f"{label} computes with {'; '.join(stated.coarse)}: "
    unknown = stated.rounding > 0 and not told(stated.rounding)
    if verdict == "diverged" and unknown:
        known = (
            "the limits know that it rounds what it multiplies with them to 8 bits, but not what"
            " the weights lost: unless golden has this file's weights (gguf_file= of Transformers),"
            if stated.rounds_factors
            else "the limits do not know rounding so coarse, and"
        )
        return (
            f"{text}{known} findings may be nothing else;"
            " llmdebug opcheck on a run with weights=True says whether each node computed rightly;"
            " llmdebug doctor says whether the file is the checkpoint's"
        )
    if verdict == "diverged":
        return f"{text}the limits know that rounding, and findings are beyond it"
    if unknown and not stated.rounds_factors:
        return ""
    if stated.rounds_factors:
        text += "what it multiplies with its weights it rounds to 8 bits first; "
        text += f"the logits move by {logits:.2g} (relative L2); " if logits else ""
    return (
        f"{text}that explains errors up to {limit:.2g}, so smaller bugs do not show;"
        " llmdebug doctor compares the file's weights and settings with the model's"
    )


# What decides the epsilons of a pair: the dtypes ("" for none), those that hold the values, and
# whether it is a weight. They are few in a run, whatever the number of its rows.
_Sides = tuple[str, str, tuple[float, float], bool]


def _sides(m: Measured) -> _Sides:
    golden, mine = m.pair.golden, m.pair.mine
    either = golden or mine
    assert either is not None
    return (
        "" if golden is None else golden.summary.dtype,
        "" if mine is None else mine.summary.dtype,
        m.rounded,
        either.site.role == "weight",
    )


def _by_dtype(sides: _Sides) -> tuple[float, float]:
    """Return the epsilons of the dtypes of golden and mine."""
    return epsilon(sides[0]), epsilon(sides[1])


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
        self._stated, self._measured = stated, measured
        self._both: dict[_Sides, tuple[float, float]] = {}
        self._of: dict[_Sides, float] = {}
        own = Counter(map(_sides, filter(_is_own, measured)))
        self._throughout = {
            (weights, side): self._is_throughout(
                {sides: n for sides, n in own.items() if sides[3] is weights}, side
            )
            for weights in (False, True)
            for side in (0, 1)
        }

    def of(self, m: Measured) -> float:
        """Return the epsilon; 0 if neither side rounds."""
        sides = _sides(m)
        if sides not in self._of:
            self._of[sides] = self._coarser(sides)
        return self._of[sides]

    def _coarser(self, sides: _Sides) -> float:
        golden, mine = _by_dtype(sides)
        both = self._of_both(sides)
        coarse = (e for side, e in enumerate(both) if self._throughout[sides[3], side])
        return max(golden or mine, *coarse, 0.0)

    def is_odd(self, m: Measured) -> bool:
        """Tell whether mine is coarser than golden here, but in no other call of the kind."""
        golden, mine = _by_dtype(_sides(m))
        if m.pair.golden is None or not golden or mine <= golden or self._is_passed_on(m):
            return False
        kind = self._kinds[_call_kind(m.pair.golden)].items()
        others = [eps for path, eps in kind if path != m.pair.golden.site.path]
        return len(others) > 1 and mine > max(others)

    @functools.cached_property
    def _kinds(self) -> dict[tuple[object, ...], dict[str, float]]:
        """The coarsest epsilon of mine's dtypes in all steps, by kind of call and by path."""
        kinds: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
        for m in filter(_is_own, self._measured):
            if m.pair.golden is not None:
                kind, path = kinds[_call_kind(m.pair.golden)], m.pair.golden.site.path
                kind[path] = max(kind.get(path, 0.0), _by_dtype(_sides(m))[1])
        return kinds

    def _is_passed_on(self, m: Measured) -> bool:
        """Tell whether an input was seen before, in both runs: what made it chose its dtype."""
        golden, mine, content = m.pair.golden, m.pair.mine, m.pair.content
        if golden is None or mine is None or golden.site.role != "input":
            return False
        made = (golden.producer, mine.producer) in self._outputs
        return made or (content is not None and self._first[content] < m.index)

    @functools.cached_property
    def _outputs(self) -> set[tuple[int | None, int | None]]:
        """The ids of outputs that are paired at their places."""
        pairs = [m.pair for m in filter(_is_own, self._measured)]
        return {
            (pair.golden.id, pair.mine.id)
            for pair in pairs
            if pair.golden and pair.mine and pair.golden.site.role == "output"
        }

    @functools.cached_property
    def _first(self) -> dict[object, int]:
        """The index of the first pair with each content."""
        return {m.pair.content: m.index for m in reversed(self._measured)}

    def both(self, m: Measured) -> tuple[float, float]:
        """Return the epsilons of golden and mine, by their dtypes, their values and programs."""
        return self._of_both(_sides(m))

    def _of_both(self, sides: _Sides) -> tuple[float, float]:
        if sides not in self._both:
            (golden, mine), (its, own) = _by_dtype(sides), sides[2]
            for_golden, for_mine = (0.0, 0.0) if sides[3] else self._stated
            self._both[sides] = (
                max(golden, its, for_golden) if golden else 0.0,
                max(mine, own, for_mine) if mine else 0.0,
            )
        return self._both[sides]

    def _is_throughout(self, counted: Mapping[_Sides, int], side: int) -> bool:
        """Tell whether a side is coarser than the other one in most of what is compared."""
        epsilons = [(self._of_both(sides), n) for sides, n in counted.items()]
        known = [(both, n) for both, n in epsilons if all(both)]
        coarser = sum(n for both, n in known if both[side] > both[1 - side])
        return coarser > 0 and coarser >= constants.COARSER_SHARE * sum(n for _, n in known)


def _is_own(m: Measured) -> bool:
    """Tell whether both runs have a tensor at its place."""
    return m.pair.at_its_place and m.pair.golden is not None and m.pair.mine is not None


def _call_kind(record: Record) -> tuple[object, ...]:
    return *kind_of(record), record.site.call
