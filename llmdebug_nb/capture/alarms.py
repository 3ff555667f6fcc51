"""The option ``alarm``: watches what is recorded for something that went wrong."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

from llmdebug_nb.capture.guard import Guarded
from llmdebug_nb.capture.rows import MAX, NAN
from llmdebug_nb.core import constants, interrupts
from llmdebug_nb.core.columns import AT, Row
from llmdebug_nb.core.errors import first_line
from llmdebug_nb.core.moments import Condition, Moment
from llmdebug_nb.core.printable import printable

_PATH, _CALL, _PHASE, _ROLE, _SLOT = (AT[x] for x in ("path", "call", "phase", "role", "slot"))
_Place: TypeAlias = tuple[str, int, str, str, str]
_SIGMA = 1.4826  # standard deviations of a normal distribution in its median absolute deviation


class Alarms:
    """What the option ``alarm`` names. Rows and losses are collected, and judged once a step.

    ``watches_losses``: it has a use for them.
    """

    def __init__(self, watched: Iterable[str | Condition], guarded: Guarded) -> None:
        names = [each for each in watched if isinstance(each, str)]
        self._conditions = [each for each in watched if not isinstance(each, str)]
        self._nan = "nan" in names
        self._spikes = [_sigmas(each) for each in names if each != "nan"]
        self._guarded = guarded
        self.watches_losses = bool(names or self._conditions)
        # places of values that are not finite: new ones, and those of the step before
        self._found: dict[_Place, str] = {}
        self._known: dict[_Place, str] = {}
        self._waiting: list[torch.Tensor] = []
        self._losses: deque[float] = deque(maxlen=constants.SPIKE_WINDOW)
        self._last = math.nan
        self._by_hand: list[str] = []
        self._failed: list[Condition] = []

    def look(self, rows: Iterable[Row]) -> None:
        """Look at rows that have their statistics.

        An infinity below is what a mask is filled with, so only those above count.
        """
        if not self._nan:
            return
        for row in rows:
            if row[NAN] or row[MAX] == math.inf:
                kind = "NaN" if row[NAN] else "infinity"
                place = row[_PATH], row[_CALL], row[_PHASE], row[_ROLE], row[_SLOT]
                self._found.setdefault(place, kind)

    def add_losses(self, outputs: Iterable[object]) -> None:
        """Note the numbers among the tensors that a backward pass begins with."""
        for each in outputs:
            if isinstance(each, torch.Tensor) and each.numel() == 1 and each.is_floating_point():
                self._waiting.append(each.detach().clone())  # read at the end of the step

    def raise_by_hand(self, reason: str) -> None:
        self._by_hand.append(reason)

    def raised(self, generation: int, step: int) -> list[str]:
        """Return what went wrong since this was last asked, at the end of a recorded step."""
        reasons, self._by_hand = self._by_hand, []
        reasons += self._judged_losses()
        new = [place for place in self._found if place not in self._known]
        if new:
            reasons.append(_told(new[0], self._found[new[0]], len(new)))
        self._known, self._found = self._found, {}
        moment = Moment(generation, step, self._last)
        for condition in self._conditions:
            answer, name = self._guarded(self._ask, condition, moment), _name(condition)
            if answer:
                reasons.append(answer if isinstance(answer, str) else f"{name} is true")
        return reasons

    def _ask(self, condition: Condition, moment: Moment) -> object:
        """Ask a condition; say once that it fails, since then it raises no alarm."""
        try:
            return _asked(condition, moment)
        except Exception as error:
            if condition not in self._failed:
                self._failed.append(condition)
                text = f"{_name(condition)} fails: {type(error).__name__}: {first_line(error)}"
                print(f"llmdebug: the alarm {printable(text)}", file=sys.stderr)
            raise

    def _judged_losses(self) -> Iterator[str]:
        waiting, self._waiting = self._waiting, []
        for tensor in waiting:
            loss, before = float(tensor), self._last
            self._last = loss
            if not math.isfinite(loss):
                if self._nan and (math.isfinite(before) or not self._losses):
                    yield f"the loss is {loss}"
                continue
            excess = self._excess(loss, torch.finfo(tensor.dtype).eps)
            if any(excess > sigmas for sigmas in self._spikes):
                yield f"the loss is {loss:.6g}, {excess:.1f} standard deviations above those before"
            self._losses.append(loss)

    def _excess(self, loss: float, eps: float) -> float:
        """Return how far a loss lies above the median of those before, in standard deviations.

        These are told by the median absolute deviation, which earlier spikes do not move, and are
        no finer than the losses round.
        """
        if len(self._losses) < constants.SPIKE_FEWEST:
            return 0.0
        middle = statistics.median(self._losses)
        spread = statistics.median(abs(each - middle) for each in self._losses)
        spread = max(_SIGMA * spread, eps * abs(middle))
        return (loss - middle) / spread if spread else math.inf if loss > middle else 0.0


def _name(condition: Condition) -> str:
    return getattr(condition, "__name__", "the condition")


@interrupts.let_through
def _asked(condition: Condition, moment: Moment) -> object:
    return condition(moment)


def _sigmas(name: str) -> float:
    """Return the standard deviations of ``spike`` or ``spike:N``."""
    _, _, number = name.partition(":")
    return float(number) if number else constants.SPIKE


def _told(place: _Place, kind: str, count: int) -> str:
    path, _, phase, role, slot = place
    gradient = "gradient of " if phase == "backward" and role != "grad" else ""
    more = f" and {count - 1:,} more" if count > 1 else ""
    return f"{kind} in {gradient}{path or 'the model'} {role}[{slot}]{more}"
