"""What a naive reader of the same two dumps would blame: rows are paired by site, in execution order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.entry import Seen

SMALL = 1e-5


def rows(golden: Any, mine: Any) -> Iterator[tuple[float, Seen]]:
    """Yield the largest absolute error of each pair of tensors of one site and shape that differ, and what it would blame."""
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


def blame(golden: Any, mine: Any) -> dict[str, Seen | None]:
    """Return what each baseline blames; None: it sees nothing wrong."""
    found = [(error, seen) for error, seen in rows(golden, mine) if error > 0]
    return {
        "max error": max(found, key=lambda row: row[0], default=(0.0, None))[1],
        "first row above 1e-5": next((seen for error, seen in found if error > SMALL), None),
    }
