"""Write a script that replays the blamed call from the two dumps.

The script needs only torch and this package. Its statements are the templates below. What comes
from a dump stands in it as literals, which `_code` alone makes: never as code, nor in a comment, as
some characters end one.
"""

from __future__ import annotations

import keyword
import math
import textwrap
from collections.abc import Mapping, Sequence

import torch

from llmdebug_nb.causes import causes
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.core.paths import module_name
from llmdebug_nb.core.places import scrubbed
from llmdebug_nb.core.printable import printable
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay import arguments, replay
from llmdebug_nb.replay.arguments import Arguments, Tensor
from llmdebug_nb.replay.operators import CannotReplay, by_formula
from llmdebug_nb.replay.runs import Runs, Side

_SCRIPT = '''"""Replays the call that a comparison blames, from the two dumps."""

import torch

import llmdebug_nb as ld

about = (
{about}
)
golden, mine = ld.open_run({golden}), ld.open_run({mine})
in_golden = {at_golden}
in_mine = {at_mine}


def recorded_input(run, site, slot):
    return run.tensor(role="input", slot=slot, **site)


def error(golden, mine):
    """Relative L2 of the rows, each divided by its own size or the median row's."""
    shape = (-1, golden.shape[-1]) if golden.dim() > 1 else (1, -1)
    golden, mine = golden.double().reshape(shape), mine.double().reshape(shape)
    size = golden.norm(dim=1, keepdim=True)
    size = size.clamp_min(float(size.median()) or 1e-300)
    difference, size = ((mine - golden) / size).norm(), (golden / size).norm()
    return float(difference / size if size else difference)


def show(label, golden, mine):
    if golden.shape == mine.shape:
        figure = error(golden, mine)
    else:
        figure = f"shape {{list(golden.shape)}} against {{list(mine.shape)}}"
    print(f"{{label:<56}} {{figure}}")


{calls}
'''

_TENSORS = """def first(result):
    return result if isinstance(result, torch.Tensor) else result[{number}]


def double(x):
    return x.double() if x.is_floating_point() else x"""

_OPERATOR = """def golden_call(run, site, wide=lambda x: x):
    return {golden}


def my_call(run, site, wide=lambda x: x):
    return {mine}


{tensors}


golden_output = golden.tensor(role="output", slot={slot}, **in_golden)
my_output = mine.tensor(role="output", slot={slot}, **in_mine)
with torch.no_grad():
    again, mine_again = first(golden_call(golden, in_golden)), first(my_call(mine, in_mine))
    exact, swapped = first(my_call(mine, in_mine, double)), first(my_call(golden, in_golden))
    show("output, mine against golden:", golden_output, my_output)
    show("golden's call replayed, against golden's record:", golden_output, again)
    show("mine's call replayed, against mine's record:", my_output, mine_again)
    show("mine's call in float64, against mine's record:", exact, my_output)
    show("mine's call on golden's inputs, against golden's record:", golden_output, swapped)"""

_MODULE = """module = None  # to call the module too: model.get_submodule({path})

for slot in {slots}:
    values = recorded_input(golden, in_golden, slot), recorded_input(mine, in_mine, slot)
    show(f"input {{slot}}, mine against golden:", *values)
golden_output = golden.tensor(role="output", slot={slot}, **in_golden)
my_output = mine.tensor(role="output", slot={slot}, **in_mine)
show("output, mine against golden:", golden_output, my_output)


def first(result):
    if isinstance(result, dict):
        result = list(result.values())
    return result if isinstance(result, torch.Tensor) else result[0]


def call(run, site, wide=lambda x: x):
    {call}


if module is not None:
    with torch.no_grad():
        again, swapped = first(call(mine, in_mine)), first(call(golden, in_golden))
        show("the module called again, against mine's record:", my_output, again)
        show("the module on golden's inputs, against golden's record:", golden_output, swapped)"""

