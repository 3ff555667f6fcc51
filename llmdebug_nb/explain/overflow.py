"""Where NaN and infinity begin: given finite values, or no more of the others than golden was, and giving more."""

from __future__ import annotations

from collections.abc import Iterable

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.explain.calls import Call


def starts(call: Call) -> bool:
    """Tell whether values overflow in this call of mine. Infinite entries that golden has as well (a mask's) do not count."""
    return call.mine is not None and _more(call.outputs) > 0 and _more(call.inputs) == 0


def _more(rows: Iterable[Difference]) -> int:
    """Return how many more elements of mine than of golden are NaN or infinite."""
    return sum(
        max(0, _count(d, "mine") - _count(d, "golden")) for d in rows if d.pair.mine is not None
    )


def _count(d: Difference, side: str) -> int:
    record = getattr(d.pair, side)
    return 0 if record is None else (record.summary.nan or 0) + (record.summary.inf or 0)


def words(call: Call) -> str:
    """Return what went in and what came out."""
    reach = [
        max(abs(r.summary.max or 0.0), abs(r.summary.min or 0.0))
        for r in (d.pair.mine for d in call.inputs)
        if r
    ]
    out = next(
        d.pair.mine
        for d in call.outputs
        if d.pair.mine is not None and _count(d, "mine") > _count(d, "golden")
    )
    s = out.summary
    given = (
        f"its inputs are finite (up to {max(reach):.3g})" if reach else "nothing infinite went in"
    )
    return f"{given} and its output holds {s.inf or 0:,} infinite and {s.nan or 0:,} NaN of {s.numel:,} elements, in {s.dtype}"
