"""The rows of records: the numbers of their columns, and how one begins."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import torch

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.signatures import argument_of
from llmdebug_nb.capture.sink import RecordedCall
from llmdebug_nb.core.columns import AT, COLUMNS, RECORDS, Row

MIN, MAX, NAN = AT["min"], AT["max"], AT["nan"]
KIND = RECORDS.span("dtype", "shape")
STATISTICS = RECORDS.span("min", "zero")
SEEN = RECORDS.span("dtype", "fingerprint")
CONTENT = RECORDS.span("min", "fingerprint")
FINGERPRINT, OFFSET, LENGTH, LOST = AT["fingerprint"], AT["offset"], AT["length"], AT["lost"]
DTYPE, SHAPE, KEPT, KEPT_SHAPE = AT["dtype"], AT["shape"], AT["kept"], AT["kept_shape"]
DEVICE, PRODUCER, ROLE = AT["device"], AT["producer"], AT["role"]
AFTER_SITE = [None] * (len(COLUMNS) - DTYPE)
WITHOUT_VALUES = [None] * (AT["argument"] - OFFSET)
_ARGUMENT, _VIEWS, _PLACED = AT["argument"], AT["views"], AT["placed"]
CUT_SHORT = "an exception of the program came while it was recorded"
_INPUTS = ("input", "after")  # the roles of arguments

# where a tensor was seen: number of the record, call, phase, role, slot
Site: TypeAlias = tuple[int, RecordedCall, str, str, str]
Numbers: TypeAlias = tuple[int | None, int | None]  # of the views that led to it, of its placement
NO_NUMBERS: Numbers = (None, None)


class Settled:
    """A tensor that never changes. ``place``: of its storage, reserved. ``row``: the first one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.place = tensor, pytorch.reserve_storage_number(tensor.untyped_storage())
        self.row: Row | None = None


def whole(made: list[Row], lost: Counter[str]) -> list[Row]:
    """Return the rows that are whole. ``lost``: counts the others.

    An exception may come anywhere in our own work: the stack is full, or a signal's handler raises.
    """
    kept = [row for row in made if row[DEVICE] is not None and row[SHAPE] is not None]
    if len(kept) < len(made):
        lost[CUT_SHORT] += len(made) - len(kept)
    return kept


def row_of(site: Site, numbers: Numbers, *described: object) -> Row:
    """Return the row of a tensor. ``described``: its columns from the dtype on."""
    number, call, phase, role, slot = site
    row: Row = [number, call.root_call, call.path, call.number, phase, role, slot, call.op]
    row += described
    row[_VIEWS], row[_PLACED] = numbers
    row[_ARGUMENT] = None
    if call.parameters is not None and is_of_input(call, phase, role):
        row[_ARGUMENT] = argument_of(slot, call.parameters)
    return row


def is_of_input(call: RecordedCall, phase: str, role: str) -> bool:
    """Tell whether a tensor is an argument of a call, or the gradient of one."""
    return role == "output" if phase != call.phase else role in _INPUTS
