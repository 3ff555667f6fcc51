"""Which rows of a report to show where there is room for few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.findings.finding import Finding


def rows(
    differences: Sequence[Difference], findings: Sequence[Finding], n: int
) -> list[Difference]:
    """Return the ``n`` rows that matter most, in execution order.

    Those of the findings come first, then the call of the first finding with its inputs, then what
    differs first, then the other mismatches.
    """
    chosen: dict[int, Difference] = {}
    for d in _by_weight(differences, findings):
        if len(chosen) >= n:
            break
        chosen.setdefault(d.index, d)
    return [chosen[index] for index in sorted(chosen)]


def _by_weight(
    differences: Sequence[Difference], findings: Sequence[Finding]
) -> Iterator[Difference]:
    shown = [f.difference for f in findings if f.difference is not None and f.expected is None]
    yield from (differences[d.index] for d in shown)
    if shown:
        call = shown[0].site.key
        here = (d for d in differences if d.site.path == call.path)
        yield from (d for d in here if d.site.key == call)
    yield from (d for d in differences if d.verdict == "diverged")
    yield from (d for d in differences if d.is_mismatch)
