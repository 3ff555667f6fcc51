"""Compare the arguments that are not tensors, and the plain attributes of modules.

Only they reveal a wrong eps, scale, axis or dropout rate: an operator with a wrong argument still
computes correctly, so a replay finds no error.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.masking import MASK
from llmdebug_nb.core.paths import module_of
from llmdebug_nb.core.torch_internals import schema_default
from llmdebug_nb.graph.compared_calls import ComparedCall
from llmdebug_nb.replay.operators import CannotReplay, operator
from llmdebug_nb.replay.runs import Runs, Scalar


class Differing(NamedTuple):
    """A scalar that differs. ``golden``, ``mine``: its texts. ``kind``: the name of its type.

    ``slot``: of mine's argument, or the name of its attribute. ``value``: golden's. ``given``: it
    is an argument, and no attribute.
    """

    name: str
    golden: str
    mine: str
    kind: str
    slot: str = ""
    value: Scalar = ("", None)
    given: bool = False


_NUMBERS = ("bool", "int", "float")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LIMITS = {x for d in map(torch.finfo, _DTYPES) for x in (d.max, d.eps, d.tiny)}
_OF_TRAINING = ("training", "gradient_checkpointing")
_ABSENT: Scalar = ("", None)
_EPS = re.compile(r"(^|_)eps(ilon)?($|_)")


def of_call(call: ComparedCall, runs: Runs) -> list[Differing]:
    """Return the scalar arguments of a call that differ; missing ones count as their defaults."""
    if call.golden is None or call.mine is None or call.is_fused or not call.same_kind:
        return []
    golden, mine = runs.golden.scalars(call.golden), runs.mine.scalars(call.mine)
    tensors = {d.site.slot for d in call.inputs}
    cast = any(
        d.pair.golden and d.pair.mine and d.pair.golden.summary.dtype != d.pair.mine.summary.dtype
        for d in call.inputs
    )
    if _tell_shape(call, "golden", golden) and _tell_shape(call, "mine", mine):
        return []
    # a class of that name in another package may have other arguments
    one_class = call.is_operator or runs.same_class(module_of(call.golden.path))
    differing = []
    for slot in dict.fromkeys((*golden, *mine)):
        if not one_class and not (slot in golden and slot in mine):
            continue
        default = _default(call.op, slot.removeprefix("kwargs.")) if call.is_operator else _ABSENT
        a, b = golden.get(slot, default), mine.get(slot, default)
        if slot in tensors or _equal(a, b) or (cast and "dtype" in (a[0], b[0])):
            continue
        name = f"argument {slot}" if slot.isdigit() else slot.removeprefix("kwargs.")
        kind = (b if a == _ABSENT else a)[0]
        differing.append(Differing(name, _text(a), _text(b), kind, slot, a, given=True))
    return differing


@functools.cache
def _default(op: str, name: str) -> Scalar:
    """Return the default of an operator's argument, by its signature or its schema."""
    try:
        _, function = operator(op)
    except CannotReplay:
        return _ABSENT
    try:
        value = inspect.signature(function).parameters[name].default
    except (KeyError, TypeError, ValueError):  # written in C: no signature
        value = schema_default(op.partition(".")[2], name)
    plain = isinstance(value, (bool, int, float, str))
    return (type(value).__name__, str(value)) if plain else _ABSENT


def of_module(call: ComparedCall, runs: Runs) -> list[Differing]:
    """Return the plain attributes of a call's module that differ.

    ``training`` counts only if nothing else differs.
    """
    if call.golden is None or call.mine is None:
        return []
    golden = runs.golden.attributes.get(module_of(call.golden.path), {})
    mine = runs.mine.attributes.get(module_of(call.mine.path), {})
    if call.is_rewritten:
        return _of_another_class(golden, mine)
    differing = [
        Differing(name, _text(value), _text(mine[name]), value[0], name, value)
        for name, value in golden.items()
        if name in mine
        and not _equal(value, mine[name])
        and not _are_sizes(call, value, mine[name])
    ]
    differing = [each for each in differing if each.name != "training"] or differing
    # an exported graph tells eps by another name, though the class is the same
    return differing or _of_another_class(golden, mine)


