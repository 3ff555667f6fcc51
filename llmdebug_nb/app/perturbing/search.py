"""Which units are sensitive: all at once first, then halves of what moves the result most."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from llmdebug_nb.core.perturbations import Moved, Unit, common_path

Units = tuple[Unit, ...]
Measure = Callable[[Units], Moved]


def most_runs(count: int, top: int | None, few: bool = False) -> int:
    """Return how many runs `search` takes at most for so many units."""
    return count if count <= 1 else 1 + _runs(count, top, few)


def _runs(count: int, top: int | None, few: bool) -> int:
    """Return the most runs after the first: for each unit, or for ``top`` of them by halving.

    Halving may lead astray once.
    """
    alone, halving = count, math.inf
    if top is not None:
        halving = 2 * (top + 1) * math.ceil(math.log2(count))
    return int(min(2 * count - 2 if few else alone, halving))


def search(
    units: Sequence[Unit], measure: Measure, top: int | None, spread: float, few: bool = False
) -> Iterator[list[Moved]]:
    """Yield the rows that are known, each unit once, after each run; the last ones are the result.

    Random errors add up as squares: a group moves the result about as far as its units together,
    and farther than each. So what moves little is left as a group.

    Args:
        units: in execution order.
        measure: runs the program with some of them perturbed.
        top: so many of the farthest moved are measured alone; None: all.
        spread: a group that moves no farther is left alone.
        few: of many units, few move anything at all.
    """
    if not units:
        return
    whole = measure(tuple(units))
    yield [whole]
    if len(units) == 1 or (whole.moved is not None and whole.moved <= spread):
        return
    runs = _runs(len(units), top, few)
    if runs >= len(units) and not few:
        yield from _all(units, measure)
    else:
        yield from _halves(whole, measure, top or len(units), spread, runs)


def _all(units: Sequence[Unit], measure: Measure) -> Iterator[list[Moved]]:
    rows: list[Moved] = []
    for at, unit in enumerate(units):
        rows.append(measure((unit,)))
        left = tuple(units[at + 1 :])
        yield [*rows, Moved(rows[0].kind, left, None, problem=NOT_REACHED)] if left else rows


NOT_REACHED = "interrupted before it was measured"


def _halves(
    whole: Moved, measure: Measure, top: int, spread: float, runs: int
) -> Iterator[list[Moved]]:
    """Split what moves the result most, until enough units are known alone."""
    order = itertools.count()
    groups = [(_priority(whole), next(order), whole)]
    alone: list[Moved] = []
    while groups and runs > 1 and len(alone) < top:
        _, _, row = heapq.heappop(groups)
        if row.alone:
            alone.append(row)
            continue
        if row.moved is not None and row.moved <= spread:
            heapq.heappush(groups, (_priority(row), next(order), row))
            return
        for half in halved(row.units):
            made = measure(half)
            runs -= 1
            heapq.heappush(groups, (_priority(made), next(order), made))
        yield [*alone, *(each for _, _, each in groups)]


def _priority(row: Moved) -> float:
    """Return what is split first: what can't be run, then what moves the result most."""
    if row.moved is None:
        return math.inf if row.alone else -math.inf
    return -row.rank


def halved(units: Units) -> tuple[Units, Units]:
    """Split units in two, at the border of two modules next to the middle if there is one."""
    inside = len(common_path(units).split(".")) if common_path(units) else 0

    def part(unit: Unit) -> str:
        names = unit.path.partition("/")[0].split(".")
        return names[inside] if len(names) > inside else ""

    borders = [at for at in range(1, len(units)) if part(units[at]) != part(units[at - 1])]
    middle = len(units) // 2
    at = min(borders, key=lambda border: abs(border - middle), default=middle)
    return units[:at], units[at:]
