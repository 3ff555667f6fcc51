"""The figures of a tensor over all steps, with as few points as a small picture shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from llmdebug_nb.core.records import Record, Site
from llmdebug_nb.show import wire
from llmdebug_nb.show.tensors import number
from llmdebug_nb.store.run import Run

Point = tuple[int, int, float | None]  # step, row, value


def site_key(site: Site) -> tuple[object, ...]:
    """Return what identifies a site at every step."""
    return site.rank, site.path, site.call, site.phase, site.role, site.slot


def same_site(run: Run, site: Site) -> Iterator[Record]:
    """Yield the records of ``site`` at every step."""
    return run.records(
        rank=site.rank,
        path=site.path,
        call=site.call,
        phase=site.phase,
        role=site.role,
        slot=site.slot,
    )


def line(figure: str, points: Iterable[Point], most: int) -> wire.Line:
    """Return at most ``most`` points, each the largest of equally many; NaN counts as largest."""
    every = list(points)
    stride = max(1, -(-len(every) // max(1, most)))
    kept = [max(every[i : i + stride], key=_size) for i in range(0, len(every), stride)]
    views: list[wire.Point] = [
        {"step": step, "row": row, "value": number(value)} for step, row, value in kept
    ]
    return {"figure": figure, "points": views}


def _size(point: Point) -> float:
    value = point[2]
    return -1.0 if value is None else math.inf if math.isnan(value) else abs(value)
