"""A script that makes the blamed call again from the two dumps: nothing in it but torch and this package."""

from __future__ import annotations

import math
from typing import Any

import torch

from llmdebug_nb.core.findings import Difference
from llmdebug_nb.explain import arguments, replay
from llmdebug_nb.explain.arguments import Tensor
from llmdebug_nb.explain.calls import Call, Key
from llmdebug_nb.explain.runs import NotAgain, Runs, Side

_SCRIPT = '''"""{title}

{evidence}
"""

import torch

import llmdebug_nb as ld

golden, mine = ld.open_run({golden}), ld.open_run({mine})
in_golden = {at_golden}
in_mine = {at_mine}


def given(run, site, slot):
    return run.tensor(role="input", slot=slot, **site)


def error(golden, mine):
    """Relative L2."""
    golden, mine = golden.double(), mine.double()
    return float((mine - golden).norm() / golden.norm()) if golden.norm() else float((mine - golden).norm())


def say(what, golden, mine):
    print(f"{{what:<56}} {{error(golden, mine) if golden.shape == mine.shape else f'shape {{list(golden.shape)}} against {{list(mine.shape)}}'}}")


{calls}
'''

_OPERATOR = """def golden_call(run, site, wide=lambda x: x):
    return {golden}


def my_call(run, site, wide=lambda x: x):
    return {mine}


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def double(x):
    return x.double() if x.is_floating_point() else x


theirs, ours = golden.tensor(role="output", slot={slot}, **in_golden), mine.tensor(role="output", slot={slot}, **in_mine)
with torch.no_grad():
    say("output, mine against golden:", theirs, ours)
    say("golden's call again, against what golden recorded:", theirs, first(golden_call(golden, in_golden)))
    say("mine's call again, against what mine recorded:", ours, first(my_call(mine, in_mine)))
    say("mine's call in float64, against what mine recorded:", first(my_call(mine, in_mine, double)), ours)
    say("mine's call on golden's inputs, against golden:", theirs, first(my_call(golden, in_golden)))"""

_MODULE = """module = None  # put the module here to call it as well: model.get_submodule({path})

for slot in {slots}:
    say(f"input {{slot}}, mine against golden:", given(golden, in_golden, slot), given(mine, in_mine, slot))
theirs, ours = golden.tensor(role="output", slot={slot}, **in_golden), mine.tensor(role="output", slot={slot}, **in_mine)
say("output, mine against golden:", theirs, ours)


def first(result):
    return result if isinstance(result, torch.Tensor) else next(iter(result.values() if isinstance(result, dict) else result))


def call(run, site, wide=lambda x: x):
    return {call}


if module is not None:
    with torch.no_grad():
        say("the module again, against what mine recorded:", ours, first(call(mine, in_mine)))
        say("the module on golden's inputs, against golden:", theirs, first(call(golden, in_golden)))"""

# an operator that only one run calls
_ALONE = """def call(run, site, wide=lambda x: x):
    return {call}


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def double(x):
    return x.double() if x.is_floating_point() else x


made = {side}.tensor(role="output", slot={slot}, **in_{side})
with torch.no_grad():
    say("the call that only {side} makes, against what it recorded:", made, first(call({side}, in_{side})))
    say("the same in float64, against what it recorded:", first(call({side}, in_{side}, double)), made)
"""

_SHOWS = """# where it first shows
theirs, ours = golden.tensor(role={role}, slot={golden_slot}, **{golden_site}), mine.tensor(role={role}, slot={my_slot}, **{my_site})
say({what}, theirs, ours)"""


def script(
    call: Call, runs: Runs, cause: str, evidence: str, shows: Difference | None = None
) -> str | None:
    """Return the script, or None where the call's tensors are not there on both sides.

    Of an operator that only one run calls: on its own, and beside the row ``shows``, where the difference is first seen.
    """
    if call.key.phase != "forward" or (call.one_sided and not call.is_operator):
        return None
    try:
        body = (
            _alone(call, runs, shows)
            if call.one_sided
            else _operator(call, runs)
            if call.is_operator
            else _module(call, runs)
        )
    except NotAgain:
        return None
    said = evidence.replace("\\", "/").replace('"""', "'''").encode("ascii", "replace").decode()
    title = (
        f"{cause}: {call.op}, step {call.key.step}".replace("\\", "/")
        .replace('"""', "'''")
        .encode("ascii", "replace")
        .decode()
    )
    return _SCRIPT.format(
        title=title, evidence=said, golden=_where(runs.golden), mine=_where(runs.mine),
        at_golden=_site(call.golden), at_mine=_site(call.mine), calls=body,
    )  # fmt: skip


