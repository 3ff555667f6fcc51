"""What a formula of a ggml operation is given: its sources in ggml's axes, and its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.ggml import NodeFacts, Source, View
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Given:
    """The sources of a node, ``[ne3, ne2, ne1, ne0]`` and in their own dtypes, by slot.

    ``types``: ggml's, by slot. ``parameters``: of the operation. ``ne``: of the result, fastest
    axis first. ``wide``: makes float64 of a tensor, and moves it if that is asked for.
    """

    sources: Mapping[int, torch.Tensor]
    types: Mapping[int, str]
    parameters: Numbers
    ne: tuple[int, ...]
    wide: Callable[[torch.Tensor], torch.Tensor]

    def has(self, slot: int) -> bool:
        return slot in self.sources

    def own(self, slot: int) -> torch.Tensor:
        """Return a source in its own dtype. Raises CannotReplay."""
        if slot not in self.sources:
            raise CannotReplay(f"it has no source {slot}", GAP)
        return self.sources[slot]

    def x(self, slot: int = 0) -> torch.Tensor:
        """Return a source in float64. Raises CannotReplay."""
        return self.wide(self.own(slot))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ggml rounds to float32 on its way, as it is there, in float64."""
        return self.wide(x.float())

    def whole(self, slot: int) -> torch.Tensor:
        """Return a source of whole numbers as int64. Raises CannotReplay."""
        found = self.own(slot)
        if found.is_floating_point():
            raise CannotReplay(f"its source {slot} holds no whole numbers", GAP)
        return found.long()

    def number(self, name: str) -> float:
        """Return a parameter; a float is the float32 number that ran. Raises CannotReplay."""
        if name not in self.parameters:
            raise CannotReplay(f"its parameter {name} was not recorded", GAP)
        return self.parameters[name]

    def refuse(self, name: str, *known: float) -> None:
        """Raise CannotReplay if a parameter asks for a variant without a formula."""
        if self.number(name) not in known:
            raise CannotReplay(f"no formula for {name}={self.number(name):g} is known", UNKNOWN)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ne[::-1]


def in_axes(values: torch.Tensor, ne: list[int], tokens: int | None) -> torch.Tensor:
    """Return recorded values, whose tokens come first, as ``[ne3, ne2, ne1, ne0]``.

    Raises CannotReplay: they have another number of elements.
    """
    if math.prod(ne) != values.numel():
        raise CannotReplay(f"shape {list(values.shape)} is not that of its node", GAP)
    if tokens is None:
        return values.reshape(ne[::-1])
    rest = [ne[axis] for axis in range(len(ne) - 1, -1, -1) if axis != tokens]
    return values.reshape(ne[tokens], *rest).movedim(0, len(ne) - 1 - tokens)


def seen(values: torch.Tensor, source: Source) -> torch.Tensor:
    """Return an input as its node sees it, ``[ne3, ne2, ne1, ne0]``. Raises CannotReplay."""
    view = source.view or View(list(source.ne))
    whole = in_axes(values, view.of, view.tokens)
    if not view.nb:
        return whole
    flat, width = whole.contiguous().flatten(), values.element_size()
    steps = [view.offset, *view.nb]
    last = view.offset + sum((n - 1) * b for n, b in zip(source.ne, view.nb, strict=True))
    fits = not any(b % width for b in steps) and 0 <= last < max(flat.nbytes, 1)
    if min(steps) < 0 or not fits or math.prod(source.ne) > constants.REPLAY_GROWTH * flat.numel():
        raise CannotReplay("an input does not lie in what it is a view of", GAP)
    if not math.prod(source.ne):
        return flat.new_empty(source.ne[::-1])
    return flat.as_strided(
        source.ne[::-1], [b // width for b in view.nb[::-1]], view.offset // width
    )


def numbers(scalars: Mapping[str, tuple[str, str | None]]) -> dict[str, float]:
    """Return the parameters among the scalars of a node. Raises CannotReplay."""
    found: dict[str, float] = {}
    for name, (kind, text) in scalars.items():
        try:
            if kind == "int":
                found[name] = int(text or "")
            elif kind == "float":
                found[name] = float(np.float32(text or ""))
        except (ValueError, OverflowError):
            raise CannotReplay(f"its parameter {name} is no number", GAP) from None
    return found


def sources_of(
    facts: NodeFacts, inputs: Mapping[str, torch.Tensor], weight: Callable[[Source], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the sources of a node by slot. Raises CannotReplay: one was not recorded."""
    found = {}
    for source in facts.sources:
        if source.weight:
            found[source.slot] = weight(source).reshape(source.ne[::-1])
        elif str(source.slot) in inputs:
            found[source.slot] = seen(inputs[str(source.slot)], source)
        else:
            raise CannotReplay(
                f"what it reads of the cache (source {source.slot}) was not recorded;"
                " record with weights=True",
                GAP,
            )
    return found
