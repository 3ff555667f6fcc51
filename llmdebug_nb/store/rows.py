"""Rows of the index as records, and records as rows."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from sys import intern
from typing import Any, TypeAlias

from llmdebug_nb.core import placement, row_sizes
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.placement import Placement
from llmdebug_nb.core.records import Node, Record, RootCall, Site, Summary, View
from llmdebug_nb.store.checked import json_of, shape_of
from llmdebug_nb.store.format import payload_dtype
from llmdebug_nb.store.views import ROW_COLUMNS, VIEWS

Row = Sequence[Any]
Value: TypeAlias = str | float | bytes | None  # of a column
_OWN = (
    "id", "seq", "op", "device", "producer", "payload", "lost", "kept", "kept_shape", "argument",
    "views", "placed",
)  # fmt: skip
_SITE = tuple(field.name for field in fields(Site))
_SUMMARY = tuple(field.name for field in fields(Summary))
_ALL = (*_OWN, *_SITE, *_SUMMARY)
SELECTED = ",".join(_ALL)  # what `record_of` reads, in its order
SELECTED_KINDS = VIEWS["rows"].row(*_ALL)
_own_values, _site_values, _summary_values = (
    operator.attrgetter(*names) for names in (_OWN, _SITE, _SUMMARY)
)
_MADE = (*_SITE, *_OWN, *_SUMMARY, "kind", "root", "root_call")  # as `row_of` makes them
_PAYLOAD, _SHAPE, _KEPT_SHAPE, _VIEWS, _DTYPE, _PLACED = map(
    _MADE.index, ("payload", "shape", "kept_shape", "views", "dtype", "placed")
)
_in_order = operator.itemgetter(*map(_MADE.index, ROW_COLUMNS))
FIGURES = (*_SUMMARY, "payload", "lost")  # the columns that a tensor's values decide


@functools.lru_cache(1 << 12)
def _json(shape: tuple[int, ...]) -> str:
    return json.dumps(shape)


def record_of(row: Row, path: Path | None) -> Record:
    """Return the record of a row of `SELECTED` columns. Raises CorruptDumpError."""
    (
        number, seq, op, device, producer, payload, lost, kept, kept_shape, argument, chain, placed,
        where, step, call, phase, role, slot, rank, generation,
        dtype, shape, low, high, mean, norm, nan, inf, zero, fingerprint, of_rows,
    ) = row  # fmt: skip
    try:
        sizes = shape_of(shape)
    except (ValueError, RecursionError):
        raise CorruptDumpError(
            f"{path}: record {number} has no valid shape ({shape[:80]!r})"
        ) from None
    if producer is not None and producer >= number:
        raise CorruptDumpError(f"{path}: record {number} is made of a later one, {producer}")
    if nan is not None and None in (low, high, mean, norm):  # SQLite keeps NaN as NULL
        low, high, mean, norm = (math.nan if f is None else f for f in (low, high, mean, norm))
    if of_rows is not None and not row_sizes.are_of(of_rows, sizes):
        raise CorruptDumpError(f"{path}: record {number} has row sizes, but not one for each row")
    summary = Summary(
        intern(dtype), sizes, low, high, mean, norm, nan, inf, zero, fingerprint, of_rows
    )
    if kept is not None or kept_shape is not None:
        kept_shape = _kept_shape(path, number, kept, kept_shape)
    # each row has its own copies of these texts: one for all makes any look at them faster
    where, phase, role = intern(where), intern(phase), intern(role)
    slot, op = intern(slot), intern(op)
    site = Site(where, step, call, phase, role, slot, rank, generation)
    return Record(
        number, site, seq, op, summary, device, producer, payload, lost, kept, kept_shape, argument,
        () if chain is None else views_of(path, chain),
        None if placed is None else placement_of(path, placed),
    )  # fmt: skip


@functools.lru_cache(1024)  # chains: each place in a model has one
def views_of(path: Path | None, chain: str) -> tuple[View, ...]:
    """Read the views of a record. Raises CorruptDumpError."""
    try:
        return tuple(json_of(list[View], chain))
    except (ValueError, RecursionError) as error:
        raise CorruptDumpError(f"{path}: the views of a record are damaged ({error})") from None


@functools.lru_cache(1024)
def placement_of(path: Path | None, text: str) -> Placement:
    """Read the placement of a record. Raises CorruptDumpError."""
    try:
        return placement.read(text)
    except ValueError as error:
        raise CorruptDumpError(f"{path}: where a record belongs is damaged ({error})") from None


def _kept_shape(path: Path | None, number: int, kept: object, text: object) -> tuple[int, ...]:
    try:
        if not isinstance(kept, str) or not isinstance(text, str):
            raise ValueError("no texts")
        payload_dtype(kept, dtype="")
        return shape_of(text)
    except (ValueError, RecursionError):
        part = f"kept {str(kept)[:60]!r} of shape {str(text)[:60]!r}"
        raise CorruptDumpError(f"{path}: record {number} says no valid part ({part})") from None


def texts_of(text: str, path: Path | None, what: str) -> list[str]:
    """Read a JSON list of texts. Raises CorruptDumpError."""
    try:
        return json_of(list[str], text)
    except (ValueError, RecursionError) as error:
        raise CorruptDumpError(f"{path}: {what} is damaged ({error})") from None


def node_row(number: int, node: Node) -> Row:
    """Return a module as a row of the model tree."""
    source = None if node.source is None else str(node.source)
    params, aliases = json.dumps(node.params), json.dumps(node.aliases)
    return (
        number, node.path, node.name, node.type, node.parent, params, aliases, node.root, source
    )  # fmt: skip


def row_of(
    record: Record, calls: Mapping[tuple[int, int], RootCall], unread: bool = False
) -> tuple[Any, ...]:
    """Return a record's values of `ROW_COLUMNS`; ``calls``: root calls by generation and step.

    ``unread``: its statistics are not known yet, which a row without a dtype says.
    """
    site, summary = record.site, record.summary
    call = calls.get((site.generation, site.step))
    values = [*_site_values(site), *_own_values(record), *_summary_values(summary)]
    values += (call.kind, call.root, call.index) if call else ("", "", 0)
    values[_PAYLOAD] = None if record.payload is None else str(record.id)
    values[_SHAPE] = _json(summary.shape)
    values[_KEPT_SHAPE] = None if record.kept_shape is None else json.dumps(record.kept_shape)
    values[_VIEWS] = json.dumps(record.views) if record.views else None
    values[_PLACED] = None if record.placed is None else record.placed.as_json()
    if unread:
        values[_DTYPE] = None
    row: tuple[Any, ...] = _in_order(values)
    return row


def figures_of(record: Record) -> dict[str, Value]:
    """Return a record's values of `FIGURES`."""
    values: dict[str, Value] = dict(zip(_SUMMARY, _summary_values(record.summary), strict=True))
    values["shape"] = _json(record.summary.shape)
    values["payload"] = None if record.payload is None else str(record.id)
    values["lost"] = record.lost
    return values
