"""The tables of ``msit llm compare``, with its columns, of our comparison.

Its csv lacks rows whose shapes differ; here every row is in it, and says why it has no figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.app.differences import write_csv
from llmdebug_nb.app.report import Report
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.columns import CUTS, LIST_ALL
from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.comparison.modules import Modules
from llmdebug_nb.core.errors import (
    CorruptDumpError,
    OptionError,
    TensorLookupError,
    saving,
)
from llmdebug_nb.core.layers import repeated_layers
from llmdebug_nb.core.paths import is_operator
from llmdebug_nb.core.records import Record
from llmdebug_nb.core.urls import on_this_machine
from llmdebug_nb.show.spreadsheet import Cell, workbook
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas

METRICS = (
    "cosine_similarity", "max_relative_error", "mean_relative_error", "max_absolute_error",
    "mean_absolute_error", "kl_divergence", "relative_euclidean_distance",
)  # fmt: skip
_SIDE = ("data_path", "op_type", "dtype", "shape", "max_value", "min_value", "mean_value")
STATISTICS = tuple(
    f"{name}_stat_{kind}_error" for name in metrics.STATISTICS for kind in ("absolute", "relative")
)
# figures that only the verdict needs
_JUDGED = (
    "stat_error", "whole_stat_error", "grain_share", "worst_channel", "channels_off", "clipped",
    "product_error", "product_noise",
)  # fmt: skip
Row: TypeAlias = "dict[str, Cell]"


def write_tables(
    report: Report, folder: str | os.PathLike[str], level: str = LIST_ALL, stats: bool = False
) -> list[Path]:
    """Write msit's table as csv, and without a level also as xlsx with a sheet for each level.

    ``level``: one of `CUTS`, ``weight``, or all rows. ``stats``: the errors of statistics instead.

    Raises:
        OptionError: no row is of that level.
        DumpWriteError: a file can't be written.
    """
    where = on_this_machine(folder)
    with saving(where):
        where.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
    chosen = _of_level(report, level)
    if not chosen:
        raise OptionError(f"-cl {level}: none of {len(report.differences):,} rows is of that level")
    if stats:  # the file's name is misspelt by msit
        return [write_csv(where / f"statstics_cmp_report_{stamp}.csv", _statistics(report, chosen))]
    table = to_pandas(report, chosen)
    paths = [write_csv(where / f"msit_cmp_report_{stamp}.csv", table)]
    if level == LIST_ALL:
        paths.append(_write_sheets(report, table, where / f"msit_cmp_report_{stamp}.xlsx"))
    return paths


def to_pandas(report: Report, rows: Sequence[Difference] | None = None) -> pandas.DataFrame:
    """Return msit's table of a report, a row for each difference, with msit's columns.

    ``data_path``: the dump, and the tensor in it. ``kl_divergence``: of the softmax of each whole
    flattened tensor. A row without figures has the reason in ``cmp_fail_reason``.
    """
    import pandas

    rows = list(report.differences) if rows is None else rows
    ours = {*metrics.FIELDS, *metrics.WEIGHTS, *metrics.LOGITS, *STATISTICS, *_JUDGED}
    custom = list(dict.fromkeys(name for d in rows for name in d.metrics if name not in ours))
    columns = ["token_id", "data_id", *(f"golden_{name}" for name in _SIDE)]
    columns += [*(f"my_{name}" for name in _SIDE), *METRICS, *custom, "cmp_fail_reason"]
    return pandas.DataFrame([_row(report, d, custom) for d in rows], columns=columns)


def _row(report: Report, d: Difference, custom: Sequence[str]) -> Row:
    row: Row = {"token_id": d.site.step, "data_id": d.index}
    row |= _side("golden", report.golden, d.pair.golden) | _side("my", report.mine, d.pair.mine)
    row |= {name: d.metrics.get(name) for name in (*METRICS, *custom)}
    divergence, why = _divergence(report, d)
    row["kl_divergence"] = divergence
    lacking = all(d.metrics.get(name) is None for name in METRICS[:-2])
    row["cmp_fail_reason"] = (d.reason if lacking else None) or why
    return row


def _side(side: str, run: Run, record: Record | None) -> Row:
    if record is None:
        return {f"{side}_{name}": None for name in _SIDE}
    s = record.summary
    figures = (
        f"{run.path or run.label}: {record.site}", record.op, f"torch.{s.dtype}",
        str(list(s.shape)), s.max, s.min, s.mean,
    )  # fmt: skip
    return {f"{side}_{name}": value for name, value in zip(_SIDE, figures, strict=True)}


def _divergence(report: Report, d: Difference) -> tuple[float | None, str | None]:
    """Return KL(softmax(golden) || softmax(mine)) over all elements, or why there is none."""
    known = d.metrics.get("kl_divergence")
    if known is not None:
        return float(known), None
    golden, mine = d.pair.golden, d.pair.mine
    if golden is None or mine is None:
        return None, d.reason
    if d.metrics.get("mismatched") == 0:
        return (0.0 if golden.summary.numel else None), "no elements" * (not golden.summary.numel)
    for side, record in (("golden", golden), ("mine", mine)):
        if record.payload is None or record.kept is not None:
            part = f"{side} keeps {record.kept} alone" if record.kept else f"no values on {side}"
            return None, f"kl_divergence needs values: {part}"
    try:
        g, m = report.golden.load(golden), report.mine.load(mine)
        if d.pair.fit is not None:
            g, m = d.pair.fit(g, m)
        divergence = metrics.divergence(g, m)
    except (CorruptDumpError, TensorLookupError, ValueError) as error:
        return None, d.reason or str(error)
    return divergence, None if divergence is not None else "no element is finite on both sides"


def _statistics(report: Report, rows: Sequence[Difference]) -> pandas.DataFrame:
    import pandas

    sides = [f"{side}_{name}" for side in ("golden", "my") for name in _SIDE[:2]]
    columns = ["token_id", "data_id", *sides, *STATISTICS, "cmp_fail_reason"]
    return pandas.DataFrame(list(_statistics_rows(report, rows)), columns=columns)


def _statistics_rows(report: Report, rows: Sequence[Difference]) -> Iterator[Row]:
    for d in rows:
        golden, mine = d.pair.golden, d.pair.mine
        row: Row = {"token_id": d.site.step, "data_id": d.index, "cmp_fail_reason": None}
        row |= _side("golden", report.golden, golden) | _side("my", report.mine, mine)
        if golden is None or mine is None:
            row["cmp_fail_reason"] = d.reason
        else:
            row |= metrics.statistics(golden.summary, mine.summary)
            if all(row.get(name) is None for name in STATISTICS):
                row["cmp_fail_reason"] = "no statistics on one side"
        yield row


def _of_level(report: Report, level: str) -> list[Difference]:
    if level == LIST_ALL:
        return list(report.differences)
    keep = _is_weight if level == "weight" else _cuts(report)[level]
    return [d for d in report.differences if keep(d)]


def _is_weight(d: Difference) -> bool:
    return d.site.role == "weight"


def _cuts(report: Report) -> dict[str, Callable[[Difference], bool]]:
    """Return what tells whether a row is of a level."""
    nodes = report.golden.nodes, report.mine.nodes
    layers = repeated_layers(nodes[0]) | repeated_layers(nodes[1])
    modules = Modules(nodes[0]), Modules(nodes[1])

    def logits(d: Difference) -> bool:
        sides = zip(modules, (d.pair.golden, d.pair.mine), strict=True)
        return any(record is not None and of.are_logits(record) for of, record in sides)

    def output(of: Callable[[str], bool]) -> Callable[[Difference], bool]:
        return lambda d: d.site.role == "output" and of(d.site.path)

    tests = (
        output(layers.__contains__), output(lambda path: not is_operator(path)),
        output(is_operator), logits,
    )  # fmt: skip
    return dict(zip(CUTS, tests, strict=True))


def _write_sheets(report: Report, table: pandas.DataFrame, path: Path) -> Path:
    """Write a sheet for each level, and one of all rows. Raises DumpWriteError."""
    cuts, rows = _cuts(report), table.astype(object).where(table.notna(), None).values.tolist()
    every = list(zip(report.differences, rows, strict=True))
    sheets = {name: [row for d, row in every if keep(d)] for name, keep in cuts.items()}
    sheets[LIST_ALL] = rows
    with saving(path):
        path.write_bytes(workbook({n: [list(table), *each] for n, each in sheets.items()}))
    return path