# an operator that only one run calls
_ALONE = """def call(run, site, wide=lambda x: x):
    return {call}


{tensors}


made = {side}.tensor(role="output", slot={slot}, **in_{side})
with torch.no_grad():
    again, exact = first(call({side}, in_{side})), first(call({side}, in_{side}, double))
    show("the call that only {side} makes, against its record:", made, again)
    show("the same in float64, against its record:", exact, made)
"""

# one call of one run
_CALL = '''"""Computes one recorded call again, in its own dtype and in float64."""

import torch

import llmdebug_nb as ld

run = ld.open_run({where})
site = {site}


def recorded_input(run, site, slot):
    return run.tensor(role="input", slot=slot, **site)


def call(wide=lambda x: x):
    return {call}


{tensors}


def error(exact, made):
    """Relative L2."""
    exact, made = exact.double(), made.double()
    difference, size = (made - exact).norm(), exact.norm()
    return float(difference / size if size else difference)


recorded = run.tensor(role="output", slot={slot}, **site)
with torch.no_grad():
    exact, again = first(call(double)), first(call())
print("recorded, against float64:", error(exact, recorded))
print("computed here, against float64:", error(exact, again))
'''

_SHOWS = """# the first tensor that differs
golden_tensor = golden.tensor(role={role}, slot={golden_slot}, **{golden_site})
my_tensor = mine.tensor(role={role}, slot={my_slot}, **{my_site})
show({label}, golden_tensor, my_tensor)"""


def script(
    call: ComparedCall, runs: Runs, cause: str, evidence: str, shows: Difference | None = None
) -> str | None:
    """Return the script, or None if the call's tensors were not kept on both sides.

    If only one run calls the operator, the script replays this call alone. It then compares the
    row ``shows``, the first one that differs.
    """
    if call.key.phase != "forward" or (call.one_sided and not call.is_operator):
        return None
    if cause == causes.UPDATED:  # the weights that it would take were not kept
        return None
    try:
        if call.one_sided:
            body = _alone(call, runs, shows)
        else:
            body = _operator(call, runs) if call.is_operator else _module(call, runs)
    except CannotReplay:
        return None
    return _SCRIPT.format(
        about=_about(f"{cause}: {call.op}, step {call.key.step}", evidence),
        golden=_where(runs.golden),
        mine=_where(runs.mine),
        at_golden=_site(call.golden),
        at_mine=_site(call.mine),
        calls=body,
    )


def call_script(side: Side, key: CallKey, slot: str) -> str:
    """Return a script that computes an operator call of one run again.

    ``slot``: of the output that it looks at. Raises CannotReplay.
    """
    call = replay.Replayed(side, key, backward=True)
    if by_formula(call.op):
        raise CannotReplay("its kernel is not run, only its formula")
    tensors = _TENSORS.format(number=int(slot) if slot.isdecimal() else 0)
    where, text = _where(side), _call_text(call)
    return _CALL.format(where=where, site=_site(key), call=text, slot=_code(slot), tensors=tensors)


def _about(*texts: str) -> str:
    """Return what is wrong as lines of literals, each within the width of a page."""
    rows = (
        row for text in texts for row in textwrap.wrap(printable(text), constants.SCRIPT_CHARACTERS)
    )
    return "\n".join(f"    {_code(row)}," for row in rows)


def _operator(call: ComparedCall, runs: Runs) -> str:
    assert call.golden is not None
    assert call.mine is not None
    slot = _slot(call)
    golden, mine = (
        _call_text(replay.Replayed(side, key))
        for side, key in ((runs.golden, call.golden), (runs.mine, call.mine))
    )
    tensors = _TENSORS.format(number=0)
    return _OPERATOR.format(golden=golden, mine=mine, slot=slot, tensors=tensors)


