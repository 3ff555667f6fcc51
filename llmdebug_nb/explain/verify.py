"""A suspect called again: does it make the error, pass on what it was given, or give something else each time?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmdebug_nb.explain.calls import Call, Calls
from llmdebug_nb.explain.replay import Replayed, is_random, rounding
from llmdebug_nb.explain.runs import NotAgain, Runs
from llmdebug_nb.explain.swap import Swapped, swap

MAKES, PASSES_ON, RANDOM, UNKNOWN = "makes", "passes on", "random", "unknown"
CLEAN = 32.0  # units of rounding: right operators of four models stay below 9, in any dtype
_APART = 8.0  # times golden's own


@dataclass(frozen=True)
class Tested:
    """``kind``: what the call does. ``words``: the evidence, or why it could not be called. ``score``: its own error, in units of rounding."""

    kind: str
    words: str
    score: float = 0.0


def test(call: Call, calls: Calls, runs: Runs) -> Tested:
    """Call the suspect again: an operator on its own inputs, a module of mine on golden's."""
    try:
        return _operator(call, runs) if call.is_operator else _module(call, calls, runs)
    except NotAgain as why:
        return Tested(UNKNOWN, str(why))


def _operator(call: Call, runs: Runs) -> Tested:
    if call.golden is None or call.mine is None:
        raise NotAgain("only one run made this call")
    if call.is_fused:
        raise NotAgain("a part of a kernel can't be called alone")
    golden, mine = Replayed(runs.golden, call.golden), Replayed(runs.mine, call.mine)
    if is_random(mine):
        return Tested(RANDOM, "called twice on the same inputs it gives two results")
    theirs, ours = golden.units(runs), mine.units(runs)
    figures = f"called again alone, mine is {_units(ours)} off float64, golden's {_units(theirs)}"
    if ours > CLEAN and ours > _APART * theirs:
        return Tested(MAKES, figures, ours)
    identical = all(d.verdict == "match" for d in call.inputs)
    if (
        golden.name == mine.name
        and golden.given == mine.given
        and ours <= CLEAN
        and theirs <= CLEAN
        and not identical
    ):
        return Tested(PASSES_ON, f"{figures}: it magnifies what it was given", ours)
    return Tested(UNKNOWN, figures, ours)


def _module(call: Call, calls: Calls, runs: Runs) -> Tested:
    done = swap(call, calls, runs)
    bad = call.bad_output
    total = (
        bad.error
        if bad and bad.error is not None
        else max((d.error or 0.0 for d in call.outputs), default=0.0)
    )
    limit = max((d.limit or 0.0 for d in call.outputs), default=0.0)
    unit = (
        rounding([r.summary.dtype for d in call.outputs for r in (d.pair.golden, d.pair.mine) if r])
        / 2
    )
    if done.random:
        return Tested(RANDOM, "called twice on the same inputs it gives two results")
    words = f"{_how(done)} on golden's inputs it is {done.error:.2g} off, of {total:.2g} in all"
    if bad is not None and done.error <= limit and done.error < 0.5 * total:
        return Tested(PASSES_ON, words, done.error / unit)
    return Tested(MAKES if done.error > limit else UNKNOWN, words, done.error / unit)


def _how(done: Swapped) -> str:
    made = "the live module alone" if done.by == "live" else "its recorded operators made again"
    return f"{made} (without its cache, which is still empty)" if done.cache else made


def _units(units: float) -> str:
    return "infinitely far" if math.isinf(units) else f"{float(f'{units:.2g}'):,g} × eps/2"
