"""Writing the tables of a run as msit's `dump --exec` does: the same folders, files and columns.

    operation_io_tensors/{pid}/operation_tensors_{n}.csv    inputs and outputs of each call; columns
                                                            are separated by ``|``
    kernel_io_tensors/{pid}/kernel_tensors_{n}.csv          the same for kernels, with their times
    cpu_profiling/{pid}/operation_statistic_{n}.csv         host time of each call
    tiling/kernel_tiling.csv                                launch configurations of fused kernels,
                                                            of which msit keeps raw bytes

``n`` is the step, ``generation_step`` from the second generation on. Columns without a meaning here
are empty.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.core.errors import StoreError, saving
from llmdebug_nb.core.printable import cell
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.views import STRIDE

if TYPE_CHECKING:
    import pandas

OP_COLUMNS = (
    "CaseNum", "CaseName", "OpName", "OpParam", "InNum", "InDType", "InFormat", "InShape",
    "OutNum", "OutDType", "OutFormat", "OutShape", "DataGenType", "DataGenRange", "InTensorFile",
    "OutTensorFile", "TestType", "TestLevel", "FromModel", "SocVersion", "ExpectedError",
)  # fmt: skip
KERNEL_COLUMNS = (*OP_COLUMNS, "Device", "Stream", "StartUs", "DurationUs")
_BAR = "|"
_FORMAT = "nd"  # row-major
_Row = Mapping[str, Any]


def write_tables(run: Run, folder: Path) -> list[Path]:
    """Write the tables of a run into ``folder``; return the files.

    Raises:
        StoreError: the run has none. DumpWriteError: the folder can't be written to.
    """
    ops, kernels, host, tiling = run.ops(), run.kernels(), run.host(), run.tiling()
    model = next((node.type for node in run.nodes if not node.path), "")
    given = {_call(row): row for row in _rows(ops)}
    written = []
    with saving(folder, "; choose another folder"):
        for where, rows in _files(run, ops):
            written.append(
                _write(
                    folder / "operation_io_tensors" / where.format("operation_tensors"),
                    OP_COLUMNS,
                    _ops(rows, model),
                    _BAR,
                )
            )
        for where, rows in _files(run, kernels):
            table = _kernels(rows, given, model)
            written.append(
                _write(
                    folder / "kernel_io_tensors" / where.format("kernel_tensors"),
                    KERNEL_COLUMNS,
                    table,
                    _BAR,
                )
            )
        for where, rows in _files(run, host):
            columns, table = _statistics(rows)
            written.append(
                _write(
                    folder / "cpu_profiling" / where.format("operation_statistic"),
                    columns,
                    table,
                    ",",
                )
            )
        if len(tiling):
            cells = ([_cell(value) for value in row.values()] for row in _rows(tiling))
            written.append(
                _write(folder / "tiling" / "kernel_tiling.csv", list(tiling.columns), cells, ",")
            )
    if not written:
        raise StoreError(
            f"{run.label} has no tables: nothing was recorded of calls;"
            " record it with profile='op+kernel+host'"
        )
    return written


def _name(row: _Row) -> str:
    """Return the name of a call, as in topologies: its path, with ``#1`` for its second call."""
    return str(row["path"]) + (f"#{row['call']}" if row["call"] else "")


def _rows(frame: pandas.DataFrame) -> list[_Row]:
    return frame.to_dict("records")  # type: ignore[no-any-return]


def _call(row: _Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("rank", "generation", "step", "phase", "path", "call"))


def _files(run: Run, frame: pandas.DataFrame) -> Iterable[tuple[str, list[_Row]]]:
    """Yield each file's place below its kind, with ``{}`` for the name, and its rows."""
    pids = _pids(run)
    for (rank, generation, step), rows in frame.groupby(["rank", "generation", "step"], sort=True):
        number = str(step) if generation == 0 else f"{generation}_{step}"
        yield f"{pids.get((rank, generation), rank)}/{{}}_{number}.csv", _rows(rows)


def _pids(run: Run) -> dict[tuple[int, int], int]:
    """Return the process of each generation of each rank: ranks may have several processes."""
    known = run.source.processes
    pids: dict[tuple[int, int], int] = {}
    for view in ("rows", "all_timings", "all_launches"):
        sql = f"SELECT rank, generation, min(id) FROM {view} GROUP BY rank, generation"
        for rank, generation, first in run.index.query(tuple[int, int, int], sql):
            process = known[first // STRIDE] if first // STRIDE < len(known) else {}
            pids.setdefault((rank, generation), process.get("pid", rank))
    return pids


def _write(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]], separator: str
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        if separator == _BAR:  # nothing is quoted in these
            file.writelines(_BAR.join(map(_plain, row)) + "\n" for row in (columns, *rows))
        else:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([cell(value) for value in row] for row in rows)
    return path


def _cell(value: object) -> object:
    """Return the cell of a value: empty if it is unknown; the parts of a list joined with ``;``."""
    if isinstance(value, (list, tuple)):
        return ";".join(map(str, value))
    if isinstance(value, dict):
        return ";".join(f"{name}={part}" for name, part in value.items())
    return "" if value is None or value != value else value


def _plain(value: object) -> str:
    return str(cell(value)).replace(_BAR, " ")


def _ops(rows: Iterable[_Row], model: str) -> Iterable[list[Any]]:
    for number, row in enumerate(rows, 1):
        yield _case(number, row["op"], _name(row) or model, row, model)


def _kernels(
    rows: Iterable[_Row], given: Mapping[tuple[Any, ...], _Row], model: str
) -> Iterable[list[Any]]:
    for number, row in enumerate(rows, 1):
        yield [
            *_case(number, _name(row), row["kernel"], given.get(_call(row), row), model),
            row["device"], row["stream"], f"{row['start']:.3f}", f"{row['duration']:.3f}",
        ]  # fmt: skip


def _case(number: int, name: str, op: str, given: _Row, model: str) -> list[Any]:
    """Return the columns of `OP_COLUMNS`. Tensors are joined with ``;``, their sizes with ``,``."""
    sides = []
    for side in ("in", "out"):
        dtypes, shapes = given.get(f"{side}_dtype", []), given.get(f"{side}_shape", [])
        sizes = ";".join(",".join(map(str, shape)) for shape in shapes)
        sides += [len(dtypes), ";".join(dtypes), ";".join([_FORMAT] * len(dtypes)), sizes]
    parameters = json.dumps(given.get("parameters", {})).replace(_BAR, "\\u007c")
    return [number, name, op, parameters, *sides, *[""] * 6, model, "", ""]


def _statistics(rows: Sequence[_Row]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of host times: of each call, and of the gap before it."""
    columns = ["opname", "execute_count", "execute_start_us", "execute_time_us", "setup_gap_us"]
    table = []
    for row in rows:
        gap = "" if row["gap"] != row["gap"] else f"{row['gap']:.3f}"
        table.append(
            [_name(row) or row["op"], 1, f"{row['start']:.3f}", f"{row['duration']:.3f}", gap]
        )
    return columns, table
