"""The neighbours of a tensor in the dataflow of its run."""

from __future__ import annotations

from collections.abc import Callable

from llmdebug_nb.core.records import Record
from llmdebug_nb.show import wire
from llmdebug_nb.store.run import Run

_LINKS = 12  # per relation; a mask may have thousands of consumers


def flow(run: Run, record: Record, row_of: Callable[[int], int | None]) -> list[wire.Flow]:
    """Return the neighbours of ``record`` by relation.

    ``row_of`` returns the view's row of a record, None if it has none.
    """
    site, index = record.site, run.index
    neighbours: dict[wire.Relation, list[int]] = {}
    if site.role == "input":
        neighbours["outputs"] = index.ids_of_call(site.key, "output")
    else:
        is_output = site.role == "output"
        neighbours["inputs"] = index.ids_of_call(site.key, "input") if is_output else []
    neighbours["consumers"] = index.record_ids(producer=record.id)
    if record.producer is not None:
        siblings = index.record_ids(producer=record.producer)
        neighbours["siblings"] = [number for number in siblings if number != record.id]
    return [
        view
        for relation, ids in neighbours.items()
        if (view := _view(run, relation, ids, row_of))["total"]
    ]


def _view(
    run: Run, relation: wire.Relation, ids: list[int], row_of: Callable[[int], int | None]
) -> wire.Flow:
    rows = [(row, number) for number in ids if (row := row_of(number)) is not None]
    links: list[wire.Link] = [
        {"row": row, "label": str(run.record(number).site)} for row, number in rows[:_LINKS]
    ]
    return {"relation": relation, "links": links, "total": len(rows)}
