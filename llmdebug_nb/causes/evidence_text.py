"""Clauses of evidence: how far the inputs of a call agree, and how a row differs."""

from __future__ import annotations

from collections.abc import Sequence

from llmdebug_nb.align.batch_layout import may_be_tokens, token_ids
from llmdebug_nb.causes.tensor_kinds import input_name, slots
from llmdebug_nb.comparison.differences import EXPECTED, Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.paths import any_layer, module_of
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.graph.flow import AGREES, Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.relation import neighbours
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Runs


def of_inputs(call: ComparedCall) -> str:
    """Return a clause on how far the inputs agree."""
    other = [d for d in call.inputs if d.verdict not in AGREES]
    if other:
        return f"it was called with other arguments: {slots(other)}"
    worst = max((d.error or 0.0 for d in call.inputs), default=0.0)
    if any(d.verdict == EXPECTED for d in call.inputs):
        return f"its inputs differ as expected (error {worst:.2g})"
    if more := [d for d in call.inputs if takes_more(d)]:
        return f"mine takes what golden takes, and more: {of_more(more)}"
    if worst == 0.0:
        return "its input tensors are identical"
    return f"its inputs agree (error {worst:.2g})"


def of_other_tensors(golden: Sequence[ComparedCall], mine: Sequence[ComparedCall]) -> str:
    """Return a clause on two chains that end with one operator: where, and what mine's alone takes.

    That may be a weight which is made of several of golden's.
    """
    theirs, ours = (
        ", ".join(dict.fromkeys(call.module or "the model" for call in side))
        for side in (golden, mine)
    )
    alone = [d.site.slot for d in mine[-1].inputs if d.pair.golden is None]
    words = f"golden computes it in {theirs}, mine in {ours}"
    if not alone:
        return words
    return f"{words}; nothing of golden answers to what mine takes as input {' and '.join(alone)}"


def takes_more(row: Difference) -> bool:
    """Tell whether mine's call takes more than what golden's takes: tokens, or repetitions."""
    golden, mine, fit = row.pair.golden, row.pair.mine, row.pair.fit
    if golden is None or mine is None or fit is None or row.verdict not in AGREES:
        return False
    if mine.summary.numel <= golden.summary.numel:
        return False
    return fit.shared or fit.places(1, mine.summary.shape) is not None


def of_more(rows: Sequence[Difference]) -> str:
    """Return the shapes of what mine takes more of: ``input 1 is 2x11 there and 2x6 in golden``."""
    shapes = [
        f"{input_name(d)} is {'x'.join(map(str, d.pair.mine.summary.shape))} there and "
        f"{'x'.join(map(str, d.pair.golden.summary.shape))} in golden"
        for d in rows
        if d.pair.golden is not None and d.pair.mine is not None
    ]
    return ", ".join(shapes[: constants.NAMES_SHOWN])


def of_token_ids(row: Difference, runs: Runs) -> str:
    """Return a clause on the first token that differs; "" if a row has no token ids or values."""
    golden, mine = row.pair.golden, row.pair.mine
    if golden is None or mine is None or not all(map(may_be_tokens, (golden, mine))):
        return ""
    if token_ids([golden]) is None:
        return ""
    try:
        theirs, ours = runs.golden.load(golden), runs.mine.load(mine)
    except CannotReplay:
        return ""
    theirs, ours = (ids.reshape(-1, ids.shape[-1]) for ids in (theirs, ours))
    if not theirs.numel() or not ours.numel():
        return ""
    rows, tokens = (min(sizes) for sizes in zip(theirs.shape, ours.shape, strict=True))
    apart = (theirs[:rows, :tokens] != ours[:rows, :tokens]).nonzero()
    sizes = [f"{ids.shape[0]} × {ids.shape[1]}" for ids in (theirs, ours)]
    shapes = "" if sizes[0] == sizes[1] else f" (golden has {sizes[0]} tokens, mine {sizes[1]})"
    if not len(apart):
        return shapes.strip(" ()")
    line, at = apart[0].tolist()
    where = f"token {at} of {theirs.shape[1]}" + (f" in row {line}" if rows > 1 else "")
    first = f"{where}: {int(theirs[line, at])} in golden, {int(ours[line, at])} in mine"
    more = f"; {len(apart):,} tokens differ" if len(apart) > 1 else ""
    return f"{first}{more}{shapes}"