def _alone(call: ComparedCall, runs: Runs, shows: Difference | None) -> str:
    if call.golden is not None:
        name, side, key = "golden", runs.golden, call.golden
    else:
        name, side, key = "mine", runs.mine, call.key
    replayed = replay.Replayed(side, key)
    kept = [r for r in side.records(key, "output") if r.payload is not None and r.kept is None]
    if not kept:
        raise CannotReplay("its output was not kept")
    slot = _code(kept[0].site.slot)
    tensors = _TENSORS.format(number=0)
    body = _ALONE.format(call=_call_text(replayed), side=name, slot=slot, tensors=tensors)
    if shows is None or not _has_values(shows):
        return body
    golden, mine = shows.pair.golden, shows.pair.mine
    assert golden is not None
    assert mine is not None
    s = golden.site
    return body + _SHOWS.format(
        role=_code(s.role),
        golden_slot=_code(s.slot),
        my_slot=_code(mine.site.slot),
        golden_site=_site(s.key),
        my_site=_site(mine.site.key),
        label=_code(printable(f"{s.role} {s.slot} of {s.path}, mine against golden:")),
    )


def _module(call: ComparedCall, runs: Runs) -> str:
    assert call.mine is not None
    records, scalars = runs.mine.records(call.mine, "input"), runs.mine.scalars(call.mine)
    try:
        call_arguments = arguments.arguments_of(records, scalars, without_cache=True)
        code = f"return module({_arguments_text(call_arguments)})"
    except CannotReplay as why:
        code = f"raise NotImplementedError({_code(printable(str(why)))})"
    slots = _code(tuple(d.site.slot for d in call.inputs if _has_values(d)))
    return _MODULE.format(
        path=_code(module_name(call.path)), slots=slots, slot=_slot(call), call=code
    )


def _has_values(row: Difference) -> bool:
    """Tell whether the values of both sides were kept."""
    golden, mine = row.pair.golden, row.pair.mine
    return bool(golden and mine and golden.payload and mine.payload)


def _slot(call: ComparedCall) -> str:
    """Return the slot of an output with values, as code. Raises CannotReplay."""
    rows: Sequence[Difference | None] = (call.bad_output, *call.outputs)
    kept = [row for row in rows if row is not None and _has_values(row)]
    if not kept:
        raise CannotReplay("its output was not kept")
    return _code(kept[0].site.slot)


def _where(side: Side) -> str:
    run = side.run
    if run.path is None:
        return _code(run.label)
    local = run.where == str(run.path)
    return _code(scrubbed(str(run.path.resolve())) if local else run.where)


def _site(key: CallKey | None) -> str:
    """Return the keywords of a call, as code."""
    if key is None:
        return "None  # it does not make this call"
    return f"dict({_keywords(key._asdict())})"


def _call_text(call: replay.Replayed) -> str:
    """Return a call as code. Its name is one that torch has, never a text of the dump."""
    return f"{call.name}({_arguments_text(call.arguments)})"


def _arguments_text(call_arguments: Arguments) -> str:
    args, kwargs = call_arguments
    return ", ".join([*map(_code, args), *([_keywords(kwargs)] if kwargs else [])])


def _keywords(values: Mapping[str, object]) -> str:
    """Return arguments by keyword; those whose names can't be keywords in a dict."""
    if all(name.isascii() and name.isidentifier() for name in values) and not any(
        map(keyword.iskeyword, values)
    ):
        return ", ".join(f"{name}={_code(value)}" for name, value in values.items())
    return f"**{_code(dict(values))}"


def _code(value: object) -> str:
    """Return a value as Python code: the only place where what a dump holds becomes code.

    Raises:
        CannotReplay: a value of another kind.
    """
    if isinstance(value, Tensor):
        return f"wide(recorded_input(run, site, {str(value)!a}))"
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        items = (f"{_code(name)}: {_code(part)}" for name, part in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, slice):
        return f"slice({_code(value.start)}, {_code(value.stop)}, {_code(value.step)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!a})"
    if isinstance(value, complex):
        return f"complex({_code(value.real)}, {_code(value.imag)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!a})"
    if isinstance(value, torch.dtype):
        return f"torch.{DTYPE_NAMES[value]}"
    if value is ...:
        return "..."
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return ascii(value)
    raise CannotReplay(f"a {type(value).__name__} has no literal")
