"""Views as plain text, for terminals, logs and notebooks that are not trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.show import wire
from llmdebug_nb.show.tables import (
    Table,
    difference_line,
    finding_head,
    finding_line,
    finding_lines,
    metrics_table,
    rows_table,
    sides_table,
)
from llmdebug_nb.show.view_data import ViewData

_STEPS = 8  # that are named
_FINDINGS = 5


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns, two spaces apart."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _aligned(table: Table) -> str:
    return aligned(table.head, [line.cells for line in table.lines])


def run_text(view: ViewData) -> str:
    """Return the summary of a run and its first rows."""
    overview, table = view.overview(), rows_table(view)
    names = [step["label"] for step in overview["steps"]]
    steps = ", ".join(names[:_STEPS]) + (" …" if len(names) > _STEPS else "")
    lines = [overview["title"], *overview["lines"], f"steps: {steps}", *overview["notes"]]
    lines += ["", _aligned(table)]
    if table.total > len(table.lines):
        lines.append(f"… {table.total - len(table.lines):,} more rows: run.to_pandas()")
    return "\n".join(lines)


def report_text(view: ViewData) -> str:
    """Return verdict, first divergence, findings, first mismatches and notes of a report."""
    overview = view.overview()
    lines = [_verdict_line(overview), *overview["lines"], *_finding_lines(overview)]
    return "\n".join([*lines, *_mismatch_lines(view), "", *overview["notes"]])


def notebook_text(view: ViewData) -> str:
    """Return the text above an explorer: verdict, summary, findings and first mismatches.

    It stays in the saved notebook.
    """
    overview = view.overview()
    lines = [_verdict_line(overview), overview["summary"], *_finding_lines(overview)]
    return "\n".join([*lines, *_mismatch_lines(view)])


def _verdict_line(overview: wire.Overview) -> str:
    return f"{overview['title']}: {overview['verdict']}"


def _mismatch_lines(view: ViewData) -> list[str]:
    """Return the table of the first mismatches, if there are any."""
    table = rows_table(view, mismatch=True)
    if not table.lines:
        return []
    lines = ["", _aligned(table)]
    if table.total > len(table.lines):
        more = table.total - len(table.lines)
        lines.append(f"… {more:,} more mismatches: report.differences.to_pandas()")
    return lines


def _finding_lines(overview: wire.Overview) -> list[str]:
    """Return one line per finding, with an arrow at the first unexpected one."""
    first = next((f for f in overview["findings"] if not f["expected"]), None)
    return [
        f"{'→' if finding is first else ' '} {finding_line(finding, overview)}"
        for finding in overview["findings"][:_FINDINGS]
    ]


def finding_text(finding: Finding) -> str:
    """Return the place, cause, evidence and source of a finding, and how to replay it."""
    return "\n".join([finding_head(finding), *finding_lines(finding)])


def difference_text(difference: Difference) -> str:
    """Return a difference with the figures of both sides and the metrics."""
    lines = [difference_line(difference), "", _aligned(sides_table(difference))]
    metrics = [" ".join(line.cells) for line in metrics_table(difference).lines]
    return "\n".join([*lines, *(["", ", ".join(metrics)] if metrics else [])])
