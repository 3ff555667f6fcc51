"""Repairs: what one changed thing of mine does to its result.

A change that gives golden's result is a cause. It is computed: an operator runs again on mine's own
tensors, a live module on golden's. What can't be computed is told as not tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from llmdebug_nb.causes.scalars import Differing
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.kernels.relative import ratio
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.replay.swap import run_on_golden_inputs

Results = Mapping[str, torch.Tensor]


class Tried(NamedTuple):
    """What a change does. ``mends``: gives golden's result; None if that could not be computed.

    ``needed``: the settings that are enough. ``why``: why nothing could be computed.
    """

    mends: bool | None
    needed: Sequence[Differing] = ()
    why: str = ""


def settings(call: ComparedCall, differing: Sequence[Differing], runs: Runs) -> Tried:
    """Give mine's call golden's settings: each alone, and then all of them."""
    several = [[each] for each in differing] if len(differing) > 1 else []
    run = _operator if call.is_operator else _module
    why, computed = "", False
    for some in (*several, list(differing)):
        try:
            if run(call, some, runs):
                return Tried(True, some)
            computed = True
        except CannotReplay as reason:
            why = str(reason)
    return Tried(False) if computed else Tried(None, (), why)


class Left(NamedTuple):
    """What is left of an error after a change. ``mends``: nothing but noise.

    ``error``: the largest of the results. ``share``: of the error before, how much is left.
    """

    mends: bool
    error: float
    share: float

    def words(self, change: str, own: str, other: str) -> str:
        """Return an addition on what a change did to a result; "" if it did not help."""
        if self.mends:
            return f", and {change} {own}'s result is {other}'s"
        if self.share < constants.PASSED_ON_SHARE:
            return (
                f", and {change} {own}'s result comes closer to {other}'s, within {self.error:.2g}"
            )
        return ""


def left(
    rows: Sequence[Difference],
    runs: Runs,
    golden: Results | None = None,
    mine: Results | None = None,
) -> Left:
    """Return what is left of the error of rows.

    ``golden``, ``mine``: new results by slot; left out: what was recorded.

    Raises:
        CannotReplay: no result can be compared.
    """
    mends, worst, share, compared = True, 0.0, 0.0, False
    for row in (d for d in rows if d.pair.golden is not None and d.pair.mine is not None):
        records = row.pair.golden, row.pair.mine
        sides = zip(records, (golden, mine), (runs.golden, runs.mine), strict=True)
        values = [
            side.load(record) if new is None else new.get(record.site.slot)
            for record, new, side in sides
            if record is not None
        ]
        theirs, ours = values
        if theirs is None or ours is None:
            continue
        fit = row.pair.fit
        theirs, ours = fit(theirs, ours) if fit is not None else _ends(theirs, ours)
        if theirs.shape != ours.shape:
            return Left(False, math.inf, math.inf)
        error, compared = runs.error(theirs, ours), True
        rounding = constants.OPERATORS_EPSILONS * epsilon(row.pair.either.summary.dtype)
        limit = min(max(row.limit or 0.0, rounding), constants.OTHER_VALUES)
        if row.differs:
            limit = min(limit, constants.PASSED_ON_SHARE * (row.error or 0.0))
            share = max(share, ratio(error, row.error or 0.0))
        mends, worst = mends and error <= limit, max(worst, error)
    if not compared:
        raise CannotReplay("no result can be compared")
    return Left(mends, worst, share)


def _ends(theirs: torch.Tensor, ours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the longer of two tensors to its end: a program may give the last tokens alone."""
    if theirs.dim() != ours.dim():
        return theirs, ours
    sizes = [min(a, b) for a, b in zip(theirs.shape, ours.shape, strict=True)]
    cut = [tuple(slice(n - size, n) for n, size in zip(x.shape, sizes, strict=True))
           for x in (theirs, ours)]  # fmt: skip
    return theirs[cut[0]], ours[cut[1]]


def _operator(call: ComparedCall, some: Sequence[Differing], runs: Runs) -> bool:
    """Tell whether an operator of mine gives golden's result with golden's scalars."""
    assert call.mine is not None
    scalars = dict(runs.mine.scalars(call.mine))
    for each in some:
        scalars.pop(each.slot, None)
        if each.value[0]:
            scalars[each.slot] = each.value
    again = Replayed(runs.mine, call.mine, scalars=scalars)
    results = again.run_on(arguments.loader(runs.mine, again.records), strict=False)
    return left(call.outputs, runs, mine=results).mends


def _module(call: ComparedCall, some: Sequence[Differing], runs: Runs) -> bool:
    """Tell whether mine's live module gives golden's result with golden's settings."""
    values = {each: arguments.value(each.slot, each.value) for each in some}
    attributes = {each.slot: value for each, value in values.items() if not each.given}
    keywords = {each.slot: value for each, value in values.items() if each.given}
    done = run_on_golden_inputs(call, runs, attributes, keywords)
    limits = [d.limit or 0.0 for d in call.outputs]
    worst = max((d.error or 0.0 for d in call.outputs), default=0.0)
    limit = min(max(limits, default=0.0), constants.PASSED_ON_SHARE * worst)
    return done.error <= limit
