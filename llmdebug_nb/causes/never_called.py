"""Modules that golden calls, and that mine has and never calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from llmdebug_nb.causes import repairs
from llmdebug_nb.core.paths import module_of, within
from llmdebug_nb.graph.compared_calls import Calls
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs, Scalar, Side
from llmdebug_nb.replay.swap import LiveCall

_NUMBER = re.compile(r"\d+")


class NeverCalled(NamedTuple):
    """Golden's call of a module. ``words``: a clause that names mine's."""

    call: FlowCall
    words: str


def never_called(
    region: Region, calls: Calls, flows: tuple[Flow, Flow], runs: Runs
) -> NeverCalled | None:
    """Return the first module of a region that mine has, too, and never calls.

    Golden's live model without these modules must come closer to mine's result, where that can be
    computed.
    """
    inside = [call for call in region.golden if call.around is not None]
    called = {p for c in flows[1].calls.values() for p in (c.key.path, module_of(c.key.path))}
    for around in dict.fromkeys(each for call in inside for each in _around(call)):
        found = {c: path for c in around.inner if (path := _own(c, flows, runs, called))}
        told = _without(list(found), calls, runs) if found else ""
        if told != "":
            call, path = next(iter(found.items()))
            words = f"golden calls {call.key.path}; mine has {path} and never calls it"
            return NeverCalled(call, f"{words}{told or ' (not tested)'}")
    return None


def _around(call: FlowCall) -> Iterator[FlowCall]:
    """Yield the calls around a call, the innermost first."""
    while call.around is not None:
        call = call.around
        yield call


def _own(call: FlowCall, flows: tuple[Flow, Flow], runs: Runs, called: Collection[str]) -> str:
    """Return the path of mine's module that golden's call would be of, "" for none.

    Nothing of it is called or used, and it holds the same weights, or others of the same sizes
    under the same name. What gives another shape than it takes can't be left out.
    """
    shapes = {record.summary.shape for record in (*call.inputs, *call.outputs)}
    if call.is_operator or len(shapes) != 1 or any(map(flows[0].agrees, call.outputs)):
        return ""
    sizes, prints = _held(runs.golden, call.key.path)
    for path in runs.mine.nodes if sizes else ():
        if _NUMBER.findall(path) != _NUMBER.findall(call.key.path):
            continue
        own_sizes, own_prints = _held(runs.mine, path)
        named = path.rpartition(".")[2] == call.key.path.rpartition(".")[2]
        if not (named and own_sizes == sizes) and not (prints and own_prints == prints):
            continue
        used = any(within(each, path) or each == path for each in called)
        if not used and not any(
            flows[1].taken_by.get(fingerprint) for _, fingerprint in own_prints
        ):
            return path
    return ""


def _held(side: Side, path: str) -> tuple[list[list[int]], list[Scalar]]:
    """Return the sizes and the fingerprints of the weights of a module and those in it."""
    paths = [each for each in side.nodes if each == path or within(each, path)]
    return (
        [sizes for each in paths for sizes in side.nodes[each].params.values()],
        [found for each in paths for found in side.fingerprints.get(each, {}).values()],
    )


def _without(left_out: list[FlowCall], calls: Calls, runs: Runs) -> str | None:
    """Return what golden gives without some modules, "" for no matter; None if that is unknown."""
    around = left_out[0].around
    assert around is not None
    holder = calls.at(0, around.key)
    try:
        live = LiveCall(runs.golden, around.key, runs.golden_module)
        live.check(max((d.limit or 0.0 for d in holder.outputs), default=0.0), runs)
        paths = [c.key.path.removeprefix(around.key.path).removeprefix(".") for c in left_out]
        left = repairs.left(holder.outputs, runs, golden=live.results(idle=paths))
    except CannotReplay:
        return None
    return left.words("without it" if len(paths) == 1 else "without them", "golden", "mine")
