"""The tables of a run: what each call was given and gave, the kernels it launched, how long it kept the host, and how fused kernels are laid out.

Columns are named as in the files of the format, with times in microseconds of the program's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import tiling as tilings

if TYPE_CHECKING:
    import pandas

    from llmdebug_nb.store.run import Run

_HOST = (
    "rank",
    "generation",
    "step",
    "path",
    "call",
    "phase",
    "level",
    "op",
    "thread",
    "start",
    "duration",
    "gap",
)
_KERNELS = ("rank", "generation", "step", "path", "call", "phase", "op", "kernel", "code", "device", "stream", "start", "duration", "inputs", "outputs")  # fmt: skip
_SITE = ("rank", "generation", "step", "phase", "path", "call")
_TEXTS = frozenset({"path", "phase", "level", "op", "kernel", "device"})
_US = 1000.0
_Site = tuple[Any, ...]


def host(run: Run) -> pandas.DataFrame:
    """Return `Run.host`."""
    frame = _frame(run, "all_timings", _HOST, "level != 'recording'")
    return _in_us(frame, ("start", "duration", "gap"))


def kernels(run: Run) -> pandas.DataFrame:
    """Return `Run.kernels`."""
    return _with_tensors(_in_us(_frame(run, "all_launches", _KERNELS, "1")))


def _with_tensors(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Have dtypes and shapes as lists, as in `ops`; empty where they were not noted."""
    for side, column in (("in", "inputs"), ("out", "outputs")):
        tensors = [_tensors(text) for text in frame.pop(column)]
        frame[f"{side}_dtype"] = [[dtype for dtype, _ in one] for one in tensors]
        frame[f"{side}_shape"] = [[shape for _, shape in one] for one in tensors]
    return frame


def _tensors(text: Any) -> list[tuple[str, tuple[int, ...]]]:
    try:
        return [
            (str(dtype), tuple(int(size) for size in shape))
            for dtype, shape in json.loads(text or "[]")
        ]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return []


def _frame(run: Run, view: str, columns: tuple[str, ...], where: str) -> pandas.DataFrame:
    import pandas

    rows = run.index.query(
        f"SELECT {','.join(columns)} FROM {view} WHERE {where} ORDER BY rank, root_call, start, id"
    )
    frame = pandas.DataFrame(rows, columns=list(columns))
    for name in _TEXTS.intersection(columns):
        frame[name] = frame[name].fillna("").astype(str)
    return _with_ids(run, frame)


def _with_ids(run: Run, frame: pandas.DataFrame) -> pandas.DataFrame:
    """Add the execution id of each call, "" where it has none: as in a backward pass, and for operators that were not recorded."""
    ids = {
        tuple(row[:-1]): row[-1]
        for row in run.index.query("SELECT rank, generation, step, path, call, id FROM call_rows")
    }
    sites = zip(
        *(frame[name] for name in ("rank", "generation", "step", "path", "call", "phase")),
        strict=True,
    )
    frame["id"] = [ids.get(tuple(site), "") if phase == "forward" else "" for *site, phase in sites]
    return frame


def _in_us(
    frame: pandas.DataFrame, columns: tuple[str, ...] = ("start", "duration")
) -> pandas.DataFrame:
    """Raise CorruptDumpError where a time is no number."""
    for name in columns:
        try:
            frame[name] = frame[name].astype("float64") / _US
        except (ValueError, TypeError) as error:
            raise CorruptDumpError(
                f"the table of times is damaged: {name} holds something else ({error})"
            ) from None
    return frame


def tiling(run: Run) -> pandas.DataFrame:
    """Return `Run.tiling`."""
    import pandas

    kernels = run.index.query("SELECT name, source FROM all_kernels")
    noted = run.index.query("SELECT name, configuration FROM all_tilings")
    return pandas.DataFrame(tilings.rows(kernels, noted), columns=list(tilings.COLUMNS))


def ops(run: Run) -> pandas.DataFrame:
    """Return `Run.ops`."""
    import pandas

    levels = {
        row[:-1]: row[-1]
        for row in run.index.query(f"SELECT {','.join(_SITE)}, level FROM operator_rows")
    }
    found: dict[_Site, dict[str, Any]] = {}
    for *site, op, role, dtype, shape in run.index.query(
        f"SELECT {','.join(_SITE)}, op, role, dtype, shape FROM rows WHERE role IN ('input', 'output') ORDER BY id"
    ):
        key = tuple(site)
        row = found.get(key)
        if row is None:
            row = found[key] = {
                **dict(zip(_SITE, key, strict=True)),
                "level": levels.get(key, "module"),
                "op": op,
            }
            row |= {
                "parameters": {},
                **{f"{side}_{what}": [] for side in ("in", "out") for what in ("dtype", "shape")},
            }
        side = "in" if role == "input" else "out"
        row[f"{side}_dtype"].append(dtype)
        row[f"{side}_shape"].append(_sizes(shape))
    _add_parameters(run, found)
    columns = [
        *_SITE,
        "level",
        "op",
        "parameters",
        "in_dtype",
        "in_shape",
        "out_dtype",
        "out_shape",
    ]
    return _with_ids(run, pandas.DataFrame(list(found.values()), columns=columns))


def _sizes(text: Any) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return ()


def _add_parameters(run: Run, found: dict[_Site, dict[str, Any]]) -> None:
    """Arguments of operators that are no tensors; of modules, their plain attributes, which are noted once."""
    given: dict[tuple[Any, ...], dict[str, str]] = {}
    attributes: dict[str, dict[str, str]] = {}
    for generation, step, path, call, role, slot, value in run.index.query(
        "SELECT generation, step, path, call, role, slot, value FROM scalar_rows WHERE role IN ('input', 'attribute')"
    ):
        if role == "attribute":
            attributes.setdefault(path, {})[slot] = value
        else:
            given.setdefault((generation, step, path, call), {})[slot] = value
    for row in found.values():
        own = given.get((row["generation"], row["step"], row["path"], row["call"]), {})
        row["parameters"] = {
            **(attributes.get(row["path"], {}) if row["level"] == "module" else {}),
            **own,
        }


def kernel_frame(found: Iterable[tuple[int, list[Any]]]) -> pandas.DataFrame:
    """Return rows as `columns.LAUNCHES` has them, each with its step, as `Run.kernels` does."""
    import pandas

    rows = [(0, 0, step, *row) for step, row in found]
    return _with_tensors(_in_us(pandas.DataFrame(rows, columns=list(_KERNELS))))
