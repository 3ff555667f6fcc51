"""Measure pairs, which become differences when they are judged.

Each distinct pair of payloads is read and measured once, chunk by chunk. All pairs are judged at
the end. If both sides kept the same part of a tensor, the parts are measured. The statistics of the
whole tensors are compared as well, because they reveal errors outside the part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmdebug_nb.comparison import clipping, grain, metrics
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.measured import Measured, error_of
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.comparison.tolerance import UNMATCHED, Calibration, Judging
from llmdebug_nb.core.dtypes import rounding
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.findings import Pair
from llmdebug_nb.core.kernels.fingerprint import same
from llmdebug_nb.core.kernels.masks import may_hide, without_masked
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Node, Record, Summary

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]
UNINITIALISED = "memory that nothing was written to yet: there are no values to compare"
STATS_ONLY = "judged by statistics: "
# operators that return memory which nothing was written to yet
_EMPTY = re.compile(r"(.*\.)?(new_)?empty(_like|_strided|_permuted|_quantized)?(\.\w+)?")
__all__ = ["STATS_ONLY", "UNMATCHED", "judging", "measure"]


def judging(
    pairs: Iterable[Pair],
    load_golden: Load,
    load_mine: Load,
    *,
    nodes: Sequence[Node] = (),
    limits: Limits | None = None,
    calibration: Calibration | None = None,
    custom: Custom | None = None,
    rounding: tuple[float, float] = (0.0, 0.0),
) -> Judging:
    """Measure all pairs and return the `Judging` of them.

    ``pairs`` must be in golden's execution order. A payload that can't be read becomes a row with a
    reason; it never ends the comparison. ``nodes``: golden's modules. ``rounding``: the epsilons
    that golden's and mine's programs state of their values.
    """
    modules = Modules(nodes)
    measured = list(_measure(pairs, _Measurer(load_golden, load_mine, modules, custom)))
    return Judging(
        measured, size=modules.size, limits=limits, calibration=calibration, rounding=rounding
    )


def measure(
    pairs: Iterable[Pair], load_golden: Load, load_mine: Load, nodes: Sequence[Node] = ()
) -> Iterator[Measured]:
    """Yield the measurement of each pair, in order. ``nodes``: golden's modules."""
    yield from _measure(pairs, _Measurer(load_golden, load_mine, Modules(nodes), None))


def _measure(pairs: Iterable[Pair], measurer: _Measurer) -> Iterator[Measured]:
    for index, pair in enumerate(pairs):
        yield measurer.measured(index, pair)


