"""How far the values of each dtype reach."""

from __future__ import annotations

import math

import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.errcheck.inputs import ROOM, limit
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.core.faults import Headroom, Near

_LISTED = 16  # calls near the limit, of each dtype
_Place = tuple[str, str]  # name and path of a call


class _Reach:
    """The reach of one dtype. ``near``: the calls that come near its limit, largest first."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.limit = limit(dtype)
        self.largest, self.place = 0.0, ("", "")
        self.near: dict[_Place, float] = {}


class ReachByDtype:
    """The largest finite values of all outputs, but for those that calls were given.

    ``usual``: up to it, a positive reach tells nothing new: it is neither near the limit of its
    dtype nor the largest so far.
    """

    def __init__(self) -> None:
        self.usual: dict[torch.dtype, float] = {}
        self._reaches: dict[torch.dtype, _Reach] = {}

    def __getitem__(self, dtype: torch.dtype) -> _Reach:
        if dtype not in self._reaches:
            self._reaches[dtype] = _Reach(dtype)
        return self._reaches[dtype]

    def is_ordinary(self, largest: float, dtype: torch.dtype, call: OpenCall) -> bool:
        """Note a reach that is neither bad nor zero nor near the limit; False: it is."""
        known = self._reaches.get(dtype) or self[dtype]
        if not 0 < largest < known.limit / ROOM:
            return False
        if largest > known.largest:
            self._raise(known, largest, dtype, call)
        return True

    def _raise(self, known: _Reach, largest: float, dtype: torch.dtype, call: OpenCall) -> None:
        known.largest, known.place = largest, _place(call)
        self.usual[dtype] = min(largest, math.nextafter(known.limit / ROOM, 0))

    def add_near(self, largest: float, dtype: torch.dtype, call: OpenCall) -> None:
        """Note a call that comes near the limit though its inputs do not."""
        known, place = self[dtype], _place(call)
        if largest > known.largest:
            self._raise(known, largest, dtype, call)
        known.near[place] = max(largest, known.near.get(place, 0.0))

    def all(self) -> tuple[Headroom, ...]:
        """Return the headroom of each dtype, the least first."""
        rows = [
            Headroom(
                DTYPE_NAMES.get(dtype, str(dtype)), each.limit, each.largest, *each.place,
                tuple(
                    Near(*place, largest)
                    for place, largest in sorted(each.near.items(), key=lambda pair: -pair[1])
                )[:_LISTED],
                len(each.near),
            )
            for dtype, each in self._reaches.items() if each.largest
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: row.factor))


def _place(call: OpenCall) -> _Place:
    return f"{call.op}.{call.number}.{call.phase}", call.path