def _operator(call: Call, runs: Runs) -> str:
    assert call.golden is not None
    assert call.mine is not None
    slot = _slot(call)
    golden, mine = (
        replay.Replayed(side, key)
        for side, key in ((runs.golden, call.golden), (runs.mine, call.mine))
    )
    calls = [f"{each.name}({_arguments(each.given)})" for each in (golden, mine)]
    return _OPERATOR.format(golden=calls[0], mine=calls[1], slot=slot)


def _alone(call: Call, runs: Runs, shows: Difference | None) -> str:
    name, side, key = (
        ("golden", runs.golden, call.golden) if call.golden else ("mine", runs.mine, call.mine)
    )
    assert key is not None
    again = replay.Replayed(side, key)
    kept = [r for r in side.records(key, "output") if r.payload is not None and r.kept is None]
    if not kept:
        raise NotAgain("its output was not kept")
    code = f"{again.name}({_arguments(again.given)})"
    body = _ALONE.format(call=code, side=name, slot=ascii(kept[0].site.slot))
    pair = shows.pair if shows is not None else None
    if (
        pair is None
        or pair.golden is None
        or pair.mine is None
        or not (pair.golden.payload and pair.mine.payload)
    ):
        return body
    s = pair.golden.site
    return body + _SHOWS.format(
        role=ascii(s.role), golden_slot=ascii(s.slot), my_slot=ascii(pair.mine.site.slot), golden_site=_site(Key.of(pair.golden)),
        my_site=_site(Key.of(pair.mine)), what=ascii(f"{s.role} {s.slot} of {s.path}, mine against golden:"),
    )  # fmt: skip


def _module(call: Call, runs: Runs) -> str:
    assert call.mine is not None
    records = runs.mine.records(call.mine, "input")
    try:
        code = f"module({_arguments(arguments.given(records, runs.mine.scalars(call.mine), caches=True))})"
    except NotAgain as why:
        code = f"None  # {str(why).encode('ascii', 'replace').decode()}".replace("\n", " ")
    both = [
        d.site.slot
        for d in call.inputs
        if d.pair.golden and d.pair.mine and d.pair.golden.payload and d.pair.mine.payload
    ]
    return _MODULE.format(path=ascii(call.path), slots=ascii(both), slot=_slot(call), call=code)


def _slot(call: Call) -> str:
    rows = [
        d
        for d in (call.bad_output, *call.outputs)
        if d is not None and d.pair.golden and d.pair.mine
    ]
    kept = [
        d
        for d in rows
        if d.pair.golden and d.pair.golden.payload and d.pair.mine and d.pair.mine.payload
    ]
    if not kept:
        raise NotAgain("its output was not kept")
    return ascii(kept[0].site.slot)


def _where(side: Side) -> str:
    return ascii(str(side.run.path.resolve()) if side.run.path is not None else side.run.label)


def _site(key: Key | None) -> str:
    if key is None:
        return "None  # it does not make this call"
    names = ("rank", "generation", "step", "phase", "path", "call")
    return (
        "dict("
        + ", ".join(f"{name}={value!a}" for name, value in zip(names, key, strict=True))
        + ")"
    )


def _arguments(given: arguments.Given) -> str:
    args, kwargs = given
    return ", ".join(
        [
            *map(_code, args),
            *(f"{name}={_code(value)}" for name, value in kwargs.items() if name.isidentifier()),
        ]
    )


def _code(value: Any) -> str:
    """Return a value as Python says it; strings with quotes and the like escaped."""
    if isinstance(value, Tensor):
        return f"wide(given(run, site, {str(value)!a}))"
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!a}: {_code(part)}" for name, part in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!a})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!a})"
    return ascii(value)
