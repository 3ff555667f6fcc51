"""Run a suspect again: does it make the error, pass on that of its inputs, or is it random?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmdebug_nb.explain.calls import Calls, ComparedCall
from llmdebug_nb.explain.replay import Replayed, is_random, unit
from llmdebug_nb.explain.runs import CannotReplay, Runs
from llmdebug_nb.explain.swap import SwapResult, run_on_golden_inputs

MAKES, PASSES_ON, RANDOM, UNKNOWN = "makes", "passes on", "random", "unknown"
CLEAN = 32.0  # units of rounding: correct operators of four models stay below 9, in any dtype
_APART = 8.0  # mine's own error over golden's, in one operator; more is a bug
_SMALLER = 0.5  # of the error: a module whose own error is below this passes on the rest


@dataclass(frozen=True)
class Tested:
    """What running a call again showed.

    ``kind``: what the call does. ``words``: the evidence, or why it could not be run. ``score``:
    its own error, in units of rounding.
    """

    kind: str
    words: str
    score: float = 0.0


_TWICE = Tested(RANDOM, "called twice on the same inputs it gives two results")


def test(call: ComparedCall, calls: Calls, runs: Runs) -> Tested:
    """Run the suspect again: an operator on its own inputs, mine's module on golden's."""
    try:
        return _operator(call, runs) if call.is_operator else _module(call, calls, runs)
    except CannotReplay as why:
        return Tested(UNKNOWN, str(why))


def _operator(call: ComparedCall, runs: Runs) -> Tested:
    if call.golden is None or call.mine is None:
        raise CannotReplay("only one run made this call")
    if call.is_fused:
        raise CannotReplay("a part of a kernel can't be called alone")
    golden, mine = Replayed(runs.golden, call.golden), Replayed(runs.mine, call.mine)
    if is_random(mine):
        return _TWICE
    theirs, ours = golden.units(runs), mine.units(runs)
    figures = f"called again alone, mine is {_units(ours)} off float64, golden's {_units(theirs)}"
    if ours > CLEAN and ours > _APART * theirs:
        return Tested(MAKES, figures, ours)
    same_call = golden.name == mine.name and golden.arguments == mine.arguments
    identical = all(d.verdict == "match" for d in call.inputs)
    if same_call and ours <= CLEAN and theirs <= CLEAN and not identical:
        return Tested(PASSES_ON, f"{figures}: it magnifies the error of its inputs", ours)
    return Tested(UNKNOWN, figures, ours)


def _module(call: ComparedCall, calls: Calls, runs: Runs) -> Tested:
    done = run_on_golden_inputs(call, calls, runs)
    if done.random:
        return _TWICE
    bad = call.bad_output
    total = max((d.error or 0.0 for d in call.outputs), default=0.0)
    total = bad.error if bad and bad.error is not None else total
    limit = max((d.limit or 0.0 for d in call.outputs), default=0.0)
    records = (r for d in call.outputs for r in (d.pair.golden, d.pair.mine) if r)
    score = done.error / unit([r.summary.dtype for r in records])
    words = f"{_how(done)}, its error is {done.error:.2g}; with mine's own inputs it is {total:.2g}"
    if bad is not None and done.error <= limit and done.error < _SMALLER * total:
        return Tested(PASSES_ON, words, score)
    return Tested(MAKES if done.error > limit else UNKNOWN, words, score)


def _how(done: SwapResult) -> str:
    ran = "the live module alone" if done.by == "live" else "its recorded operators run again"
    cache = " (without its cache, which is still empty)" if done.cache else ""
    return f"{ran}{cache} on golden's inputs"


def _units(units: float) -> str:
    return "infinitely far" if math.isinf(units) else f"{float(f'{units:.2g}'):,g} × eps/2"
