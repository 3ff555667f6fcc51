"""What a formula of an ATB operation is given: its ``op_param.json`` and what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from llmdebug_nb.core.records import CallKey
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side

Inputs = list[torch.Tensor]


@dataclass(frozen=True)
class Parameters:
    """The parameters of an operation, each checked when it is read.

    ``dtypes``: of the inputs as recorded; formulas are given float64. ``outputs``: as recorded.
    ``rank``: of the call. ``ranks``: loads the inputs of the same call on all ranks, by rank.
    """

    found: Mapping[str, object]
    dtypes: tuple[torch.dtype, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    rank: int = 0
    ranks: Callable[[], list[Inputs]] = list

    def integer(self, name: str, default: int = 0) -> int:
        """Raises CannotReplay: it is no whole number."""
        value = self.found.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CannotReplay(f"its parameter {name} is no whole number")
        return value

    def integers(self, name: str) -> list[int]:
        """Raises CannotReplay: it is no list of whole numbers, or missing."""
        values = self.found.get(name)
        if not isinstance(values, list) or not all(type(each) is int for each in values):
            raise CannotReplay(f"its parameter {name} is no list of whole numbers", GAP)
        return values

    def number(self, name: str, default: float) -> float:
        """Raises CannotReplay: it is no number."""
        value = self.found.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CannotReplay(f"its parameter {name} is no number")
        return float(value)

    def first(self, name: str) -> float:
        """Return the only number of a list. Raises CannotReplay."""
        values = self.found.get(name)
        if not isinstance(values, list) or len(values) != 1:
            raise CannotReplay(f"its parameter {name} is no list of one number", GAP)
        return Parameters({name: values[0]}).number(name, 0.0)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.found.get(name, default))

    def part(self, name: str) -> Parameters:
        """Return the parameters in a parameter, none if it has none."""
        part = self.found.get(name, {})
        return Parameters(part if isinstance(part, dict) else {}, self.dtypes, self.outputs)

    def refuse(self, *names: str) -> None:
        """Raise CannotReplay if one of these parameters asks for a variant without a formula."""
        for name in names:
            if self.found.get(name):
                raise CannotReplay(f"no formula for {name}={self.found[name]!r} is known", UNKNOWN)

    def choice(self, name: str, known: tuple[int, ...], default: int = 0) -> int:
        """Return a parameter that is one of those with a formula. Raises CannotReplay."""
        value = self.integer(name, default)
        if value not in known:
            raise CannotReplay(f"no formula for {name}={value} is known", UNKNOWN)
        return value

    def not_quantised(self) -> None:
        """Raise CannotReplay if an output is quantised: how it is rounded is not public."""
        if any(not each.is_floating_point() for each in self.outputs):
            raise CannotReplay("no formula for quantised outputs is known", UNKNOWN)


def parameters_of(side: Side, key: CallKey, given: str = "") -> Mapping[str, object]:
    """Return the parameters of an operation, as recorded, else as given. Raises CannotReplay."""
    text = side.run.meta.get("op_params", {}).get(key.path, given or None)
    if text is None:
        raise CannotReplay("its op_param.json is missing; a csv may give it (-c)", GAP)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CannotReplay("its parameters are no JSON object", GAP)
    return found
