"""The tables and lines that text and HTML have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmdebug_nb.comparison.differences import MISMATCHES, Difference
from llmdebug_nb.core.printable import printable
from llmdebug_nb.show import wire, wire_requests
from llmdebug_nb.show.tensors import number
from llmdebug_nb.show.view_data import ViewData

ROWS = 12  # of a table that shows only the first ones
_PAGE = 1000
_PLACE = ["step", "path", "tensor", "op", "dtype", "shape"]
_RUN_FIGURES = ["min", "max", "mean", "l2norm"]
_REPORT_FIGURES = ["error", "limit"]
_SIDE_FIGURES = [*_RUN_FIGURES, "nan", "inf"]
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
    numbers: range = range(0)


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
    is_report = overview["kind"] == "report"
    figures = _REPORT_FIGURES if is_report else _RUN_FIGURES
    lines = []
    for row in rows:
        cells = [*place_cells(row, overview["steps"]), *_figures(row, figures)]
        if is_report:
            cells.append(verdict_cell(row))
        lines.append(Line(cells, row["verdict"] or ""))
    head = [*_PLACE, *figures, *(["verdict"] if is_report else [])]
    return Table(head, lines, total, range(len(_PLACE), len(_PLACE) + len(figures)))


def _figures(row: wire.Row | wire.Element, names: Sequence[str]) -> list[str]:
    return [figure(row[name]) for name in names]  # type: ignore[literal-required]


def place_cells(row: wire.Row, steps: Sequence[wire.Step]) -> list[str]:
    """Return the cells that say which tensor a row is of."""
    step = steps[row["step"]]["label"] if row["step"] < len(steps) else "-"
    call = f" #{row['call']}" if row["call"] else ""
    tensor, shape = f"{row['role']}[{row['slot']}]", "x".join(map(str, row["shape"]))
    return [step, (row["path"] or "(root)") + call, tensor, row["op"], row["dtype"], shape]


def verdict_cell(row: wire.Row) -> str:
    """Return the verdict of a row and its reason."""
    reason = row["expected"] or row["reason"]
    return f"{row['verdict']}{f': {reason}' if reason else ''}"


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
    lines = [Line([str(one["index"]), *_figures(one, _ELEMENT)]) for one in worst["elements"]]
    return Table(["element", *_ELEMENT], lines, worst["differing"], range(1, 4))


def marks_table(overview: wire.Overview) -> Table:
    """Return the expectations and how many rows each covers."""
    marks = overview["marks"]
    lines = [Line([mark["text"], f"{mark['rows']:,}", mark["comment"]]) for mark in marks]
    return Table(["expected", "rows", "comment"], lines, len(lines), range(1, 2))


def difference_line(difference: Difference) -> str:
    """Return place, verdict and error of a difference."""
    d = difference
    error = ""
    if d.error is not None:
        error = f", error {figure(number(d.error))} (limit {figure(number(d.limit))})"
    reason = "; ".join(filter(None, (d.reason, d.pair.fit.says if d.pair.fit else None)))
    return f"{d.verdict.replace('_', ' ')}: {d.site}{error}{'; ' + reason if reason else ''}"
