"""The tables of calls, kernels, host times and launch configurations of a run.

Columns are named as in the files of the format, with times in microseconds of the program's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.columns import LAUNCHES, TIMINGS
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.store import tiling as tilings
from llmdebug_nb.store.queries import Index
from llmdebug_nb.store.views import VIEWS

if TYPE_CHECKING:
    import pandas

_PLACE = ("rank", "generation", "step")
_HOST = (*_PLACE, *TIMINGS.names[2:])  # without `id` and `root_call`
_KERNELS = (*_PLACE, *LAUNCHES.names[2:])
_SITE = CallKey._fields
_OF_ARGUMENTS = ("generation", "step", "path", "call")
_SIDES = tuple(f"{side}_{what}" for side in ("in", "out") for what in ("dtype", "shape"))
_TEXTS = frozenset({"path", "phase", "level", "op", "kernel", "device"})
_US = 1000.0
_Site = tuple[Any, ...]


def host(index: Index) -> pandas.DataFrame:
    """Return `Run.host`."""
    frame = _frame(index, "all_timings", _HOST, "level != 'recording'")
    return _in_us(frame, ("start", "duration", "gap"))


def kernels(index: Index) -> pandas.DataFrame:
    """Return `Run.kernels`."""
    return _with_tensors(_in_us(_frame(index, "all_launches", _KERNELS, "1")))


def _with_tensors(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Replace the JSON of tensors by lists of dtypes and shapes, empty if none were recorded."""
    for side, column in (("in", "inputs"), ("out", "outputs")):
        tensors = [_tensors(text) for text in frame.pop(column)]
        frame[f"{side}_dtype"] = [[dtype for dtype, _ in one] for one in tensors]
        frame[f"{side}_shape"] = [[shape for _, shape in one] for one in tensors]
    return frame


def _tensors(text: str | None) -> list[tuple[str, tuple[int, ...]]]:
    try:
        return [
            (str(dtype), tuple(int(size) for size in shape))
            for dtype, shape in json.loads(text or "[]")
        ]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return []


def _frame(index: Index, view: str, columns: tuple[str, ...], where: str) -> pandas.DataFrame:
    import pandas

    sql = f"SELECT {','.join(columns)} FROM {view} WHERE {where}"
    kind = VIEWS[view].row(*columns)
    rows = index.query(kind, f"{sql} ORDER BY rank, root_call, start, id")
    frame = pandas.DataFrame(rows, columns=list(columns))
    for name in _TEXTS.intersection(columns):
        frame[name] = frame[name].fillna("").astype(str)
    return _with_ids(index, frame)


def _with_ids(index: Index, frame: pandas.DataFrame) -> pandas.DataFrame:
    """Add the execution id of each call; backward calls and unrecorded operators have ""."""
    columns = (*_PLACE, "path", "call", "id")
    sql = f"SELECT {','.join(columns)} FROM call_rows"
    rows = index.query(VIEWS["call_rows"].row(*columns), sql)
    ids = {row[:-1]: row[-1] for row in rows}
    names = ("rank", "generation", "step", "path", "call", "phase")
    sites = zip(*(frame[name] for name in names), strict=True)
    frame["id"] = [ids.get(tuple(site), "") if phase == "forward" else "" for *site, phase in sites]
    return frame


def _in_us(
    frame: pandas.DataFrame, columns: tuple[str, ...] = ("start", "duration")
) -> pandas.DataFrame:
    """Convert nanoseconds to microseconds."""
    for name in columns:
        frame[name] = frame[name].astype("float64") / _US
    return frame


def tiling(index: Index) -> pandas.DataFrame:
    """Return `Run.tiling`."""
    import pandas

    kernels = index.query(tuple[str, str], "SELECT name, source FROM all_kernels")
    noted = index.query(tuple[str, str], "SELECT name, configuration FROM all_tilings")
    return pandas.DataFrame(tilings.rows(kernels, noted), columns=list(tilings.COLUMNS))


def ops(index: Index) -> pandas.DataFrame:
    """Return `Run.ops`."""
    import pandas

    site = ",".join(_SITE)
    operators = index.query(
        VIEWS["operator_rows"].row(*_SITE, "level"), f"SELECT {site}, level FROM operator_rows"
    )
    levels = {row[:-1]: row[-1] for row in operators}
    sql = f"""SELECT {site}, op, role, dtype, shape FROM rows
 WHERE role IN ('input', 'output') ORDER BY id"""
    calls: dict[_Site, dict[str, Any]] = {}
    kind = VIEWS["rows"].row(*_SITE, "op", "role", "dtype", "shape")
    for *key, op, role, dtype, shape in index.query(kind, sql):
        call = tuple(key)
        if call not in calls:
            level = levels.get(call, "module")
            calls[call] = dict(zip(_SITE, call, strict=True))
            calls[call] |= {"level": level, "op": op, "parameters": {}}
            calls[call] |= {name: [] for name in _SIDES}
        side = "in" if role == "input" else "out"
        calls[call][f"{side}_dtype"].append(dtype)
        calls[call][f"{side}_shape"].append(_sizes(shape))
    _add_parameters(index, calls)
    columns = [*_SITE, "level", "op", "parameters", *_SIDES]
    return _with_ids(index, pandas.DataFrame(list(calls.values()), columns=columns))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return ()


def _add_parameters(index: Index, calls: dict[_Site, dict[str, Any]]) -> None:
    """Add arguments that are not tensors, and the plain attributes of modules."""
    arguments: dict[_Site, dict[str, str | None]] = {}
    attributes: dict[str, dict[str, str | None]] = {}
    for row in index.scalars(role=("input", "attribute")):
        if row.role == "attribute":
            attributes.setdefault(row.path, {})[row.slot] = row.value
        else:
            call = (row.generation, row.step, row.path, row.call)
            arguments.setdefault(call, {})[row.slot] = row.value
    for columns in calls.values():
        own = arguments.get(tuple(columns[name] for name in _OF_ARGUMENTS), {})
        plain = attributes.get(columns["path"], {}) if columns["level"] == "module" else {}
        columns["parameters"] = {**plain, **own}


def kernel_frame(found: Iterable[tuple[int, list[Any]]]) -> pandas.DataFrame:
    """Return rows as `columns.LAUNCHES` has them, each with its step, as `Run.kernels` does."""
    import pandas

    rows = [(0, 0, step, *row) for step, row in found]
    return _with_tensors(_in_us(pandas.DataFrame(rows, columns=list(_KERNELS))))
