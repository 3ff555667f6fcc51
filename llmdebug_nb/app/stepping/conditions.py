"""Conditions on a call: where a program that is stepped through halts."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from llmdebug_nb.app.stepping.stop import Stop, computable
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import epsilon
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.options import EVERY_TOKEN

if TYPE_CHECKING:
    import torch

_WHEN = re.compile(r"(nan|inf)|(abs)\s*>\s*(\S+)|(diverges)(?:\s*>\s*(\S+))?")


@dataclass(frozen=True)
class Conditions:
    """When to halt: one condition of each given kind must hold.

    ``at``: globs over paths and operators. ``tokens``: steps. ``when``: conditions on values, of
    which one must hold.
    """

    at: tuple[str, ...] = ()
    tokens: TokenSet = field(default_factory=lambda: TokenSet.parse(EVERY_TOKEN))
    when: tuple[ValueCondition, ...] = ()

    @classmethod
    def of(
        cls,
        at: str | Iterable[str] | None = (),
        tokens: int | str | Iterable[int | str] | TokenSet | None = EVERY_TOKEN,
        when: str | Iterable[str] | None = (),
    ) -> Conditions:
        """Read conditions. Raises OptionError."""
        values = tuple(ValueCondition.parse(text) for text in _texts(when))
        return cls(_texts(at), TokenSet.parse(tokens), values)

    @property
    def on_divergence(self) -> bool:
        """Whether the program halts where it departs from golden."""
        return any(each.kind == "diverges" for each in self.when)

    def why(self, stop: Stop) -> str | None:
        """Return why to halt at a call, or None."""
        if stop.step not in self.tokens:
            return None
        if self.at and not any(fnmatchcase(name, glob) for name in stop.names for glob in self.at):
            return None
        if not self.when:
            return "asked for" if self.at else "a call"
        return next((why for each in self.when if (why := each.why(stop)) is not None), None)


@dataclass(frozen=True)
class ValueCondition:
    """A condition on the outputs of a call: ``nan``, ``inf``, ``abs`` or ``diverges``.

    ``bound``: of ``abs``, or of the error of ``diverges``; None: 32 units of rounding, and what the
    error of the call's inputs explains.
    """

    kind: str
    bound: float | None = None

    @classmethod
    def parse(cls, text: str) -> ValueCondition:
        """Read ``nan``, ``inf``, ``abs>1e4``, ``diverges`` or ``diverges>1e-3``."""
        match = _WHEN.fullmatch(text)
        with contextlib.suppress(ValueError):
            if match and match[1]:
                return cls(match[1])
            if match and match[2]:
                return cls("abs", float(match[3]))
            if match:
                return cls("diverges", float(match[5]) if match[5] else None)
        raise OptionError(
            f"when: expected nan, inf, abs>1e4, diverges or diverges>1e-3, got {text!r}"
        )

    def why(self, stop: Stop) -> str | None:
        """Return how the condition holds at a call, or None."""
        hits = (self._of(stop, slot, tensor) for slot, tensor in stop.outputs.items())
        return next((hit for hit in hits if hit is not None), None)

    def _of(self, stop: Stop, slot: str, tensor: torch.Tensor) -> str | None:
        if self.kind == "diverges":
            error = stop.errors.get(slot, 0.0)
            bound = _rounding(tensor) if self.bound is None else self.bound
            if error > bound and self.bound is None:  # as a comparison: its inputs' noise passes on
                bound = math.hypot(bound, constants.AMPLIFICATION * stop.given)
            return f"output {slot} is {error:.2g} off golden" if error > bound else None
        values = computable(tensor)
        if values is None or not (values.is_floating_point() or values.is_complex()):
            return None
        if self.kind == "abs":
            largest = float(values.abs().max())
            over = largest > (self.bound or 0.0)
            return f"output {slot} reaches {largest:.4g}" if over else None
        found = values.isnan() if self.kind == "nan" else values.isinf()
        return f"output {slot} holds {self.kind}" if bool(found.any()) else None


def _rounding(tensor: torch.Tensor) -> float:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return constants.OPERATOR_EPSILONS * epsilon(dtype) if tensor.is_floating_point() else 0.0


def _texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return texts, or a text with commas, as a tuple."""
    texts = [value] if isinstance(value, str) else list(value or ())
    return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())
