"""The values that are held in memory: those of both programs that were made or asked for last."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from llmdebug_nb.core import constants


class Place(NamedTuple):
    """Where values lie: the side (0: golden, 1: mine), and the offset among its values."""

    side: int
    offset: int


class Held(NamedTuple):
    """Values, and the fingerprint of their tensor when they were made; None if it has none."""

    data: bytes
    fingerprint: str | None


class Window:
    """Values by place. Beyond ``limit`` bytes, those that were used longest ago are forgotten.

    ``ahead``: bytes that each program may be ahead of what was taken from it; they count, too.
    ``most``: the bytes that were held at most: beside the window, the tensor that comes in.
    """

    def __init__(self, window: int) -> None:
        """``window``: bytes, for both programs together."""
        self.ahead = window // constants.LOCKSTEP_AHEAD
        self.limit = window - 2 * self.ahead
        self.most = 0
        self._held: OrderedDict[Place, Held] = OrderedDict()
        self._bytes = 0
        self._not_taken = [0, 0]

    def hold(self, place: Place, held: Held, not_taken: int = 0) -> None:
        """Hold values. Of a tensor larger than the window, nothing else is held.

        ``not_taken``: bytes of values that this program is ahead now.
        """
        known = self._held.pop(place, None)
        self._held[place] = held
        self._bytes += len(held.data) - (len(known.data) if known else 0)
        self._not_taken[place.side] = not_taken
        self.most = max(self.most, self._bytes + sum(self._not_taken))
        while self._bytes > self.limit and len(self._held) > 1:
            _, old = self._held.popitem(last=False)
            self._bytes -= len(old.data)

    def get(self, place: Place) -> Held | None:
        """Return values, or None if they were forgotten."""
        found = self._held.get(place)
        if found is not None:
            self._held.move_to_end(place)
        return found
