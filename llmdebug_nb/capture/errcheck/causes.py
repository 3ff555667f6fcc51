"""Why a call made bad values of the inputs that it was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.errcheck.exact import reach_in_float64
from llmdebug_nb.capture.errcheck.inputs import Inputs
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.core.faults import FaultyCall, bad_text

CASTS = ("Aten._to_copy", "Aten.copy_")  # the dispatcher's operators that change a dtype
# their result is memory that nobody has written yet
UNSET = ("Aten.empty", "Aten.new_empty", "Aten.resize")
Outputs = list[tuple[str, torch.Tensor, float]]


@dataclass(frozen=True)
class Cause:
    """Why values are bad. ``kind``: of `core.faults.KINDS`. ``given``, ``exact``: in words.

    ``fits_float64``: in float64 they are finite, so an infinity is not what the program means.
    """

    kind: str
    given: str
    exact: str = ""
    fits_float64: bool = False

    def evidence(self, facts: FaultyCall) -> str:
        """Describe the call: what it was given and what it made."""
        made = bad_text(facts.data_info.output)
        return "; ".join(filter(None, (self.given, made and f"it makes {made}", self.exact)))


def cause_of(
    call: OpenCall,
    inputs: Inputs,
    bad: Outputs,
    parameter: Callable[[torch.Tensor], str | None],
) -> Cause | None:
    """Return why a call's outputs are bad; None: they are meant to be.

    Infinities are meant if the call was given one: as a constant, or in a tensor that no call has
    made. NaN never is, nor is a parameter with infinities. ``parameter(tensor)``: its name.
    """
    has_nan = any(largest != largest for _, _, largest in bad)
    if call.op.startswith(UNSET):
        return Cause("nan" if has_nan else "overflow", "its memory was never written")
    for slot, tensor in inputs.nan:
        name = parameter(tensor)
        what = f"parameter {name}" if name else f"input {slot}"
        return Cause("nan", f"{what} already holds NaN, which no operator made")
    for name in filter(None, (parameter(tensor) for _, tensor in inputs.infinite)):
        return Cause("overflow", f"parameter {name} already holds infinities")
    if inputs.infinite or inputs.infinite_constant:
        if not has_nan:
            return None
        return Cause("nan", "its inputs hold infinities that were given to it, and no NaN")
    if any(each != each for each in inputs.constants):
        return Cause("nan", "the program gives it NaN as a constant")
    if call.op.startswith("Distributed."):
        where = "another rank, or the sum over ranks"
        return Cause("nan" if has_nan else "overflow", f"no input of this rank is bad: {where}")
    reaches = [largest for largest, _ in inputs.reaches]
    given = f"its inputs are finite (up to {max(reaches):.4g})" if reaches else "no input is bad"
    if cast_of(call, inputs, bad) and not has_nan:
        return Cause("cast", given)
    exact = None if call.arguments is None else reach_in_float64(call.op, *call.arguments)
    if exact is None:
        return Cause(_cast_or("nan" if has_nan else "overflow", call, inputs, bad), given)
    if math.isfinite(exact):
        kind = _cast_or("overflow", call, inputs, bad)
        return Cause(kind, given, f"in float64 it reaches {exact:.4g}", fits_float64=True)
    why = "a result without a value, such as 0/0" if exact != exact else "a division by zero, say"
    return Cause("nan" if has_nan else "overflow", given, f"in float64 as well: {why}")


def underflow_of(call: OpenCall, inputs: Inputs, outputs: Outputs) -> Cause | None:
    """Return the cause if all values of a call's outputs are zero, and in float64 they are not."""
    if not inputs.all_nonzero or call.arguments is None or any(c == 0 for c in inputs.constants):
        return None
    exact = reach_in_float64(call.op, *call.arguments)
    if not exact or not math.isfinite(exact):
        return None
    smallest = min(largest for largest, _ in inputs.reaches)
    dtype = DTYPE_NAMES.get(outputs[0][1].dtype, "")
    given = f"no input is all zero (the smallest reaches {smallest:.4g})"
    kind = _cast_or("underflow", call, inputs, outputs)
    return Cause(
        kind, given, f"all its results are 0 in {dtype}; in float64 they reach {exact:.4g}"
    )


def clipping_of(call: OpenCall, inputs: Inputs, outputs: Outputs) -> Cause | None:
    """Return the cause if a cast to a dtype without infinity cuts off what is too large for it."""
    if not cast_of(call, inputs, outputs):
        return None
    (_, tensor, largest), given = outputs[0], max(each for each, _ in inputs.reaches)
    finfo = torch.finfo(tensor.dtype)
    if largest < finfo.max or given <= finfo.max * (1 + finfo.eps):
        return None
    dtype = DTYPE_NAMES.get(tensor.dtype, "")
    return Cause("cast", f"its input reaches {given:.4g}", f"cut off at {finfo.max:g} in {dtype}")


def cast_of(call: OpenCall, inputs: Inputs, outputs: Outputs) -> bool:
    """Return whether a call only changes the dtype."""
    dtypes = {tensor.dtype for _, tensor in inputs.reaches}
    return call.op in CASTS and any(tensor.dtype not in dtypes for _, tensor, _ in outputs)


def _cast_or(kind: str, call: OpenCall, inputs: Inputs, outputs: Outputs) -> str:
    return "cast" if cast_of(call, inputs, outputs) else kind
