"""Replay a suspect: does it make the error, pass on the error of its inputs, or is it random?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.torch_internals import draws
from llmdebug_nb.graph.compared_calls import Calls, ComparedCall
from llmdebug_nb.replay.operators import CannotReplay, bare_name
from llmdebug_nb.replay.own_error import own_error
from llmdebug_nb.replay.replay import Replayed, is_random, unit
from llmdebug_nb.replay.runs import Runs
from llmdebug_nb.replay.swap import SwapResult, run_on_golden_inputs

_RIGHT = ("match", "within_noise")
MAKES, PASSES_ON, RANDOM, UNKNOWN = "makes", "passes on", "random", "unknown"


@dataclass(frozen=True)
class Tested:
    """The result of a replay.

    ``kind``: `MAKES`, `PASSES_ON`, `RANDOM` or `UNKNOWN`. ``words``: the evidence, or why the
    call could not be replayed. ``score``: the call's own error, in units of rounding.
    """

    kind: str
    words: str
    score: float = 0.0


_TWICE = Tested(
    RANDOM,
    "two calls on the same inputs give two results, and nothing else differs between the runs",
)
_DRAWN = Tested(RANDOM, "both programs draw random numbers in this step, and not the same ones")


def test(call: ComparedCall, runs: Runs) -> Tested:
    """Replay an operator on its own inputs, or run mine's module on golden's inputs.

    Where that tells nothing, a module may differ by the random numbers that it draws.
    """
    try:
        tested = _operator(call, runs) if call.is_operator else _module(call, runs)
    except CannotReplay as why:
        tested = Tested(UNKNOWN, str(why))
    return (by_chance(call, runs) or tested) if tested.kind == UNKNOWN else tested


def by_chance(call: ComparedCall, runs: Runs) -> Tested | None:
    """Return why a call may differ by the random numbers in it alone; None if not."""
    if call.is_operator:
        may = all(op is not None and draws(bare_name(op)) for op in call.ops)
    else:
        may = runs.trains(call.golden, call.mine)
    return _DRAWN if may and runs.drew_others(call.key) else None


def passes_on(call: ComparedCall, runs: Runs) -> bool:
    """Tell whether a replay proves that a call adds nothing but rounding to what it is given."""
    try:
        if call.is_operator:
            return _operator(call, runs).kind == PASSES_ON
        done = run_on_golden_inputs(call, runs)
    except CannotReplay:
        return False
    return not done.random and _score(done, call) <= 2 * constants.OPERATORS_EPSILONS


def is_rounding(row: Difference, runs: Runs, calls: Calls | None) -> bool:
    """Tell whether a row differs only as the two programs round: a replay proves it.

    ``calls``: of the rows, None if none is of modules. If golden's live module makes of what mine's
    takes what mine makes, within the row's limit, mine makes no error there.
    """
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or row.limit is None or golden.site.phase != "forward":
        return False
    if is_operator(golden.site.path) and is_operator(mine.site.path):
        return golden.site.role == "output" and _is_rounding_of_operators(row, row.limit, runs)
    call = None if calls is None else calls.of(row)
    if call is None or calls is None:
        return False
    maker = call if row.site.role == "output" else calls.holder(call)
    if maker is None:
        return False
    inside = [each for each in calls.inside(maker) if each.span[1] < row.index]
    taken = [*maker.inputs, *(d for each in inside for d in each.outputs)]
    if not all(d.verdict in _RIGHT and not d.follows for d in taken):
        return False
    try:
        return own_error(maker, inside, row, runs) <= row.limit
    except CannotReplay:
        return False


def _is_rounding_of_operators(row: Difference, limit: float, runs: Runs) -> bool:
    """Tell whether two operators only round, by a replay in float64.

    Each gives what it should on its own inputs, within its rounding; and what both should give is
    the same within the limit. One operator may magnify the noise of its inputs more, as far as
    another draw of that noise may go.
    """
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    assert golden is not None
    assert mine is not None
    try:
        sides = zip((runs.golden, runs.mine), (golden, mine), strict=True)
        calls = [Replayed(side, record.site.key) for side, record in sides]
        if max(call.units(runs) for call in calls) > constants.OPERATOR_EPSILONS:
            return False
        exact = [
            call.run(wide=True)[record.site.slot]
            for call, record in zip(calls, (golden, mine), strict=True)
        ]
        theirs, ours = exact if fit is None else fit(*exact)
        draws = constants.CALIBRATED if calls[0].name == calls[1].name else 1.0
        return runs.error(theirs, ours) <= draws * limit
    except (CannotReplay, CorruptDumpError, ValueError, KeyError):
        return False


def _score(done: SwapResult, call: ComparedCall) -> float:
    records = (r for d in call.outputs for r in (d.pair.golden, d.pair.mine) if r)
    return done.error / unit([r.summary.dtype for r in records])


def _operator(call: ComparedCall, runs: Runs) -> Tested:
    if call.golden is None or call.mine is None:
        raise CannotReplay("only one run made this call")
    if call.is_fused:
        raise CannotReplay("a part of a kernel can't be called alone")
    golden, mine = Replayed(runs.golden, call.golden), Replayed(runs.mine, call.mine)
    if is_random(mine):
        return _TWICE
    of_golden, of_mine = golden.units(runs), mine.units(runs)
    figures = f"replayed alone, mine is {_units(of_mine)} off float64, golden {_units(of_golden)}"
    if of_mine > constants.OPERATOR_EPSILONS and of_mine > constants.OWN_ERROR_RATIO * of_golden:
        return Tested(MAKES, figures, of_mine)
    same_call = golden.name == mine.name and golden.arguments == mine.arguments
    identical = all(d.verdict == "match" for d in call.inputs)
    if (
        same_call
        and of_mine <= constants.OPERATOR_EPSILONS
        and of_golden <= constants.OPERATOR_EPSILONS
        and not identical
    ):
        return Tested(PASSES_ON, f"{figures}: it magnifies the error of its inputs", of_mine)
    return Tested(UNKNOWN, figures, of_mine)


def _module(call: ComparedCall, runs: Runs) -> Tested:
    done = run_on_golden_inputs(call, runs)
    if done.random:
        return _TWICE
    bad = call.bad_output
    total = max((d.error or 0.0 for d in call.outputs), default=0.0)
    total = bad.error if bad and bad.error is not None else total
    limit = max((d.limit or 0.0 for d in call.outputs), default=0.0)
    score = _score(done, call)
    cache = " (without its cache, which was still empty)" if done.cache else ""
    words = f"the live module{cache}, run alone on golden's inputs: error {done.error:.2g}, "
    words += f"against {total:.2g} on mine's own inputs"
    if bad is not None and done.error <= limit and done.error < constants.PASSED_ON_SHARE * total:
        return Tested(PASSES_ON, words, score)
    return Tested(MAKES if done.error > limit else UNKNOWN, words, score)


def _units(units: float) -> str:
    return "infinitely far" if math.isinf(units) else f"{float(f'{units:.2g}'):,g} × eps/2"
