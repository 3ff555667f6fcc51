"""Golden's tensors around a place, by name: those that mine may hold there instead."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmdebug_nb.core import constants
from llmdebug_nb.core.identity import identifies_itself
from llmdebug_nb.core.layers import layer_of
from llmdebug_nb.core.paths import parent_of
from llmdebug_nb.core.records import Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.region import Region
from llmdebug_nb.replay.runs import Runs

_NUMBER = re.compile(r"\d+")

Named = tuple[str, Record]


def around(flow: Flow, golden: Record, region: Region | None) -> list[Named]:
    """Return golden's tensors near one of its own, the nearest first.

    They are those that the region takes and makes, those of the modules around it, and those of the
    same place in the layers before and after.
    """
    records: list[Record] = []
    if region is not None:
        records += [d.pair.golden for d in region.entries if d.pair.golden is not None]
        records += [r for call in region.golden for r in (*call.inputs, *call.outputs)]
    records += _of_layers(flow, golden)
    call = flow.calls.get(golden.site.key)
    while call is not None and len(records) < 2 * constants.NEIGHBOURS:
        records += [*call.inputs, *(r for each in call.inner for r in each.records_of)]
        call = call.around
    return _named(flow, records, golden)


def weights(flow: Flow, golden: Record, runs: Runs) -> list[Named]:
    """Return golden's other weights of the same shape: those of its module, then of its name."""
    own = golden.site
    found = [
        record
        for record in runs.golden.run.records(role="weight", rank=own.rank)
        if record.summary.shape == golden.summary.shape
    ]

    def distance(record: Record) -> tuple[bool, bool, int]:
        beside = parent_of(record.site.path) == parent_of(own.path)
        return not beside, _place(record) != _place(golden), abs(record.id - golden.id)

    return _named(flow, sorted(found, key=distance), golden)


def name(flow: Flow, record: Record) -> str:
    """Return a tensor's name, by the outermost module that gives it: ``output of layers.0.mlp``."""
    for _ in range(len(flow.records)):
        before = flow.records.get(record.producer) if record.producer is not None else None
        if before is None or before.id == record.id:
            break
        record = before
    record = _given(flow, record) if record.site.role == "output" else _weight(flow, record)
    site = record.site
    if site.role == "weight":
        return f"{site.path}.{site.slot}".lstrip(".")
    several = site.key._replace(call=1) in flow.calls
    place = f"call {site.call + 1} of {site.path}" if several else site.path or "the model"
    if site.role == "input":
        return f"{record.argument or f'input {site.slot}'} of {place}"
    call = flow.calls.get(site.key)
    alone = call is None or len(call.outputs) == 1
    return f"output of {place}" if alone else f"output {site.slot} of {place}"


def _given(flow: Flow, record: Record) -> Record:
    """Return the output of the outermost module that hands out what a call inside it makes."""
    call = flow.calls.get(record.site.key)
    while call is not None and call.around is not None and call.around.key.path:
        call = call.around
        same = (r for r in call.outputs if r.producer == record.id or _equal(r, record))
        given = next(same, None)
        if given is None:
            break
        record = given
    return record


def _weight(flow: Flow, record: Record) -> Record:
    """Return the weight that a tensor is, if one has its bytes."""
    weights = (r for r in flow.records.values() if r.site.role == "weight")
    return next((r for r in weights if _equal(r, record)), record)


def _equal(one: Record, other: Record) -> bool:
    print_ = one.summary.fingerprint
    return print_ is not None and print_ == other.summary.fingerprint


def _named(flow: Flow, records: Iterable[Record], golden: Record) -> list[Named]:
    """Return the tensors that hold other values than golden's own, each once."""
    seen: set[int | str] = {golden.id, golden.summary.fingerprint or golden.id}
    found = []
    for record in records:
        s = record.summary
        content = s.fingerprint or record.id
        if record.id in seen or content in seen or not identifies_itself(s):
            continue
        seen |= {record.id, content}
        found.append((name(flow, record), record))
    return found[: constants.NEIGHBOURS]


def _of_layers(flow: Flow, record: Record) -> list[Record]:
    """Return the tensors of the same place in the layers before and after."""
    site, layer = record.site, layer_of(record.site.path)
    if not layer:
        return []
    number = _last(layer)
    found = []
    for other in (int(number) - 1, int(number) + 1):
        path = f"{layer[: -len(number)]}{other}{site.path[len(layer) :]}"
        call = flow.calls.get(site.key._replace(path=path))
        of_place = call.records_of if call is not None else []
        found += [r for r in of_place if (r.site.role, r.site.slot) == (site.role, site.slot)]
    return found


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _place(record: Record) -> tuple[str, str]:
    """Return the place of a tensor without its numbers, so that layers are equal."""
    return _NUMBER.sub("#", record.site.path), record.site.slot
