"""Find the call where NaN or infinity begins: its inputs hold no more of them than golden's."""

from __future__ import annotations

from collections.abc import Iterable

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.kernels.masks import fill_count
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall


def first(calls: Calls, row: Difference) -> ComparedCall | None:
    """Return the first call that both programs make and in which only mine overflows.

    None if mine's tensor of a row has no more NaN and infinities than golden's.
    """
    if not _more([row]):
        return None
    run_pass = row.site.key[:3]
    started = [c for c in calls.all if c.key[:3] == run_pass and not c.one_sided and starts(c)]
    inner = [c for c in started if not any(calls.is_inside(o, c) for o in started)]
    return min(inner, key=lambda c: c.place, default=None)


def starts(call: ComparedCall) -> bool:
    """Tell whether values overflow in this call of mine; golden's infinities do not count."""
    return call.mine is not None and _more(call.outputs) > 0 and _more(call.inputs) == 0


def _more(rows: Iterable[Difference]) -> int:
    """Return how many more elements of mine than of golden are NaN or infinite."""
    pairs = (d.pair for d in rows if d.pair.mine is not None)
    return sum(max(0, _count(pair.mine) - _allowed(pair.golden)) for pair in pairs)


def _allowed(golden: Record | None) -> int:
    """Return how many there may be: golden's fill of a mask may be infinite in another dtype."""
    if golden is None:
        return 0
    low = golden.summary.min
    filled = low is not None and low < constants.NO_ACTIVATION
    return _count(golden) + (fill_count(golden.summary) if filled else 0)


def _count(record: Record | None) -> int:
    return 0 if record is None else (record.summary.nan or 0) + (record.summary.inf or 0)


def words(call: ComparedCall) -> str:
    """Describe the inputs and the output of the call."""
    inputs = [d.pair.mine.summary for d in call.inputs if d.pair.mine]
    reach = [max(abs(s.max or 0.0), abs(s.min or 0.0)) for s in inputs]
    s = next(
        d.pair.mine.summary
        for d in call.outputs
        if d.pair.mine is not None and _count(d.pair.mine) > _count(d.pair.golden)
    )
    before = f"its inputs are finite (up to {max(reach):.3g})" if reach else "no input is infinite"
    counts = f"{s.inf or 0:,} infinite and {s.nan or 0:,} NaN of {s.numel:,} elements"
    return f"{before} and its output holds {counts}, in {s.dtype}"
