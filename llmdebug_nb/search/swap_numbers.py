"""A number that the two programs have otherwise, whatever operators take it.

One program gives eps to a norm, the other one adds it in a formula. So it is not asked what takes a
number, but what is made with it: a call of mine gives what golden computes once it takes golden's.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.torch_internals import takes_fractions
from llmdebug_nb.graph.compared_calls import kind_of_operator
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.replay import arguments
from llmdebug_nb.replay.operators import CannotReplay, bare_name, operator
from llmdebug_nb.replay.replay import Replayed
from llmdebug_nb.replay.runs import Runs, Scalar, Side
from llmdebug_nb.search.computed_elsewhere import Known

_NUMBERS = ("float", "int")


def differing(
    golden: Sequence[FlowCall], mine: FlowCall, known: Known, runs: Runs
) -> tuple[FlowCall, str, str] | None:
    """Return golden's call with a number that mine's call should take, and the texts of both.

    ``golden``: its calls, ``known``: what they compute, which is not what mine's call gives.
    """
    theirs: dict[float, tuple[FlowCall, str]] = {}
    for call in golden:
        for text in _numbers(runs.golden.scalars(call.key)).values():
            theirs.setdefault(float(text), (call, text))
    own = _defaults(mine.outputs[0].op, runs.mine.scalars(mine.key)) if mine.outputs else {}
    inverses = [(1 / value, said) for value, said in theirs.items() if value]
    usable = [(v, said) for v, said in (*theirs.items(), *inverses) if math.isfinite(v)]
    slots = _exchanged(mine.outputs[0].op, own) if own else {}
    tried = itertools.product(slots.items(), usable)
    # each is a replay
    for (slot, text), (value, said) in itertools.islice(tried, constants.REGION_CALLS):
        if math.isclose(float(text), value, rel_tol=constants.SAME_SCALAR):
            continue
        if _gives(runs.mine, mine, own | {slot: _scalar(value)}, known):
            return *said, text
    return None


def own(
    golden: FlowCall, mine: FlowCall, flows: tuple[Flow, Flow], runs: Runs
) -> tuple[str, str] | None:
    """Return the texts of a number with which mine's call gives golden's result on its own tensors.

    The two are one operator. What it takes does no harm then, however much it differs.
    """
    if kind_of_operator(golden.outputs[0].op) != kind_of_operator(mine.outputs[0].op):
        return None
    texts = [
        list(s.values()) for s in (runs.golden.scalars(golden.key), runs.mine.scalars(mine.key))
    ]
    if texts[0] == texts[1]:
        return None
    limit = constants.OPERATORS_EPSILONS * epsilon(mine.outputs[0].summary.dtype)
    known = Known([golden], 0, flows, runs, min(limit, constants.OTHER_VALUES))
    found = differing([golden], mine, known, runs)
    return None if found is None else found[1:]


def _gives(side: Side, call: FlowCall, scalars: dict[str, Scalar], known: Known) -> bool:
    """Tell whether a call gives what the other program computes, once it takes these scalars."""
    try:
        again = Replayed(side, call.key, scalars=scalars)
        results = again.run_on(arguments.loader(side, again.records), strict=False)
        inputs = [side.load(record) for record in again.records]
    except CannotReplay:
        return False
    return any(
        known.is_given(result, whole=True) and _is_made(result, inputs)
        for result in results.values()
    )


def _is_made(result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether a call makes something of its inputs: not a constant, nor one of them again.

    A factor of 1 gives what it takes, which both programs may have, whatever the factor is.
    """
    if not inputs or not result.numel() or bool((result == result.flatten()[0]).all()):
        return False
    return not any(torch.equal(result, x) for x in inputs if x.shape == result.shape)


def _numbers(scalars: dict[str, Scalar]) -> dict[str, str]:
    """Return the finite numbers among scalars, by slot, as texts."""
    texts = {slot: text for slot, (kind, text) in scalars.items() if kind in _NUMBERS and text}
    return {slot: text for slot, text in texts.items() if math.isfinite(float(text))}


def _exchanged(op: str, scalars: dict[str, Scalar]) -> dict[str, str]:
    """Return the numbers that a call may take another one for, by slot, as texts.

    Not so lengths, axes and counts: kernels trust some of them, and one that divides by a number
    of heads of 0 ends the process.
    """
    bare = bare_name(op)
    of_python = op == f"Tensor.__{bare}__" and not bare.endswith("item")
    return {
        slot: text
        for slot, text in _numbers(scalars).items()
        if of_python
        or scalars[slot][0] == "float"
        or takes_fractions(bare, slot.removeprefix("kwargs."))
    }


def _scalar(value: float) -> Scalar:
    return ("int", str(int(value))) if value == int(value) else ("float", repr(value))


def _defaults(op: str, given: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return the scalars of a call, with the fractions that it was not given: they are defaults."""
    try:
        parameters = list(inspect.signature(operator(op)[1]).parameters.values())
    except (CannotReplay, TypeError, ValueError):  # written in C: no signature
        return dict(given)
    names = [p.name for at, p in enumerate(parameters) if str(at) not in given]
    own = {p.name: p.default for p in parameters if isinstance(p.default, float)}
    added = {f"kwargs.{name}": own[name] for name in names if name in own}
    return {slot: ("float", repr(value)) for slot, value in added.items()} | dict(given)
