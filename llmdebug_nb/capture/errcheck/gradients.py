"""Gradients at module level: those that arrive at a call, and those that it passes on."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.errcheck.causes import Cause
from llmdebug_nb.capture.errcheck.origins import Origin

_Key = tuple[int, str, int]  # root call, path and number of a call
_MANY = 4096  # calls whose arrived gradients are remembered


class ArrivedGradients:
    """What arrived at the outputs of each call: the largest magnitude, and origins if it is bad."""

    def __init__(self) -> None:
        self._arrived: dict[_Key, tuple[float, tuple[Origin, ...]]] = {}

    def add(self, call: OpenCall, largest: float, origins: tuple[Origin, ...]) -> None:
        if len(self._arrived) > _MANY:
            self._arrived.clear()
        known, others = self._arrived.get(_key(call), (0.0, ()))
        self._arrived[_key(call)] = max(known, largest), (*others, *origins)

    def origins(self, call: OpenCall) -> tuple[Origin, ...]:
        return self._arrived.get(_key(call), (0.0, ()))[1]

    def cause(self, call: OpenCall, role: str, largest: float) -> Cause:
        """Return why a gradient is bad that is bad for no known reason."""
        kind = "overflow" if math.isinf(largest) else "nan"
        if role == "input":
            return Cause(kind, "it was made outside of modules, as in the loss")
        reach, _ = self._arrived.get(_key(call), (math.nan, ()))
        given = "the gradients that arrive here are finite"
        return Cause(kind, given if reach != reach else f"{given} (up to {reach:.4g})")


def backward_call(call: OpenCall) -> OpenCall:
    """Return the backward pass of a module's call."""
    back = OpenCall(call.path, call.op, "module", call.path, call.number, call.root_call)
    back.phase, back.inputs = "backward", []
    return back


def outputs_of(
    role: str, slot: str, tensor: torch.Tensor, largest: float
) -> list[tuple[str, torch.Tensor, float]]:
    """Return a gradient as the only output of a backward call."""
    of = {"input": "output ", "grad": ""}.get(role, "input ")
    return [(f"gradient of {of}{slot}", tensor, largest)]


def _key(call: OpenCall) -> _Key:
    return call.root_call, call.path, call.number
