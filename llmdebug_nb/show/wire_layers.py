"""Where the error goes, as the kernel sends it to the explorer in a page; see `wire`."""

from __future__ import annotations

from typing import TypedDict

from llmdebug_nb.show.wire import Num


class Layer(TypedDict):
    """A row of the map of layers. ``node``: its place in the tree; -1: outside of all layers."""

    path: str
    type: str
    node: int


class LayerMap(TypedDict):
    """The worst row of each layer at each step of the stepper, layer by layer in six buffers.

    The layers are in execution order. The buffers: error and limit (little-endian float32, NaN: no
    figure), id of the row (int32, -1: no record), state (uint8, see `CallCell`), the share of its
    tokens that differ (float32, NaN: unknown), and which these are (int32, an index of
    ``differing``).
    """

    layers: list[Layer]
    steps: int
    differing: list[str]


class CallCell(TypedDict):
    """A call inside a layer, by its worst output. ``label``: its last name.

    ``state``: 0 no record, 1 unmatched, 2 rewritten, 3 match, 4 within noise, 5 expected,
    6 diverged by inheritance, 7 diverged where the error is made. ``differing``: which of its
    tokens differ, "" for none.
    """

    label: str
    path: str
    row: int
    state: int
    error: Num
    limit: Num
    differing: str


class Calls(TypedDict):
    """The calls of a layer in a step, in execution order: the first of ``total``."""

    cells: list[CallCell]
    total: int
