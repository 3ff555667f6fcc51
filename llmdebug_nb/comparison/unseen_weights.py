"""Quantised weights whose values were not recorded: rounding to their steps may be a bug or not.

Dtypes of weights are always recorded. What comes from a module that keeps integers where the other
program keeps floats may be off by anything between nothing and half its size. So a difference that
begins there tells nothing, unless it is larger than that. Nor does one that begins at other weights
that differ: who quantises also moves factors from one weight into the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmdebug_nb.align import quantised
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import module_of, within

ADVICE = "Record both runs with weights=True (in a shell: --weights)"


class Weight(NamedTuple):
    """What is recorded of a weight in any case. ``type``: dtype and shape, ``int8 [64, 64]``.

    ``value``: its fingerprint, "" for none.
    """

    path: str
    slot: str
    type: str
    value: str


class Unseen(NamedTuple):
    """``says``: what is not known. ``decides``: without it nothing can be blamed."""

    says: str = ""
    decides: bool = False


def found(
    differences: Sequence[Difference], golden: Sequence[Weight], mine: Sequence[Weight]
) -> Unseen:
    """Return what is not known of the weights from which on the runs differ."""
    first = next((d for d in differences if d.verdict == "diverged"), None)
    sides = {"golden": _quantised(golden), "mine": _quantised(mine)}
    if first is None or all(sides.values()):
        return Unseen()
    seen = {_module(d, side) for side in sides for d in differences if _is_seen(d)}
    changed = _changed(golden, mine) - seen
    for side, modules in sides.items():
        unseen = {path: dtype for path, dtype in modules.items() if path not in seen}
        of_any = (d.index for d in differences if _is_of(d, side, {*unseen, *changed}))
        if unseen and next(of_any, math.inf) <= first.index:
            path = next(iter(unseen))
            says = (
                f"{len(unseen):,} modules of {side} have quantised weights ({path} {unseen[path]})"
                " whose values were not recorded: rounding to their steps can't be told from a bug"
            )
            is_small = (first.error or 0.0) < constants.PERTURBED
            return Unseen(says, is_small or _is_of(first, side, changed))
    return Unseen()


def _quantised(weights: Iterable[Weight]) -> dict[str, str]:
    """Return the modules that keep integers, or floats of 8 bits, and scales; with the dtype."""
    modules: dict[str, list[Weight]] = {}
    for weight in weights:
        modules.setdefault(weight.path, []).append(weight)
    return {
        path: next(iter(stored))
        for path, own in modules.items()
        if (stored := [d for w in own if (d := w.type.partition(" ")[0]) in quantised.DTYPES])
        and any(quantised.is_scale(w.slot) for w in own)
    }


def _changed(golden: Iterable[Weight], mine: Iterable[Weight]) -> set[str]:
    """Return the modules of both that have a weight of one dtype and shape, but not its values."""
    known = {weight[:3]: weight.value for weight in golden if weight.value}
    return {w.path for w in mine if w.value and known.get(w[:3], w.value) != w.value}


def _is_seen(row: Difference) -> bool:
    """Tell whether the values of a weight were compared."""
    return row.site.role == "weight" and row.error is not None


def _module(row: Difference, side: str) -> str:
    record = row.pair.golden if side == "golden" else row.pair.mine
    return "" if record is None else module_of(record.site.path)


def _is_of(row: Difference, side: str, modules: Iterable[str]) -> bool:
    """Tell whether a tensor is of one of the modules, or of an operator or module inside it."""
    record = row.pair.golden if side == "golden" else row.pair.mine
    return (
        record is not None
        and record.site.role != "weight"
        and any(within(record.site.path, path) for path in modules)
    )