def error(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the figure that is judged, for two tensors of one shape. Raises ValueError."""
    return error_of(metrics.compare(golden, mine))


class _Measurer:
    """Measures pairs, and each pair of payloads once."""

    def __init__(
        self, load_golden: Load, load_mine: Load, modules: Modules, custom: Custom | None
    ) -> None:
        self._load_golden, self._load_mine = load_golden, load_mine
        self._modules, self._custom = modules, custom or Custom()
        # ids of records of memory that nothing was written to, by side
        self._empty: tuple[set[int], set[int]] = (set(), set())
        self._measured: dict[Hashable, tuple[metrics.Metrics, str | None]] = {}
        self._rounded: tuple[dict[Hashable, float], ...] = ({}, {})  # of each side's payloads

    def measured(self, index: int, pair: Pair) -> Measured:
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            side = "mine" if golden is None else "golden"
            return Measured(index, pair, remark=f"only in {side}: {pair.why}")
        if self._is_empty(golden, mine):
            return Measured(index, pair, remark=UNINITIALISED)
        a, b = golden.summary, mine.summary
        if a.shape != b.shape and pair.fit is None:
            shapes = f"shape {list(a.shape)} against {list(b.shape)}"
            return Measured(index, pair, remark=shapes, certain=True)
        comparable = a.dtype == b.dtype and pair.fit is None
        same_bytes = same(a.fingerprint, b.fingerprint) if comparable else None
        values, remark = self._metrics(pair, golden, mine, same_bytes)
        certain = values is None and same_bytes is False
        its, own = self._rounded
        rounded = its.get(golden.payload, 0.0), own.get(mine.payload, 0.0)
        return Measured(index, pair, values, remark, same_bytes, certain, rounded)

    def _is_empty(self, *sides: Record) -> bool:
        """Tell whether a tensor is the untouched output of an operator such as `empty`."""
        for record, empty in zip(sides, self._empty, strict=True):
            output = record.site.role == "output" and is_operator(record.site.path)
            allocated = output and _EMPTY.fullmatch(record.op) is not None
            if allocated or (record.site.role == "input" and record.producer in empty):
                empty.add(record.id)
        return any(record.id in empty for record, empty in zip(sides, self._empty, strict=True))

    def _metrics(
        self, pair: Pair, golden: Record, mine: Record, same_bytes: bool | None
    ) -> tuple[metrics.Metrics | None, str | None]:
        """Return metrics and a remark; None and the reason if the two can't be measured."""
        a, b = golden.summary, mine.summary
        logits = self._modules.are_logits(golden)
        if same_bytes and not self._custom.names:
            return metrics.identical(a, logits), None
        if golden.payload is None or mine.payload is None:
            if same_bytes:
                return metrics.identical(a, logits), None
            sides = (("golden", golden), ("mine", mine))
            lacking = [name for name, record in sides if record.payload is None]
            return _by_statistics(pair, a, b, f"no values on {' and '.join(lacking)}")
        if (golden.kept, golden.kept_shape) != (mine.kept, mine.kept_shape):
            return _by_statistics(pair, a, b, f"golden keeps {_part(golden)}, mine {_part(mine)}")
        if pair.fit is not None and golden.kept is not None:
            return _by_statistics(pair, a, b, f"both keep {golden.kept}")
        key = golden.payload, mine.payload, logits, pair.fit and pair.fit.says
        try:
            if key not in self._measured:
                whole_logits = logits and golden.kept is None
                self._measured[key] = self._compare(pair, golden, mine, whole_logits)
        except (CorruptDumpError, TensorLookupError, ValueError) as error:
            return None, str(error)
        values, remark = self._measured[key]
        if golden.kept is None:
            return values, remark
        values = values | metrics.statistics(a, b)
        if not golden.kept.startswith("slice"):  # figures of the tensor, in float64
            values |= {"max_ulp": None, "mean_ulp": None}
        return values, f"judged by {golden.kept} and statistics"

    def _compare(
        self, pair: Pair, golden: Record, mine: Record, logits: bool
    ) -> tuple[metrics.Metrics, str | None]:
        """Return the metrics of two tensors, and a remark on them."""
        g, m = self._load_golden(golden), self._load_mine(mine)
        for known, record, x in zip(self._rounded, (golden, mine), (g, m), strict=True):
            if record.payload not in known:
                known[record.payload] = rounding(x)
        of_grain: metrics.Metrics = {}
        remark = None
        if pair.fit is not None:
            fit, stored = pair.fit, (g, m)
            steps = None if fit.grain is None else fit.grain(g, m)
            g, m = fit(g, m)
            if steps is not None and fit.integers is not None:
                integers = stored[fit.integers].reshape(g.shape)
                of_grain, remark = clipping.compare(g, m, steps, integers, fit.integers)
            elif steps is not None:
                of_grain, remark = grain.compare(g, m, steps)
        floating = g.is_floating_point() and m.is_floating_point() and g.shape == m.shape
        if floating and may_hide(golden.summary) and may_hide(mine.summary):
            g, m = without_masked(g, m)
        custom = self._custom.measure(g, m, pair.either.site)
        return metrics.compare(g, m, logits) | of_grain | custom, remark


def _by_statistics(
    pair: Pair, a: Summary, b: Summary, why: str
) -> tuple[metrics.Metrics | None, str | None]:
    """Return the metrics of statistics alone. ``why``: the reason for that."""
    if pair.fit is not None and not pair.fit.whole:
        return None, f"{why}, and statistics cover the whole tensor ({pair.fit.says})"
    values = metrics.statistics(a, b)
    if a.numel and all(value is None for value in values.values()):
        return None, f"{why}, and no statistics to judge by"
    return values, STATS_ONLY + why


def _part(record: Record) -> str:
    return record.kept or "all of it"
