"""Arguments that are no tensors, and plain attributes of modules, held against each other.

They alone pin a wrong eps, scale, axis or dropout rate: the operator that is given one computes what it is told.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from typing import NamedTuple

import torch

from llmdebug_nb.explain.calls import Call
from llmdebug_nb.explain.replay import operator
from llmdebug_nb.explain.runs import NotAgain, Runs, Scalar


class Differing(NamedTuple):
    """``golden``, ``mine``: its texts there. ``kind``: the type's name."""

    name: str
    golden: str
    mine: str
    kind: str


_NUMBERS = ("bool", "int", "float")
_SAME = 1e-6  # numbers this close are the same, computed in another way
_KINDS = [
    torch.finfo(kind) for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
]
_LIMITS = {limit for kind in _KINDS for limit in (kind.max, kind.eps, kind.tiny)}
_OF_TRAINING = ("training", "gradient_checkpointing")
_ABSENT: Scalar = ("", None)
_EPS = re.compile(r"(^|_)eps(ilon)?($|_)")


def of_call(call: Call, runs: Runs) -> list[Differing]:
    """Return the scalar arguments of a call that differ; of an argument that only one side names, its value there."""
    if call.golden is None or call.mine is None or call.is_fused:
        return []
    golden, mine = runs.golden.scalars(call.golden), runs.mine.scalars(call.mine)
    tensors = {d.pair.either.site.slot for d in call.inputs}
    cast = any(
        d.pair.golden and d.pair.mine and d.pair.golden.summary.dtype != d.pair.mine.summary.dtype
        for d in call.inputs
    )
    found = []
    for slot in dict.fromkeys((*golden, *mine)):
        default = _default(call.op, slot.removeprefix("kwargs.")) if call.is_operator else _ABSENT
        a, b = golden.get(slot, default), mine.get(slot, default)
        if slot in tensors or _equal(a, b) or (cast and "dtype" in (a[0], b[0])):
            continue
        name = f"argument {slot}" if slot.isdigit() else slot.removeprefix("kwargs.")
        found.append(Differing(name, _said(a), _said(b), (b if a == _ABSENT else a)[0]))
    return found


@functools.cache
def _default(op: str, name: str) -> Scalar:
    """Return what an operator takes where an argument is not given, as far as that is written anywhere."""
    try:
        _, function = operator(op)
    except NotAgain:
        return _ABSENT
    try:
        value = inspect.signature(function).parameters[name].default
    except (KeyError, TypeError, ValueError):  # written in C: no signature
        packet = getattr(torch.ops.aten, op.partition(".")[2], None)
        schemas = (
            [getattr(packet, overload)._schema for overload in packet.overloads()]
            if packet is not None
            else []
        )
        given = [
            a
            for schema in schemas[:1]
            for a in schema.arguments
            if a.name == name and a.has_default_value()
        ]
        value = given[0].default_value if given else inspect.Parameter.empty
    return (
        (type(value).__name__, str(value))
        if isinstance(value, (bool, int, float, str))
        else _ABSENT
    )


def of_module(call: Call, runs: Runs) -> list[Differing]:
    """Return the plain attributes of the call's module that differ; ``training`` only where nothing else does."""
    if call.golden is None or call.mine is None:
        return []
    golden = runs.golden.attributes.get(call.golden.path.partition("/")[0], {})
    mine = runs.mine.attributes.get(call.mine.path.partition("/")[0], {})
    if call.is_rewritten:
        return _of_another_class(golden, mine)
    found = [
        Differing(name, _said(golden[name]), _said(mine[name]), golden[name][0])
        for name in golden
        if name in mine
        and not _equal(golden[name], mine[name])
        and not _is_size(call, golden[name], mine[name])
    ]
    found = [each for each in found if each.name != "training"] or found
    return found or _of_another_class(golden, mine)  # of one class, but told by an exported graph


def _of_another_class(golden: dict[str, Scalar], mine: dict[str, Scalar]) -> list[Differing]:
    """Return what two classes are told alike but for its name, and differently: their eps."""
    names = [
        [name for name, value in side.items() if _EPS.search(name) and value[0] == "float"]
        for side in (golden, mine)
    ]
    if [len(each) for each in names] != [1, 1]:
        return []
    (one,), (other,) = names
    said = one if one == other else f"{one} ({other} in mine)"
    return (
        []
        if _equal(golden[one], mine[other])
        else [Differing(said, _said(golden[one]), _said(mine[other]), "float")]
    )


def constants(differing: list[Differing]) -> list[Differing]:
    """Return those that a program is set to: numbers such as eps or a scale, and modes such as ``tanh``; not sizes, nor the limits of a dtype."""
    return [
        each
        for each in differing
        if _is_mode(each)
        or (_is_constant(each.golden) and _is_constant(each.mine) and not _near(each))
    ]


def flags(differing: list[Differing]) -> list[Differing]:
    """Return those that are switches of what is computed, and not of how it is trained."""
    return [each for each in differing if each.kind == "bool" and each.name not in _OF_TRAINING]


def _is_mode(each: Differing) -> bool:
    return each.kind == "str" and each.golden.isidentifier() and each.mine.isidentifier()


def _is_constant(text: str) -> bool:
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return not text.lstrip("-").isdigit() and 0.0 < value < math.inf and value not in _LIMITS


def _near(each: Differing) -> bool:
    return math.isclose(float(each.golden), float(each.mine), rel_tol=_SAME)


def _is_size(call: Call, golden: Scalar, mine: Scalar) -> bool:
    """Tell whether two numbers are how large the tensors are on their side, which says no more than that these are."""
    for side, scalar in (("golden", golden), ("mine", mine)):
        records = (getattr(row.pair, side) for row in call.rows())
        if scalar[0] != "int" or int(scalar[1] or 0) not in {
            n for r in records if r is not None for n in r.summary.shape
        }:
            return False
    return True


def words(differing: list[Differing]) -> str:
    """Return ``eps is 1e-06 in golden and 1e-05 in mine``."""
    return ", ".join(
        f"{name} is {golden} in golden and {mine} in mine"
        for name, golden, mine, _ in dict.fromkeys(differing[:4])
    )


def _equal(a: Scalar, b: Scalar) -> bool:
    """Tell whether two are the same; what has no text (a cache, say) is not held against anything."""
    if a == b or _is_opaque(a) or _is_opaque(b):
        return True
    if {a, b} <= {
        _ABSENT,
        ("None", None),
        ("bool", "False"),
    }:  # left out, or given as what it is anyway
        return True
    if a[0] in _NUMBERS and b[0] in _NUMBERS:
        return _number(a) == _number(b)
    return False


def _is_opaque(scalar: Scalar) -> bool:
    return scalar[1] is None and scalar[0] not in ("", "None")


def _number(scalar: Scalar) -> float:
    return float(scalar[1] == "True") if scalar[0] == "bool" else float(scalar[1] or 0)


def _said(scalar: Scalar) -> str:
    return "not given" if scalar == _ABSENT else str(scalar[1])