def _of_another_class(golden: dict[str, Scalar], mine: dict[str, Scalar]) -> list[Differing]:
    """Return the eps of two classes, if it differs; it alone compares under different names."""
    names = [
        [name for name, value in side.items() if _EPS.search(name) and value[0] == "float"]
        for side in (golden, mine)
    ]
    if [len(each) for each in names] != [1, 1]:
        return []
    (one,), (other,) = names
    if _equal(golden[one], mine[other]):
        return []
    name = one if one == other else f"{one} ({other} in mine)"
    texts = _text(golden[one]), _text(mine[other])
    return [Differing(name, *texts, "float", other, golden[one])]


def choices(differing: list[Differing]) -> list[Differing]:
    """Return the scalars that a program chooses: numbers such as eps, modes such as ``tanh``.

    Sizes of tensors and limits of dtypes are left out.
    """
    return [each for each in differing if _is_mode(each) or _are_constants(each)]


def flags(differing: list[Differing]) -> list[Differing]:
    """Return the flags that change the computation; ``training`` is left out."""
    return [each for each in differing if each.kind == "bool" and each.name not in _OF_TRAINING]


def _is_mode(each: Differing) -> bool:
    return each.kind == "str" and each.golden.isidentifier() and each.mine.isidentifier()


def _are_constants(each: Differing) -> bool:
    if not (_is_constant(each.golden) and _is_constant(each.mine)):
        return False
    return not math.isclose(float(each.golden), float(each.mine), rel_tol=constants.SAME_SCALAR)


def _is_constant(text: str) -> bool:
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return not text.lstrip("-").isdigit() and 0.0 < value < math.inf and value not in _LIMITS


def _are_sizes(call: ComparedCall, golden: Scalar, mine: Scalar) -> bool:
    """Tell whether each number is a size of a tensor in its run; sizes differ anyway."""
    for side, scalar in (("golden", golden), ("mine", mine)):
        records = (getattr(row.pair, side) for row in call.rows())
        sizes = {n for r in records if r is not None for n in r.summary.shape}
        if scalar[0] != "int" or int(scalar[1] or 0) not in sizes:
            return False
    return True


def _tell_shape(call: ComparedCall, side: str, given: Mapping[str, Scalar]) -> bool:
    """Tell whether all arguments of other code are the shape of the result, in any form."""
    records = [getattr(row.pair, side) for row in call.outputs]
    shape = next((r.summary.shape for r in records if r is not None), ())
    key, other = (call.golden, call.mine) if side == "golden" else (call.mine, call.golden)
    if key is None or other is None or key.path == other.path:
        return False  # the same code
    numbers = re.findall(r"-?\d+", " ".join(text or "" for _, text in given.values()))
    sizes = zip(map(int, numbers), shape, strict=False)
    return len(numbers) == len(shape) > 0 and all(n in (-1, size) for n, size in sizes)


def words(differing: Sequence[Differing]) -> str:
    """Return ``eps is 1e-06 in golden and 1e-05 in mine``."""
    return ", ".join(
        f"{name} is {golden} in golden and {mine} in mine"
        for name, golden, mine in dict.fromkeys(
            each[:3] for each in differing[: constants.SCALARS_SHOWN]
        )
    )


def _equal(a: Scalar, b: Scalar) -> bool:
    """Tell whether two scalars are equal. What has no text (a cache) equals anything, and so
    does a secret.
    """
    if a == b or _is_opaque(a) or _is_opaque(b):
        return True
    if {a, b} <= {_ABSENT, ("None", None), ("bool", "False")}:  # left out, or given as the default
        return True
    if a[0] in _NUMBERS and b[0] in _NUMBERS:
        return _number(a) == _number(b)
    return False


def _is_opaque(scalar: Scalar) -> bool:
    if scalar[1] is None:
        return scalar[0] not in ("", "None")
    return MASK in scalar[1]


def _number(scalar: Scalar) -> float:
    return float(scalar[1] == "True") if scalar[0] == "bool" else float(scalar[1] or 0)


def _text(scalar: Scalar) -> str:
    return "not given" if scalar == _ABSENT else str(scalar[1])
