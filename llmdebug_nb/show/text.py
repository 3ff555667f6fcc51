"""Views as plain text: what a terminal, a log or an untrusted notebook shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.show import wire
from llmdebug_nb.show.tensors import number

ROWS = 12
_FIGURES = ("min", "max", "mean", "l2norm", "nan", "inf")
EVERYTHING: wire.Listed = {
    "node": -1, "mismatch": False, "text": "", "every": True, "sort": "", "descending": False,
}  # fmt: skip


def figure(value: wire.Num) -> str:
    """Return a figure in at most ten characters."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns, two spaces apart."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def row_cells(row: wire.Row, steps: Sequence[wire.Step]) -> list[str]:
    """Return the cells that run and report tables share."""
    step = steps[row["step"]]["label"] if row["step"] < len(steps) else "-"
    call = f" #{row['call']}" if row["call"] else ""
    return [
        step,
        (row["path"] or "(root)") + call,
        f"{row['role']}[{row['slot']}]",
        row["op"],
        row["dtype"],
        "x".join(map(str, row["shape"])),
    ]


def run_text(view: Any) -> str:
    """Return the summary of a run and its first rows."""
    overview: wire.Overview = view.overview()
    rows = [view.row_view(record.id, record) for record in view.run.records(n=ROWS)]
    body = table(
        ["step", "path", "tensor", "op", "dtype", "shape", "min", "max", "mean", "l2norm"],
        [
            [
                *row_cells(row, overview["steps"]),
                *(figure(row[name]) for name in ("min", "max", "mean", "l2norm")),
            ]
            for row in rows
        ],
    )
    steps = ", ".join(step["label"] for step in overview["steps"][:8]) + (
        " …" if len(overview["steps"]) > 8 else ""
    )
    left = overview["rows"] - len(rows)
    more = f"\n… {left:,} more rows: run.to_pandas()" if left else ""
    return (
        "\n".join(
            [overview["title"], *overview["lines"], f"steps: {steps}", *overview["notes"], "", body]
        )
        + more
    )


def summary_text(view: Any) -> str:
    """Return verdict, first divergence and findings of a report."""
    overview: wire.Overview = view.overview()
    return "\n".join(
        [
            f"{overview['title']}: {overview['verdict']}",
            *overview["lines"],
            *finding_lines(overview),
        ]
    )


def report_text(view: Any) -> str:
    """Return `summary_text`, the first mismatches, and the notes of a report."""
    overview: wire.Overview = view.overview()
    return "\n".join([summary_text(view), *mismatch_lines(view, overview), "", *overview["notes"]])


def notebook_text(view: Any) -> str:
    """Return what stays in a saved notebook above the explorer: verdict, sentences, findings, and the first mismatches."""
    overview: wire.Overview = view.overview()
    head = [
        f"{overview['title']}: {overview['verdict']}",
        overview["summary"],
        *finding_lines(overview),
    ]
    return "\n".join([*head, *mismatch_lines(view, overview)])


def mismatch_lines(view: Any, overview: wire.Overview) -> list[str]:
    """Return the table of the first mismatches, if there are any."""
    page = view.rows(
        {"op": "rows", "step": -1, **EVERYTHING, "mismatch": True, "start": 0, "n": ROWS}
    )
    if not page["rows"]:
        return []
    head = ["step", "path", "tensor", "op", "dtype", "shape", "error", "limit", "verdict"]
    lines = ["", table(head, [_mismatch_cells(row, overview) for row in page["rows"]])]
    if page["total"] > len(page["rows"]):
        lines.append(
            f"… {page['total'] - len(page['rows']):,} more mismatches: report.differences.to_pandas()"
        )
    return lines


def _mismatch_cells(row: wire.Row, overview: wire.Overview) -> list[str]:
    return [
        *row_cells(row, overview["steps"]),
        figure(row["error"]),
        figure(row["limit"]),
        verdict_cell(row),
    ]


def verdict_cell(row: wire.Row) -> str:
    """Return what a table says of a row's verdict."""
    if row["expected"]:
        return f"expected: {row['expected']}"
    return row["reason"] or str(row["verdict"])


def finding_lines(overview: wire.Overview) -> list[str]:
    """Return one line per finding, the first one that is not expected marked."""
    first = next((f for f in overview["findings"] if not f["expected"]), None)
    return [
        f"{'→' if f is first else ' '} {finding_line(f, overview)}"
        for f in overview["findings"][:5]
    ]


def finding_line(finding: wire.FindingView, overview: wire.Overview) -> str:
    """Return what is to blame, in one line."""
    where = f"{finding['path'] or '(root)'} ({finding['op']}), step {overview['steps'][finding['step']]['label']}"
    expected = f"expected ({finding['expected']}): " if finding["expected"] else ""
    return f"{expected}{where}: {finding['cause']}; {finding['evidence']}"


def finding_text(finding: Finding) -> str:
    """Return what is to blame, why, where it is called, and how to call it again."""
    lines = [
        f"{finding.path or '(root)'} ({finding.op}), step {finding.step}: {finding.cause}",
        finding.evidence,
    ]
    lines += [f"called at {finding.source}"] if finding.source else []
    lines += (
        ["a script that calls it again: .script(), .save_repro(path)"]
        if finding.repro is not None
        else []
    )
    return "\n".join(lines)


def difference_text(difference: Difference) -> str:
    """Return a row of a report: both sides' figures, the metrics, and what was judged."""
    lines = [difference_line(difference), "", table(*side_cells(difference))]
    if difference.metrics:
        lines += [
            "",
            ", ".join(
                f"{name} {figure(number(value))}" for name, value in difference.metrics.items()
            ),
        ]
    return "\n".join(lines)


def difference_line(difference: Difference) -> str:
    """Return where a row is and what was judged."""
    d = difference
    judged = (
        ""
        if d.error is None
        else f", error {figure(number(d.error))} (limit {figure(number(d.limit))})"
    )
    said = "; ".join(filter(None, (d.reason, d.pair.fit.says if d.pair.fit else None)))
    return f"{d.verdict.replace('_', ' ')}: {d.site}{judged}{'; ' + said if said else ''}"


def side_cells(difference: Difference) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table of the sides that there are."""
    sides = [(name, getattr(difference.pair, name)) for name in ("golden", "mine")]
    lines = [
        [name, record.site.path or "(root)", record.op, record.summary.dtype, "x".join(map(str, record.summary.shape)),
         *(figure(number(getattr(record.summary, each))) for each in _FIGURES)]
        for name, record in sides if record is not None
    ]  # fmt: skip
    return ["", "path", "op", "dtype", "shape", *_FIGURES], lines
