"""Where a tensor comes from and where it goes: its neighbours in the dataflow of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmdebug_nb.core.records import Record
from llmdebug_nb.show import wire

_LINKS = 12  # of one relation; a mask may be taken thousands of times
_CALL = "path = ? AND call = ? AND phase = ? AND generation = ? AND step = ? AND rank = ?"


def flow(run: Any, record: Record, row_of: Callable[[int], int | None]) -> list[wire.Flow]:
    """Return the neighbours of ``record`` by relation; ``row_of``: the view's row of a record, None for none."""
    s = record.site
    call = (s.path, s.call, s.phase, s.generation, s.step, s.rank)
    found: dict[wire.Relation, list[int]] = {}
    if s.role == "input":
        found["outputs"] = _ids(run, f"{_CALL} AND role = 'output'", *call)
    else:
        found["inputs"] = (
            _ids(run, f"{_CALL} AND role = 'input'", *call) if s.role == "output" else []
        )
    found["consumers"] = _ids(run, "producer = ?", record.id)
    if record.producer is not None:
        found["siblings"] = _ids(run, "producer = ? AND id != ?", record.producer, record.id)
    return [
        view
        for relation, ids in found.items()
        if (view := _view(run, relation, ids, row_of))["total"]
    ]


def _ids(run: Any, where: str, *values: Any) -> list[int]:
    return [
        number for (number,) in run.query(f"SELECT id FROM rows WHERE {where} ORDER BY id", values)
    ]


def _view(
    run: Any, relation: wire.Relation, ids: list[int], row_of: Callable[[int], int | None]
) -> wire.Flow:
    rows = [(row, number) for number in ids if (row := row_of(number)) is not None]
    links: list[wire.Link] = [
        {"row": row, "label": str(run.record(number).site)} for row, number in rows[:_LINKS]
    ]
    return {"relation": relation, "links": links, "total": len(rows)}
