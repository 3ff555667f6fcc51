"""The rows of records: the numbers of their columns, and how one begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import msgspec
import torch

from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.kept_sources import KeptSources
from llmdebug_nb.capture.signatures import argument_of
from llmdebug_nb.core.batches import NO_ROWS, Batch, ScalarRow, count_packed
from llmdebug_nb.core.columns import AT, COLUMNS, RECORDS, Row
from llmdebug_nb.core.kernels.on_device import Page
from llmdebug_nb.core.records import RootCall

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
ROW_SIZES = AT["row_sizes"]
CUT_SHORT = "an exception of the program came while it was recorded"
_INPUTS = ("input", "after")  # the roles of arguments
UNKNOWN = -1  # how many nan, of a packed record whose figures are not there yet: see packing.h
MANY = 4096  # rows in hand before they are committed, also in the middle of a root call

# where a tensor was seen: number of the record, call, phase, role, slot
Site: TypeAlias = tuple[int, OpenCall, str, str, str]
Numbers: TypeAlias = tuple[int | None, int | None]  # of the views that led to it, of its placement
NO_NUMBERS: Numbers = (None, None)


class Settled:
    """A tensor that never changes. ``place``: of its storage, reserved. ``row``: the first one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.place = tensor, pytorch.reserve_storage_number(tensor.untyped_storage())
        self.row: Row | None = None


class Hand:
    """Rows that are not committed yet, in the order of their tables.

    ``records``, ``operators``, ``scalars``, ``called``: rows; the last ones are execution ids of
    calls. ``packed``: further records, see `Batch`. ``measured``: by page, the places in ``packed``
    that wait for figures of it: rows of four int64, the place and then as in `Measured`.
    """

    __slots__ = ("called", "measured", "operators", "packed", "records", "scalars")

    def __init__(self) -> None:
        self.records: list[Row] = []
        self.operators: list[Row] = []
        self.scalars: list[ScalarRow] = []
        self.called: list[tuple[int, str, int, str]] = []
        self.packed = bytearray(NO_ROWS)
        self.measured: dict[Page, bytearray] = {}

    @property
    def count(self) -> int:
        """How many records there are."""
        return len(self.records) + count_packed(self.packed)

    @property
    def is_full(self) -> bool:
        """They are to be committed now."""
        return max(self.count, len(self.operators)) >= MANY

    def unpack(self) -> list[Row]:
        """Let packed records be rows like all others. Return those whose figures are missing."""
        unpacked: list[Row] = msgspec.msgpack.decode(self.packed)
        missing = [row for row in unpacked if row[NAN] == UNKNOWN]
        for row in missing:
            row[STATISTICS] = [None] * len(row[STATISTICS])
        self.records += unpacked
        self.packed[:] = NO_ROWS
        self.measured.clear()
        return missing

    def drop_partial(self, lost: Counter[str]) -> None:
        """Keep the records that are whole. ``lost``: counts the others.

        An exception may come anywhere in our own work: the stack is full, or a handler raises.
        """
        whole = [row for row in self.records if None not in (row[DEVICE], row[SHAPE])]
        if len(whole) < len(self.records):
            lost[CUT_SHORT] += len(self.records) - len(whole)
            self.records = whole

    def batch(
        self, calls: Iterable[RootCall], sources: KeptSources, chains: list[tuple[int, str]]
    ) -> Batch:
        """Return these rows, with call stacks, functions and chains of views, to be committed."""
        return Batch(
            records=self.records, calls=calls, scalars=self.scalars, operators=self.operators,
            sources=sources.stacks, functions=sources.functions, chains=chains,
            called=self.called, packed=self.packed,
        )  # fmt: skip


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


def is_of_input(call: OpenCall, phase: str, role: str) -> bool:
    """Tell whether a tensor is an argument of a call, or the gradient of one."""
    return role == "output" if phase != call.phase else role in _INPUTS
