"""Which next token two programs prefer where their logits agree within noise: near ties."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.jobs import Load
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError


def says(rows: Iterable[Difference], load_golden: Load, load_mine: Load) -> str:
    """Return a sentence on the first logits that prefer other tokens; "" if none do.

    It tells of the last token of these, behind which a program goes on.
    """
    row = next(filter(_prefers_others, rows), None)
    if row is None or row.pair.golden is None or row.pair.mine is None:
        return ""
    try:
        values = load_golden(row.pair.golden), load_mine(row.pair.mine)
        g, m = values if row.pair.fit is None else row.pair.fit(*values)
    except (CorruptDumpError, TensorLookupError, ValueError):
        return ""
    g, m = (x.double().reshape(-1, x.shape[-1]) for x in (g, m))
    best, other = g.argmax(-1), m.argmax(-1)
    at = (best != other).nonzero().flatten()
    if not len(at):
        return ""
    last = int(at[-1])
    margin = float(g[last, best[last]] - g[last, other[last]])
    off = _rms(m[last] - g[last])
    name = "a near tie" if margin <= constants.CALIBRATED * off else "more than that explains"
    step, place = row.site.step, f"row {last} of {len(g)}, "
    return (
        f"Within noise, the two prefer another next token in step {step} ({len(at):,} of"
        f" {len(g):,} rows): {place if len(g) > 1 else ''}golden prefers token {int(best[last])} to"
        f" mine's {int(other[last])} by {margin:.2g} logits, and the logits differ by {off:.2g}"
        f" (root mean square), so that is {name}"
    )


def _prefers_others(row: Difference) -> bool:
    return row.verdict == "within_noise" and bool(row.metrics.get("top1_flips"))


def _rms(x: torch.Tensor) -> float:
    finite = x[x.isfinite()]
    return math.sqrt(float(finite.square().mean())) if finite.numel() else 0.0
