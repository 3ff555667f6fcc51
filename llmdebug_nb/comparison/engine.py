"""Pairs in, differences out, as a stream; each distinct pair of payloads is read and measured once.

Where both sides keep the same part of a tensor, the parts are measured and the statistics, which are those of
the whole, are held against each other as well: they notice what is wrong outside of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from llmdebug_nb.comparison import metrics, tolerance
from llmdebug_nb.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.kernels.fingerprint import same
from llmdebug_nb.records import Difference, Pair, Record, Summary

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]
UNMATCHED = "unmatched"
STATS_ONLY = "judged by statistics: "


def differences(pairs: Iterable[Pair], load_golden: Load, load_mine: Load) -> Iterator[Difference]:
    """Yield a Difference for every pair, in order.

    A payload that can't be read becomes a row with a reason; it never ends the comparison.
    """
    measured: dict[tuple[Any, ...], metrics.Metrics] = {}
    rounding = tolerance.Rounding()
    for index, pair in enumerate(pairs):
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            side = "mine" if golden is None else "golden"
            yield Difference(index, pair, UNMATCHED, reason=f"only in {side}: {pair.why}")
            continue
        a, b = golden.summary, mine.summary
        allowed = rounding.limit(a.dtype, b.dtype)
        if a.shape != b.shape and pair.fit is None:
            reason = f"shape {list(a.shape)} against {list(b.shape)}"
            yield Difference(index, pair, "diverged", float("inf"), allowed, reason=reason)
            continue
        same_bytes = same(a.fingerprint, b.fingerprint) if a.dtype == b.dtype and pair.fit is None else None
        values, remark = _measure(pair, same_bytes, load_golden, load_mine, measured)
        if values is None:
            yield Difference(index, pair, "diverged" if same_bytes is False else UNMATCHED, reason=remark)
            continue
        error = tolerance.error_of(values)
        verdict = tolerance.verdict(error, allowed)
        if verdict != "diverged" and same_bytes is False and remark:
            verdict, remark = "within_noise", f"{remark}; they agree, though the bytes do not"
        yield Difference(index, pair, verdict, error, allowed, values, remark)


def error(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the figure that is judged of two tensors of equal shape. Raises ValueError."""
    return tolerance.error_of(metrics.compare(golden, mine))


def _measure(
    pair: Pair, same_bytes: bool | None, load_golden: Load, load_mine: Load,
    measured: dict[tuple[Any, ...], metrics.Metrics],
) -> tuple[metrics.Metrics | None, str | None]:  # fmt: skip
    """Return metrics and a remark; None and the reason where the two can't be measured."""
    golden, mine = pair.golden, pair.mine
    assert golden is not None
    assert mine is not None
    a, b = golden.summary, mine.summary
    if same_bytes:
        return metrics.identical(a), None
    if golden.payload is None or mine.payload is None:
        sides = [name for name, record in (("golden", golden), ("mine", mine)) if record.payload is None]
        return _by_statistics(pair, a, b, f"no values on {' and '.join(sides)}")
    if (golden.kept, golden.kept_shape) != (mine.kept, mine.kept_shape):
        return _by_statistics(pair, a, b, f"golden keeps {_part(golden)}, mine {_part(mine)}")
    if pair.fit is not None and golden.kept is not None:
        return _by_statistics(pair, a, b, f"both keep {golden.kept}")
    key = (golden.payload, mine.payload, pair.fit and pair.fit.says)
    try:
        if key not in measured:
            tensors = load_golden(golden), load_mine(mine)
            measured[key] = metrics.compare(*(pair.fit(*tensors) if pair.fit is not None else tensors))
    except (CorruptDumpError, TensorLookupError, ValueError) as error:
        return None, str(error)
    if golden.kept is None:
        return measured[key], None
    values = measured[key] | metrics.statistics(a, b)
    if not golden.kept.startswith("slice"):  # figures in float64, whatever the tensor was
        values |= {"max_ulp": None, "mean_ulp": None}
    return values, f"judged by {golden.kept} and statistics"


def _by_statistics(pair: Pair, a: Summary, b: Summary, why: str) -> tuple[metrics.Metrics | None, str]:
    if pair.fit is not None and not pair.fit.whole:
        return None, f"{why}, and statistics are of all of it ({pair.fit.says})"
    values = metrics.statistics(a, b)
    if a.numel and all(value is None for value in values.values()):
        return None, f"{why}, and no statistics to judge by"
    return values, STATS_ONLY + why


def _part(record: Record) -> str:
    return record.kept or "all of it"
