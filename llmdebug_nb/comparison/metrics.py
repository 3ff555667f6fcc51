"""Every formula that compares two tensors, once.

``g`` is golden, ``m`` mine, both flattened, in float64, read chunk by chunk in one pass. Figures
cover the positions where both are finite. A position where exactly one is NaN, or where infinities
differ, counts in ``nan_mismatch`` or ``inf_mismatch``. The largest numbers of a dtype count as
infinite: masks consist of them, and they would dominate any figure. ``eps`` is float32's, 2**-23.

Upstream (msit `compare`) sets the absolute error to 0 where ``|g| <= eps``, which hides a golden 0
against a 5; here absolute errors are never hidden. Its relative error follows that rule here too.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from llmdebug_nb.comparison import rows, sums
from llmdebug_nb.comparison.rows import RowErrors, RowFigures
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES, coarsest, epsilon, is_floating
from llmdebug_nb.core.kernels import row_sizes
from llmdebug_nb.core.kernels.difference import Sums
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.core.records import Summary

Metrics = dict[str, float | int | None]

FIELDS: dict[str, str] = {
    "cosine_similarity": "g·m / (|g| |m|); 1 if both are zero, 0 if one is",
    "relative_euclidean_distance": "|m - g| / |g|; 0 if both are zero, inf if only g is",
    "row_error": "the same, of rows that are divided by their sizes, see `rows.py`",
    "worst_row_error": "the largest |m - g| of a row over its size; None if all is one row",
    "scale_error": "of rows divided by their sizes: g·(m - g) / |g|^2, the common factor, less 1",
    "scale_t": (
        "mean of the rows' scale errors, in standard errors; of all elements if all is one row"
    ),
    "carriers": "the same: sum(g^2)^2 / sum(g^4), so many equal elements would carry |g|",
    "rmse": "sqrt(mean((m - g)^2))",
    "max_absolute_error": "max |m - g|",
    "mean_absolute_error": "mean |m - g|",
    "max_relative_error": "max |m / g - 1| where |g| > eps, 0 elsewhere",
    "mean_relative_error": "its mean over all elements",
    "one_thousandth_err_ratio": "share of elements |g| > eps with a relative error below 0.001",
    "five_thousandths_err_ratio": "the same for 0.005",
    "euclidean_distance": "|m - g|",
    "l1_norm": "sum|m| / sum|g| - 1",
    "max_ulp": "largest distance in representable numbers of the coarser dtype",
    "mean_ulp": "its mean",
    "mismatched": "elements that are not equal (NaN equals NaN)",
    "nan_mismatch": "positions where exactly one is NaN",
    "inf_mismatch": "positions where exactly one is infinite, or the signs differ",
}
# of weights, of which each element stands for itself
WEIGHTS: dict[str, str] = {
    "worst_element_error": "largest |m - g| over |g|, or over the rms of g if that is more",
}
# of logits, whose last axis is the vocabulary: a row is a token
LOGITS: dict[str, str] = {
    "kl_divergence": "KL(softmax(g) || softmax(m)) over the whole flattened tensor, at least 0",
    "kl_row_mean": "the same for each row (the next token's distribution), averaged",
    "kl_row_max": "the same for each row, the largest",
    "top1_flips": "rows whose largest element is at another index",
    "max_gap_ulp": "|max m - max g| over the ulp of max m in its dtype",
}
STATISTICS = ("max", "min", "mean", "l2norm")


def compare(golden: torch.Tensor, mine: torch.Tensor, logits: bool = False) -> Metrics:
    """Return the metrics of two tensors of one size and any dtypes.

    These are all of `FIELDS`, and for ``logits`` those of `LOGITS`; None without a finite position.
    Complex tensors count as pairs of reals. If one side is a boolean mask and the other an additive
    one (0 or nearly -infinity), the boolean one is converted.

    Raises:
        ValueError: different element counts.
    """
    return by_rows(golden, mine, logits)[0]


def by_rows(
    golden: torch.Tensor, mine: torch.Tensor, logits: bool = False
) -> tuple[Metrics, RowErrors | None]:
    """Return what `compare` does, and the errors of the rows; None if these are equal, or one.

    Raises:
        ValueError: different element counts.
    """
    if golden.numel() != mine.numel():
        raise ValueError(f"{golden.numel()} elements against {mine.numel()}")
    golden, mine = _masks(golden, mine)
    unit = _unit(_name(golden), _name(mine))
    g_flat, m_flat = _flat(golden), _flat(mine)
    width = 0 if golden.is_complex() else rows.width(tuple(golden.shape))
    row = width
    if logits:
        row = golden.shape[-1] if golden.dim() > 1 else g_flat.numel()
    found, of_rows = sums.of(g_flat, m_flat, unit, width, _whole(width))
    whole = np.array([[found.gg, found.dd, found.gd, found.gg_gg]])
    by_row = rows.figures(whole if of_rows is None else of_rows)
    values, errors = _figures(found, by_row, of_rows is not None, sums.has_ulp(unit)), None
    if of_rows is not None and len(of_rows) > 1 and found.mismatched:
        each = np.sqrt(by_row.squares)
        if found.nan or found.inf:  # no sum has such positions
            each[sums.broken_rows(g_flat, m_flat, unit, width, _whole(width))] = math.inf
        errors = rows.folded(each, tuple(golden.shape[:-1]))
    if not logits or not row:
        return values, errors
    tokens, chunk = _Tokens(row), _whole(row)
    for g, m in zip(torch.split(g_flat, chunk), torch.split(m_flat, chunk), strict=True):
        tokens.add(g.double().numpy(), m.double().numpy())
    return values | tokens.result(_name(mine)), errors


def _whole(row: int) -> int:
    """Return how many elements are read at once: whole rows."""
    return max(1, constants.CHUNK // row) * row if row else constants.CHUNK


def of_weight(golden: torch.Tensor, mine: torch.Tensor) -> Metrics:
    """Return the figure of the worst element of two weights of one shape: those of `WEIGHTS`.

    A weight is stored, not computed: rounding moves each element by half an ulp. One that differs
    by more is hidden in the norm of all. Elements far below the usual size may be sums that cancel.
    """
    g = golden.double()
    size = g.abs().clamp_min(float(g.square().mean().sqrt()) if g.numel() else 0.0)
    error = ((mine.double() - g).abs() / size).nan_to_num(
        0.0, 0.0
    )  # infinities count by themselves
    return {"worst_element_error": float(error.max()) if g.numel() else None}


def divergence(golden: torch.Tensor, mine: torch.Tensor) -> float | None:
    """Return KL(softmax(golden) || softmax(mine)) over two whole flattened tensors, as msit does.

    Positions that are not finite on both sides are left out; None if there is no other one.

    Raises:
        ValueError: different element counts.
    """
    if golden.numel() != mine.numel():
        raise ValueError(f"{golden.numel()} elements against {mine.numel()}")
    g_flat, m_flat = (_flat(x) for x in _masks(golden, mine))
    sums = [_LogSumExp(), _LogSumExp()]
    chunks = zip(torch.split(g_flat, constants.CHUNK), torch.split(m_flat, constants.CHUNK),
                 strict=True)  # fmt: skip
    for g, m in chunks:
        _add_row(sums, g.double().numpy(), m.double().numpy())
    whole_golden, whole_mine = sums
    if whole_golden.total == 0:
        return None
    return max(0.0, whole_golden.mean() - whole_golden.log() + whole_mine.log())


def _add_row(sums: list[_LogSumExp], g: np.ndarray, m: np.ndarray) -> None:
    """Add a row to the sums of golden, which weigh g - m, and of mine."""
    fine = np.isfinite(g) & np.isfinite(m)
    if not fine.any():
        return
    g, m = g[fine][None], m[fine][None]
    (p, log_g), (_, log_m) = _softmax(g), _softmax(m)
    sums[0].add(log_g, (p * (g - m)).sum(axis=1))
    sums[1].add(log_m, np.zeros_like(log_m))


def identical(summary: Summary, logits: bool = False) -> Metrics:
    """Return the metrics of a tensor and itself, by its statistics alone: one dict for a kind."""
    empty = summary.numel == 0 or (summary.nan or 0) + (summary.inf or 0) >= summary.numel
    flat = summary.dtype.startswith("complex") or not rows.width(summary.shape)
    return _identical(empty, flat, logits)


@functools.cache
def _identical(empty: bool, flat: bool, logits: bool) -> Metrics:
    values: Metrics = dict.fromkeys(FIELDS, None if empty else 0.0)
    if not empty:
        ones = "cosine_similarity", "one_thousandth_err_ratio", "five_thousandths_err_ratio"
        # statistics don't tell the carriers
        values |= dict.fromkeys(ones, 1.0) | {"max_ulp": 0, "carriers": None}
        if flat:
            values["worst_row_error"] = None
    values |= {"mismatched": 0, "nan_mismatch": 0, "inf_mismatch": 0}
    return values | dict.fromkeys(LOGITS, None if empty else 0) if logits else values


def statistics(golden: Summary, mine: Summary, by_rows: bool = True) -> Metrics:
    """Return ``{max,min,mean,l2norm}_stat_{absolute,relative}_error`` and ``stat_error``.

    absolute: |m - g|; relative: that over |g|, 0 if both are 0, inf if only g is. None if a figure
    is missing. ``stat_error``: the largest gap, relative to |g| for l2norm, |g| / sqrt(n) for mean,
    and, as one element may be far off by chance, several times the larger magnitude in g for max
    and min. Its order of magnitude is a lower bound of the relative L2 error. Where both have the
    sizes of their rows and ``by_rows``, the rows tell it (`rows.size_figures`), and
    ``whole_stat_error`` is the above.
    """
    values: Metrics = {}
    gaps: dict[str, float] = {}
    for name in STATISTICS:
        g, m = getattr(golden, name), getattr(mine, name)
        gap = None if g is None or m is None else _gap(g, m)
        values[f"{name}_stat_absolute_error"] = gap
        values[f"{name}_stat_relative_error"] = None if gap is None else ratio(gap, abs(g))
        if gap is not None:
            gaps[name] = math.inf if gap != gap else gap
    if len(gaps) < len(STATISTICS):
        return values | {"stat_error": max(gaps.values(), default=None)}
    far = (1 + constants.CARRIER_ERRORS) * max(abs(golden.max or 0.0), abs(golden.min or 0.0))
    norm = golden.l2norm or 0.0
    sizes = {
        **dict.fromkeys(("max", "min"), far),
        "mean": norm / math.sqrt(golden.numel or 1),
        "l2norm": norm,
    }
    whole = max(ratio(gap, sizes[name]) for name, gap in gaps.items())
    by_rows &= golden.shape == mine.shape
    if not by_rows or golden.row_sizes is None or mine.row_sizes is None:
        return values | {"stat_error": whole}
    of_rows = rows.size_figures(row_sizes.read(golden.row_sizes), row_sizes.read(mine.row_sizes))
    mean = ratio(gaps["mean"], of_rows.size / math.sqrt(golden.numel))
    return values | {"stat_error": max(of_rows.error, mean), "whole_stat_error": whole}


def _gap(golden: float, mine: float) -> float:
    """Return |m - g|, 0 for two NaN."""
    both_nan = math.isnan(golden) and math.isnan(mine)
    return 0.0 if golden == mine or both_nan else abs(mine - golden)


def _masks(golden: torch.Tensor, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as additive masks, if one is additive and the other boolean."""
    for truths, added in ((golden, mine), (mine, golden)):
        if truths.dtype == torch.bool and added.is_floating_point() and added.numel():
            low = constants.INFINITE_SHARE * torch.finfo(added.dtype).min
            if bool(((added == 0) | (added <= low)).all()):
                same = torch.zeros_like(added).masked_fill(~truths.reshape(added.shape), -math.inf)
                return (same, mine) if truths is golden else (golden, same)
    return golden, mine


