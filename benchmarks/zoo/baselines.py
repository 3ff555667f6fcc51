"""Naive baselines on the same two dumps: rows are paired by site, in execution order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import llmdebug_nb as ld
from zoo.entry import Seen

SMALL = 1e-5  # absolute error that the second baseline ignores


def rows(golden: ld.Run, mine: ld.Run) -> Iterator[tuple[float, Seen]]:
    """Yield the largest absolute error of each differing pair, and the call it points to."""
    theirs = {record.site: record for record in mine.records()}
    for record in golden.records():
        other = theirs.get(record.site)
        if other is None or other.summary.shape != record.summary.shape or not record.summary.numel:
            continue
        if (
            record.summary.fingerprint == other.summary.fingerprint
            and record.summary.dtype == other.summary.dtype
        ):
            continue
        a, b = golden.load(record).double(), mine.load(other).double()
        error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max().item()
        error = float("inf") if error != error else error  # NaN on one side
        yield (
            error,
            Seen(
                record.site.path,
                record.site.step,
                record.site.phase,
                frozenset((record.site.call,)),
            ),
        )


def blame(golden: ld.Run, mine: ld.Run) -> dict[str, Seen | None]:
    """Return the call that each baseline blames, None if it sees no error."""
    found = [(error, seen) for error, seen in rows(golden, mine) if error > 0]
    return {
        "max error": max(found, key=lambda row: row[0], default=(0.0, None))[1],
        "first row above 1e-5": next((seen for error, seen in found if error > SMALL), None),
    }
