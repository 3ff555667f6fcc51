"""Where a tensor comes from and where it goes: its neighbours in the dataflow of its run."""

from __future__ import annotations

from collections.abc import Callable

from llmdebug_nb.core.opened_run import OpenedRun
from llmdebug_nb.core.records import Record
from llmdebug_nb.show import wire

_LINKS = 12  # of one relation; a mask may be taken thousands of times


def flow(run: OpenedRun, record: Record, row_of: Callable[[int], int | None]) -> list[wire.Flow]:
    """Return the neighbours of ``record`` by relation; ``row_of``: the view's row of a record, None for none."""
    site, index = record.site, run.index
    found: dict[wire.Relation, list[int]] = {}
    if site.role == "input":
        found["outputs"] = index.ids_of_call(site.key, "output")
    else:
        made = site.role == "output"
        found["inputs"] = index.ids_of_call(site.key, "input") if made else []
    found["consumers"] = index.record_ids(producer=record.id)
    if record.producer is not None:
        siblings = index.record_ids(producer=record.producer)
        found["siblings"] = [number for number in siblings if number != record.id]
    return [
        view
        for relation, ids in found.items()
        if (view := _view(run, relation, ids, row_of))["total"]
    ]


def _view(
    run: OpenedRun, relation: wire.Relation, ids: list[int], row_of: Callable[[int], int | None]
) -> wire.Flow:
    rows = [(row, number) for number in ids if (row := row_of(number)) is not None]
    links: list[wire.Link] = [
        {"row": row, "label": str(run.record(number).site)} for row, number in rows[:_LINKS]
    ]
    return {"relation": relation, "links": links, "total": len(rows)}