def _name(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _unit(golden: str, mine: str) -> str:
    """Return the coarser dtype of two."""
    return coarsest((golden, mine)) or golden


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one row, in a dtype that numpy and torch can convert."""
    if tensor.is_complex():
        wide = tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
        return torch.view_as_real(wide.resolve_conj()).reshape(-1)
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.to(torch.float64).reshape(-1)
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return tensor.to(torch.float32).reshape(-1)
    return tensor.reshape(-1)


def _figures(of: Sums, by_row: RowFigures, has_rows: bool, has_ulp: bool) -> Metrics:
    """Return the metrics that sums make, all of `FIELDS`.

    ``by_row``: the figures of rows, or of the whole as one.
    """
    s, n = of, of.finite
    counts: Metrics = {"mismatched": s.mismatched, "nan_mismatch": s.nan, "inf_mismatch": s.inf}
    if not n:
        return dict.fromkeys(FIELDS) | counts
    g_norm, m_norm, d_norm = math.sqrt(s.gg), math.sqrt(s.mm), math.sqrt(s.dd)
    cosine = s.gm / g_norm / m_norm if g_norm and m_norm else float(g_norm == m_norm)
    by_element = ratio(abs(s.gd), math.sqrt(s.gd_gd))
    return {
        "cosine_similarity": max(-1.0, min(1.0, cosine)),
        "relative_euclidean_distance": ratio(d_norm, g_norm),
        "row_error": by_row.error,
        "worst_row_error": by_row.worst if has_rows else None,
        "scale_error": by_row.scale_error if s.gg else ratio(s.mm, 0.0),
        "scale_t": by_row.scale_t if has_rows else by_element,
        "carriers": by_row.carriers,
        "rmse": d_norm / math.sqrt(n),
        "max_absolute_error": s.most,
        "mean_absolute_error": s.abs_d / n,
        "max_relative_error": s.most_relative,
        "mean_relative_error": s.relative / n,
        "one_thousandth_err_ratio": s.within_1 / s.sizeable if s.sizeable else 1.0,
        "five_thousandths_err_ratio": s.within_5 / s.sizeable if s.sizeable else 1.0,
        "euclidean_distance": d_norm,
        "l1_norm": (s.abs_m - s.abs_g) / s.abs_g if s.abs_g else ratio(s.abs_m, 0.0),
        "max_ulp": int(s.most_ulps) if has_ulp else None,
        "mean_ulp": s.ulps / n if has_ulp else None,
        **counts,
    }


class _Tokens:
    """Running sums over the next token's distribution, row by row.

    Positions that are not finite on both sides are left out.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.kl: list[np.ndarray] = []
        self.flips = 0
        self.g_top = self.m_top = -math.inf
        self.whole = [_LogSumExp(), _LogSumExp()]

    def add(self, g: np.ndarray, m: np.ndarray) -> None:
        fine = np.isfinite(g) & np.isfinite(m)
        if not fine.any():
            return
        g, m = (np.where(fine, x, -math.inf).reshape(-1, self.width) for x in (g, m))
        seen = fine.reshape(-1, self.width).any(axis=1)
        g, m = g[seen], m[seen]
        self.flips += int(np.count_nonzero(g.argmax(axis=1) != m.argmax(axis=1)))
        self.g_top, self.m_top = max(self.g_top, float(g.max())), max(self.m_top, float(m.max()))
        (p, log_g), (_, log_m) = _softmax(g), _softmax(m)
        gap = np.subtract(g, m, out=np.zeros_like(g), where=p > 0)
        self.kl.append(np.maximum((p * gap).sum(axis=1) - log_g + log_m, 0.0))
        self.whole[0].add(log_g, (p * gap).sum(axis=1))
        self.whole[1].add(log_m, np.zeros_like(log_m))

    def result(self, dtype: str) -> Metrics:
        if not self.kl:
            return dict.fromkeys(LOGITS)
        kl = np.concatenate(self.kl)
        golden, mine = self.whole
        return {
            "kl_divergence": max(0.0, golden.mean() - golden.log() + mine.log()),
            "kl_row_mean": float(kl.mean()),
            "kl_row_max": float(kl.max()),
            "top1_flips": self.flips,
            "max_gap_ulp": abs(self.m_top - self.g_top) / ulp(self.m_top, dtype),
        }


def ulp(x: float, dtype: str) -> float:
    """Return the ulp of a number: eps times the power of two at or below |x|; 1 for integers."""
    return (
        epsilon(dtype) * 2.0 ** math.floor(math.log2(abs(x) or 1.0)) if is_floating(dtype) else 1.0
    )


def _softmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return softmax and log(sum(exp)) of each row."""
    top = x.max(axis=1, keepdims=True)
    weights = np.exp(x - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, (top + np.log(total))[:, 0]


class _LogSumExp:
    """log(sum(exp(x))) over all rows, and the mean of values weighted by softmax(x).

    Both are accumulated from the figures of each row.
    """

    def __init__(self) -> None:
        self.top = -math.inf
        self.total = self.weighted = 0.0

    def add(self, x: np.ndarray, values: np.ndarray) -> None:
        top = max(self.top, float(x.max()))
        shrink = math.exp(self.top - top)
        weights = np.exp(x - top)
        self.total = self.total * shrink + float(weights.sum())
        self.weighted = self.weighted * shrink + sums.dot(weights, values)
        self.top = top

    def log(self) -> float:
        return self.top + math.log(self.total)

    def mean(self) -> float:
        return self.weighted / self.total
