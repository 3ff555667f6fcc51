"""Formulas of ATB operations that several ranks compute together, from the inputs of all of them.

The results are the same on all ranks, or parts of one tensor in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from llmdebug_nb.reference.atb_elements import matmul
from llmdebug_nb.reference.atb_parameters import Inputs, Parameters
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay

_JOINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul,
}  # fmt: skip
_REDUCES, _SCATTERS, _GATHERS, _ALONE = 0, 1, 2, 3  # LinearParallel's type


def _all(given: Parameters) -> list[Inputs]:
    """Return the inputs of all ranks. Raises CannotReplay if there are fewer than there were."""
    found, size = given.ranks(), given.integer("rankSize", 0)
    if len(found) != size or given.integer("rankRoot") >= max(size, 1):
        raise CannotReplay(f"inputs of {len(found)} of {size} ranks were recorded", GAP)
    return found


def all_reduce(given: Parameters, inputs: Inputs) -> Inputs:
    """The sum, product, largest or smallest of the ranks' elements."""
    given.refuse("quantType")
    kind = given.found.get("allReduceType", "sum")
    if not isinstance(kind, str) or kind not in _JOINED:
        raise CannotReplay(f"no formula for allReduceType={kind!r} is known", UNKNOWN)
    return [functools.reduce(_JOINED[kind], [each[0] for each in _all(given)])]


def all_gather(given: Parameters, inputs: Inputs) -> Inputs:
    """The ranks' tensors, one after the other along a new axis."""
    return [torch.stack([each[0] for each in _all(given)])]


def broadcast(given: Parameters, inputs: Inputs) -> Inputs:
    """The tensor of one rank."""
    return [_all(given)[given.integer("rankRoot")][0]]


def linear_parallel(given: Parameters, inputs: Inputs) -> Inputs:
    """A product whose inputs or results are joined over ranks; then a residual of this rank."""
    if given.integer("quantType", -1) >= 0 or not inputs[1].is_floating_point():
        raise CannotReplay("no formula for quantised weights over ranks is known", UNKNOWN)
    kind = given.choice("type", (_REDUCES, _SCATTERS, _GATHERS, _ALONE))
    turned = Parameters({"transposeB": given.flag("transWeight", True)})
    if kind == _GATHERS:
        rows = torch.cat([each[0] for each in _all(given)])
        made = [matmul(turned, [rows, inputs[1]])[0], rows]
        made = made if given.flag("keepIntermediate") else made[:1]
    elif kind == _ALONE:
        made = matmul(turned, inputs)
    else:
        total = sum((matmul(turned, each)[0] for each in _all(given)[1:]),
                    matmul(turned, _all(given)[0])[0])  # fmt: skip
        ranks = given.integer("rankSize")
        made = [total if kind == _REDUCES else total.chunk(ranks)[given.rank]]
    return [made[0] + inputs[-1] if given.flag("hasResidual") else made[0], *made[1:]]
