"""A pair with its metrics, and the figures among them that are judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.metrics import Metrics
from llmdebug_nb.comparison.rows import RowErrors
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core import constants, row_sizes


@dataclass(frozen=True, slots=True)
class OfTokens:
    """The metrics of two tensors at the places that hold tokens.

    ``first``: along one axis of tokens; ``whole``: along all of them, the keys of scores, too. None
    if they differ at no other place. ``are_states``: neither is a mask.
    """

    first: Metrics | None = None
    whole: Metrics | None = None
    are_states: bool = False


@dataclass(slots=True)
class Measured:
    """A pair with its metrics, None if it could not be measured.

    ``remark``: how it was measured, or why not. ``rule``: why not, `Rule.NOISE` if it was.
    ``same_bytes``: by fingerprint, None if unknown.
    ``certain``: it diverged, whatever the limit. ``rounded``: the epsilons of the coarsest dtypes
    that hold the values of golden and mine, 0 if unknown. ``of_tokens``: what it is without places
    of the batch that hold no token, None if there are none in it. ``in_any_order``: what its rows
    are, known by what they hold; None if they are in place, or are no tokens. ``gap``: of places
    among scores, by how much mine's differ in score, see `choices.gap`; None if that is unknown.
    ``in_one_order``: of the values at such places, what they are for tokens with the same places,
    in one order; None if all are in one. ``input_rounding``: the relative error of inputs that its
    call rounded before it multiplied them, see `input_rounding.py`. ``rows``: the errors of the
    rows that ``metrics`` are of, None if these are equal or unknown, or if all is one row.
    """

    index: int
    pair: Pair
    metrics: Metrics | None = None
    remark: str | None = None
    same_bytes: bool | None = None
    certain: bool = False
    rounded: tuple[float, float] = (0.0, 0.0)
    of_tokens: OfTokens | None = None
    in_any_order: Metrics | None = None
    gap: float | None = None
    in_one_order: Metrics | None = None
    input_rounding: float = 0.0
    rows: RowErrors | None = None
    rule: Rule = Rule.NOISE
    error: float = field(init=False)

    def __post_init__(self) -> None:
        self.error = math.inf if self.certain else error_of(self.metrics) if self.metrics else 0.0

    @property
    def at_tokens(self) -> Measured:
        """The pair without places that hold no token, or with its rows known by what they hold."""
        found = None if self.of_tokens is None else self.of_tokens.first
        at_tokens = self if found is None else replace(self, metrics=found)
        if self.in_any_order is None:
            return at_tokens
        return min(at_tokens, replace(self, metrics=self.in_any_order), key=lambda m: m.error)

    @property
    def draws(self) -> float:
        """Of how many random draws the error is made: the carriers; of sizes of rows, the rows."""
        if not self.by_statistics:
            return self.carriers
        of_rows = "whole_stat_error" in (self.metrics or {})
        return row_sizes.count(self.pair.either.summary.shape) if of_rows else 1.0

    @property
    def of_whole(self) -> Measured:
        """The pair by the statistics of all of it, where those of rows were compared."""
        metrics = self.metrics or {}
        whole = metrics.get("whole_stat_error")
        return self if whole is None else replace(self, metrics=metrics | {"stat_error": whole})

    @property
    def is_at_its_place(self) -> bool:
        """False if the tensor has other partners at its own place, and this one besides."""
        return self.pair.golden is None or self.pair.elsewhere != "mine"

    @property
    def by_statistics(self) -> bool:
        """The error is that of statistics alone."""
        metrics = self.metrics or {}
        return "stat_error" in metrics and metrics.get("relative_euclidean_distance") is None

    @property
    def carriers(self) -> float:
        """The elements that carry the norm of golden; all of them if the values are unknown."""
        carriers = (self.metrics or {}).get("carriers")
        return self.pair.either.summary.numel if carriers is None else carriers


def error_of(metrics: Mapping[str, float | int | None]) -> float:
    """Return the figure that is judged: that of all rows, or inf if NaN or infinities differ.

    The error of one row (one token, say) is lost among many, so a quarter of the worst row's error
    counts too: rounding spreads evenly, a bug need not. Of weights, the worst element counts. If
    only statistics were compared: ``stat_error``.
    """
    if metrics.get("nan_mismatch") or metrics.get("inf_mismatch"):
        return math.inf
    whole, error = metrics.get("stat_error"), metrics.get("row_error")
    # the rows of a quantised weight have a limit of their own, see `quantisation_steps.py`
    worst = None if "worst_channel" in metrics else metrics.get("worst_row_error")
    row = None if worst is None else worst / constants.WORST_ROW
    element = metrics.get("worst_element_error")
    figures = [float(value) for value in (whole, error, row, element) if value is not None]
    return max(figures, default=0.0)


def scale_of(metrics: Mapping[str, float | int | None]) -> float:
    """Return the size of the scale error, 0 if it is unknown."""
    scale = metrics.get("scale_error")
    return 0.0 if scale is None or not math.isfinite(scale) else abs(float(scale))


def is_even(metrics: Mapping[str, float | int | None], error: float) -> bool:
    """Tell whether the error is mostly a common factor."""
    significant = (metrics.get("scale_t") or 0.0) >= constants.EVEN_ERRORS
    return significant and scale_of(metrics) >= constants.EVEN_SHARE * error
