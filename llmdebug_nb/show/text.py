"""Views as plain text, for terminals, logs and notebooks that are not trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmdebug_nb.core.findings import Difference, Finding
from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.show import wire
from llmdebug_nb.show.findings import (
    detail,
    finding_head,
    finding_line,
    pairs_table,
    source_lines,
)
from llmdebug_nb.show.tables import (
    Table,
    difference_line,
    metrics_table,
    rows_table,
    sides_table,
    telling_table,
)
from llmdebug_nb.show.view_data import ViewData

_STEPS = 8  # that are named
_FINDINGS = 5


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns, two spaces apart."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _aligned(table: Table) -> list[str]:
    return aligned(table.head, [line.cells for line in table.lines])


def run_text(view: ViewData) -> str:
    """Return the summary of a run and its first rows."""
    overview, table = view.overview(), rows_table(view)
    names = [step["label"] for step in overview["steps"]]
    steps = ", ".join(names[:_STEPS]) + (" …" if len(names) > _STEPS else "")
    lines = [overview["title"], *overview["lines"], f"steps: {steps}", *overview["notes"]]
    lines += ["", *_aligned(table)]
    if table.total > len(table.lines):
        lines.append(f"… {table.total - len(table.lines):,} more rows: run.to_pandas()")
    return printable_lines(lines)


def report_text(view: ViewData) -> str:
    """Return verdict, first divergence, findings, the rows that matter and notes of a report."""
    overview = view.overview()
    lines = [_verdict_line(overview), *overview["lines"], *_finding_lines(view, overview)]
    return printable_lines([*lines, *_mismatch_lines(view), "", *overview["notes"]])


def notebook_text(view: ViewData) -> str:
    """Return the text above an explorer: verdict, summary, findings and the rows that matter.

    It stays in the saved notebook.
    """
    overview = view.overview()
    lines = [_verdict_line(overview), overview["summary"], *_finding_lines(view, overview)]
    return printable_lines([*lines, *_mismatch_lines(view)])


def _verdict_line(overview: wire.Overview) -> str:
    caution = f", {overview['caution']}" if overview["caution"] else ""
    return f"{overview['title']}: {overview['verdict']}{caution}"


def _mismatch_lines(view: ViewData) -> list[str]:
    """Return the table of the rows that matter, if there are any."""
    table = telling_table(view)
    if not table.lines or view.overview()["verdict"] == "incomparable":
        return []
    lines = ["", *_aligned(table)]
    if table.total > len(table.lines):
        more = table.total - len(table.lines)
        lines.append(f"… {more:,} more mismatches: report.differences.to_pandas()")
    return lines


def _finding_lines(view: ViewData, overview: wire.Overview) -> list[str]:
    """Return a line per finding; the first unexpected one has an arrow, and both its sources."""
    findings = overview["findings"]
    first = next((at for at, one in enumerate(findings) if not one["expected"]), None)
    lines = []
    for at, finding in enumerate(findings[:_FINDINGS]):
        lines.append(f"{'→' if at == first else ' '} {finding_line(finding, overview)}")
        if at == first:
            shown = view.finding({"op": "finding", "finding": at})
            lines += [f"    {line}" for line in source_lines(shown)]
    return lines


def finding_text(finding: Finding) -> str:
    """Return place, cause, evidence and sources of a finding, its lines, and how to replay it."""
    shown = detail(finding, "")
    lines = [finding_head(finding), finding.evidence, *source_lines(shown)]
    if shown["pairs"]:
        lines += ["", *_aligned(pairs_table(shown["pairs"])), ""]
    if shown["script"]:
        lines.append("a script that replays it: .script(), .save_repro(path)")
    return printable_lines(lines)


def difference_text(difference: Difference) -> str:
    """Return a difference with the figures of both sides and the metrics."""
    lines = [difference_line(difference), "", *_aligned(sides_table(difference))]
    metrics = [" ".join(line.cells) for line in metrics_table(difference).lines]
    return printable_lines([*lines, *(["", ", ".join(metrics)] if metrics else [])])
