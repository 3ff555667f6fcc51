"""Arguments that are no tensors, and plain attributes of modules, held against each other.

They alone pin a wrong eps, scale, axis or dropout rate: the operator that is given one computes what it is told.
"""

from __future__ import annotations

from llmdebug_nb.explain.calls import Call
from llmdebug_nb.explain.runs import Runs, Scalar

Differing = tuple[str, str, str]  # name, golden's text, mine's text

_NUMBERS = ("bool", "int", "float")
_ABSENT: Scalar = ("", None)


def of_call(call: Call, runs: Runs) -> list[Differing]:
    """Return the scalar arguments of a call that differ; of an argument that only one side names, its value there."""
    if call.golden is None or call.mine is None:
        return []
    golden, mine = runs.golden.scalars(call.golden), runs.mine.scalars(call.mine)
    tensors = {d.pair.either.site.slot for d in call.inputs}
    cast = any(
        d.pair.golden and d.pair.mine and d.pair.golden.summary.dtype != d.pair.mine.summary.dtype for d in call.inputs
    )
    found = []
    for slot in dict.fromkeys((*golden, *mine)):
        a, b = golden.get(slot, _ABSENT), mine.get(slot, _ABSENT)
        if slot in tensors or _equal(a, b) or (cast and "dtype" in (a[0], b[0])):
            continue
        found.append((slot.removeprefix("kwargs.") if not slot.isdigit() else f"argument {slot}", _said(a), _said(b)))
    return found


def of_module(call: Call, runs: Runs) -> list[Differing]:
    """Return the plain attributes of the call's module that differ; ``training`` only where nothing else does."""
    if call.golden is None or call.mine is None:
        return []
    golden = runs.golden.attributes.get(call.golden.path.partition("/")[0], {})
    mine = runs.mine.attributes.get(call.mine.path.partition("/")[0], {})
    found = [
        (name, _said(golden[name]), _said(mine[name]))
        for name in golden
        if name in mine and not _equal(golden[name], mine[name]) and not _is_size(call, golden[name], mine[name])
    ]
    return [each for each in found if each[0] != "training"] or found


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
        f"{name} is {golden} in golden and {mine} in mine" for name, golden, mine in dict.fromkeys(differing[:4])
    )


def _equal(a: Scalar, b: Scalar) -> bool:
    """Tell whether two are the same; what has no text (a cache, say) is not held against anything."""
    if a == b or _is_opaque(a) or _is_opaque(b):
        return True
    if {a, b} <= {_ABSENT, ("None", None), ("bool", "False")}:  # left out, or given as what it is anyway
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