def of_operators(calls: Sequence[ComparedCall], side: int) -> str:
    """Return the operators of golden's (0) or mine's (1) chain: of a long one, its two ends."""
    names, most = [call.ops[side] or call.op for call in calls], constants.NAMES_SHOWN
    if len(names) <= 2 * most:
        return ", ".join(names)
    first, last = ", ".join(names[:most]), ", ".join(names[-most:])
    return f"{first}, … {last} ({len(names)} calls)"


def of_numbers(region: Region) -> str:
    """Return a clause on the number that the two calls of a region have otherwise."""
    assert region.numbers is not None
    theirs, ours = (calls[0].outputs[0].op for calls in (region.golden, region.mine))
    golden, mine = region.numbers
    words = f"{ours} takes {mine} in mine where {theirs} takes {golden} in golden"
    return f"{words}, and with golden's number it gives what golden computes"


def of_siblings(key: CallKey, flow: Flow, owner: str) -> str:
    """Return an addition on the layers where the other program computes what a call gives."""
    place, other = (any_layer(key.path), key.call), "mine" if owner == "golden" else "golden"
    modules = [
        module_of(call.key.path)
        for call in flow.calls.values()
        if call.key[:4] == key[:4]
        and (any_layer(call.key.path), call.key.call) == place
        and call.outputs
        and all(map(flow.agrees, call.outputs))
    ]
    if not modules:
        return ""
    more = f" and {len(modules) - 2} more" if len(modules) > 2 else ""
    return f". {other.capitalize()} does so too in {', '.join(modules[:2])}{more}, but not here"


def of_missing(region: Region, golden: Flow) -> str:
    """Return a clause on the tensor of golden that mine takes nowhere; "" if it takes all."""
    if region.missing is None:
        return ""
    name, call = neighbours.name(golden, region.missing), region.golden[0]
    words = f"{call.outputs[0].op} in golden is made with {name}, which mine does not take there"
    return f"in {module_of(call.key.path) or 'the model'}: {words}; {of_difference(region.row)}"


def of_expected(entering: Sequence[Difference], behind_tie: bool = False) -> str:
    """Return an addition on the expected differences that enter a region; "" if there are none.

    ``behind_tie``: another choice at a near tie makes them.
    """
    if not entering:
        return ""
    worst = max(entering, key=lambda d: d.error or 0.0)
    where, error = worst.site.path or "the model", worst.error or 0.0
    if behind_tie:
        text = f"it stands behind a near tie, whose effect enters (error {error:.2g} at {where})"
        return f"; {text} and does not explain it"
    return (
        f"; what enters differs as expected (error {error:.2g} at {where}). That explains no error "
        "of this size, and no replay shows that it only follows"
    )


def of_difference(row: Difference) -> str:
    """Return a clause on how a row differs."""
    s = row.site
    if row.verdict == "unmatched":
        return row.reason or "only one run has it"
    what = {
        ("backward", "grad"): "the gradient of parameter",
        ("backward", "output"): "the gradient of input",
        ("forward", "input"): "input",
        ("forward", "weight"): "parameter",
    }
    text = f"{what.get((s.phase, s.role), 'output')} {s.slot} "
    if row.error == 0.0:
        return f"{text}is equal"
    text += "differs"
    if row.error is None or not row.metrics:
        return f"{text}: {row.reason}"
    return f"{text} by {row.error:.2g} (relative L2), {_times(row)}"


def _times(row: Difference) -> str:
    if not row.limit or row.error is None or row.error == float("inf"):
        return f"limit {row.limit or 0.0:.2g}"
    if row.follows:
        return f"within its limit of {row.limit:.2g} only because earlier tensors differ"
    if row.error < row.limit:
        return f"within its limit of {row.limit:.2g}"
    times = row.error / row.limit
    figure = f"{float(f'{times:.2g}'):,.0f}" if times < constants.COUNTED_OUT else f"{times:.0e}"
    return f"{figure} times the limit"
