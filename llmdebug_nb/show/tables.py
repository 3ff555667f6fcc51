"""The tables and lines that text and HTML have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from llmdebug_nb.comparison.differences import MISMATCHES, Difference
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show import wire, wire_requests
from llmdebug_nb.show.row_columns import Column, tabled
from llmdebug_nb.show.tensors import number
from llmdebug_nb.show.view_data import ViewData

ROWS = 12  # of a table that shows only the first ones
_PAGE = 1000
_SIDE_FIGURES = ["min", "max", "mean", "l2norm", "nan", "inf"]
_ELEMENT = ["golden", "mine", "difference"]
EVERYTHING: wire_requests.Listed = {
    "node": -1, "mismatch": False, "text": "", "every": True, "sort": "", "descending": False,
}  # fmt: skip


class Line(NamedTuple):
    cells: list[str]
    verdict: str = ""


class Table(NamedTuple):
    """``numbers``: the columns that hold figures. ``total``: of all rows there are."""

    head: list[str]
    lines: list[Line]
    total: int
    numbers: Collection[int] = ()


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns, two spaces apart."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def figure(value: wire.Num) -> str:
    """Return a figure in at most ten characters."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def telling_table(view: ViewData, most: int = ROWS) -> Table:
    """Return the rows of a report that matter most; ``total``: of all mismatches and these."""
    found = view.rows(
        {**EVERYTHING, "op": "rows", "step": -1, "mismatch": True, "start": 0, "n": 0}
    )
    rows = view.telling_rows(most)
    agreeing = sum(row["verdict"] not in MISMATCHES for row in rows)
    return _rows(rows, view.overview(), found["total"] + agreeing)


def rows_table(view: ViewData, most: int = ROWS, *, mismatch: bool = False) -> Table:
    """Return the first rows in execution order, or the first mismatches."""
    overview = view.overview()
    if not mismatch and overview["kind"] == "run" and most <= _PAGE:
        return _rows(view.first_rows(most), overview, overview["rows"])
    rows: list[wire.Row] = []
    total = 1
    while len(rows) < min(total, most):
        page = view.rows(
            {
                **EVERYTHING, "op": "rows", "step": -1, "mismatch": mismatch,
                "start": len(rows), "n": min(_PAGE, most),
            }
        )  # fmt: skip
        total = page["total"]
        rows += page["rows"]
    return _rows(rows, overview, total)


def _rows(rows: list[wire.Row], overview: wire.Overview, total: int) -> Table:
    columns, steps = tabled(overview["kind"]), overview["steps"]
    lines = [
        Line([_cell(column, row, steps) for column in columns], row["verdict"] or "")
        for row in rows
    ]
    figures = [at for at, column in enumerate(columns) if column.is_figure]
    return Table([column.head or "" for column in columns], lines, total, figures)


def _cell(column: Column, row: wire.Row, steps: Sequence[wire.Step]) -> str:
    if column.name in _CELLS:
        return _CELLS[column.name](row, steps)
    value = row[column.name]  # type: ignore[literal-required]
    return figure(value) if column.is_figure else str(value)


def place_text(row: wire.Row, steps: Sequence[wire.Step]) -> str:
    """Return which tensor a row is of."""
    return " ".join(_CELLS[name](row, steps) for name in ("step", "path", "slot"))


def _figures(row: wire.Element) -> list[str]:
    return [figure(row[name]) for name in _ELEMENT]  # type: ignore[literal-required]


def _step_cell(row: wire.Row, steps: Sequence[wire.Step]) -> str:
    return steps[row["step"]]["label"] if row["step"] < len(steps) else "-"


def _verdict_cell(row: wire.Row, steps: Sequence[wire.Step]) -> str:
    reason = row["expected"] or row["reason"]
    return f"{row['verdict']}{f': {reason}' if reason else ''}"


# cells that say more than the value of their column
_CELLS: dict[str, Callable[[wire.Row, Sequence[wire.Step]], str]] = {
    "step": _step_cell,
    "path": lambda row, steps: (row["path"] or "(root)") + f" #{row['call']}" * bool(row["call"]),
    "slot": lambda row, steps: f"{row['role']}[{row['slot']}]",
    "shape": lambda row, steps: "x".join(map(str, row["shape"])),
    "verdict": _verdict_cell,
}


def sides_table(difference: Difference) -> Table:
    """Return the figures of the sides of a difference, one line each."""
    lines = []
    for name in ("golden", "mine"):
        record = getattr(difference.pair, name)
        if record is None:
            continue
        summary = record.summary
        place = [name, record.site.path or "(root)", record.op, summary.dtype]
        figures = [figure(number(getattr(summary, one))) for one in _SIDE_FIGURES]
        lines.append(Line([*place, "x".join(map(str, summary.shape)), *figures]))
    return Table(["", "path", "op", "dtype", "shape", *_SIDE_FIGURES], lines, len(lines))


def metrics_table(difference: Difference) -> Table:
    """Return the metrics of a difference, one line each."""
    lines = [Line([name, figure(number(one))]) for name, one in difference.metrics.items()]
    return Table(["metric", "value"], lines, len(lines))


def worst_table(view: ViewData, row: int) -> Table:
    """Return the elements of a row that differ most; ``total``: all that differ."""
    worst = view.worst({"op": "worst", "row": row, "n": 10})
    lines = [Line([str(one["index"]), *_figures(one)]) for one in worst["elements"]]
    return Table(["element", *_ELEMENT], lines, worst["differing"], range(1, 4))


def marks_table(overview: wire.Overview) -> Table:
    """Return the expectations and how many rows each covers."""
    marks = overview["marks"]
    lines = [Line([mark["text"], f"{mark['rows']:,}", mark["comment"]]) for mark in marks]
    return Table(["expected", "rows", "comment"], lines, len(lines), range(1, 2))


def difference_line(difference: Difference) -> str:
    """Return place, verdict and error of a difference, and which of its rows differ."""
    d = difference
    error = ""
    if d.error is not None:
        error = f", error {figure(number(d.error))} (limit {figure(number(d.limit))})"
    rows, fit = d.differing, d.pair.fit
    said = (rows.says if rows else None, d.reason, fit.says if fit else None)
    reason = "; ".join(filter(None, said))
    return f"{d.verdict.replace('_', ' ')}: {d.site}{error}{'; ' + reason if reason else ''}"
