"""What a condition of the option ``alarm`` is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Moment:
    """The end of a recorded step.

    ``loss``: the number that the last backward pass began with, which in a training loop is the
    loss of the step before; NaN if there was none.
    """

    generation: int
    step: int
    loss: float


# tells whether something went wrong; a text says what
Condition: TypeAlias = Callable[[Moment], object]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that went wrong, at the end of a recorded step, and the steps kept for it.

    ``first``: the first of them.
    """

    generation: int
    step: int
    first: int
    reason: str


@dataclass(frozen=True, slots=True)
class Signal:
    """An alarm as other processes of the run hear of it. ``sender``: the folder of its process."""

    sender: str
    rank: int
    generation: int
    step: int
