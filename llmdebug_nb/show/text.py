"""Views as plain text, for terminals, logs and notebooks that are not trusted."""

from __future__ import annotations

from llmdebug_nb.comparison.differences import Difference
from llmdebug_nb.core.printable import printable_lines, sentence
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.show import wire
from llmdebug_nb.show.findings import (
    answers,
    detail,
    finding_head,
    head_line,
    pairs_table,
    source_lines,
)
from llmdebug_nb.show.tables import (
    Table,
    aligned,
    difference_line,
    metrics_table,
    rows_table,
    sides_table,
    telling_table,
)
from llmdebug_nb.show.view_data import ViewData

_STEPS = 8  # that are named
_FINDINGS = 5
_ROWS = 3  # of a report


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
    """Return the answer of a report: verdict, findings, code, three rows, and where the rest is."""
    overview = view.overview()
    lines = [_verdict_line(overview), *_finding_lines(view, overview), *overview["lines"]]
    return printable_lines([*lines, *_mismatch_lines(view), "", *overview["notes"]])


def notebook_text(view: ViewData) -> str:
    """Return the line above an explorer: the verdict, and where the error is made."""
    overview = view.overview()
    findings = [finding for finding in overview["findings"] if not finding["expected"]]
    if not findings:
        return printable_lines([_verdict_line(overview)])
    others = len(findings) - 1
    more = f"; {others} more in report.findings" if others else ""
    return printable_lines([f"{_verdict_line(overview)}. {head_line(findings[0])}{more}"])


def _verdict_line(overview: wire.Overview) -> str:
    caution = f", {overview['caution']}" if overview["caution"] else ""
    return f"{overview['title']}: {overview['verdict']}{caution}"


def _mismatch_lines(view: ViewData) -> list[str]:
    """Return the rows that matter most, if there are any, and where the others are."""
    table = telling_table(view, _ROWS)
    if not table.lines or view.overview()["verdict"] == "incomparable":
        return []
    lines = ["", *_aligned(table)]
    if table.total > len(table.lines):
        more = table.total - len(table.lines)
        lines.append(f"… {more:,} more mismatches: report.differences.to_pandas()")
    return lines


def _finding_lines(view: ViewData, overview: wire.Overview) -> list[str]:
    """Return a line per finding; the first unexpected one has an arrow, its reasons and code."""
    findings = overview["findings"]
    first = next((at for at, one in enumerate(findings) if not one["expected"]), None)
    lines = []
    for at, answer in enumerate(answers(view, _FINDINGS)):
        lines.append(f"{'→' if at == first else ' '} {answer.head}")
        if at == first:
            code = ["", *answer.code, ""] if answer.code else []
            inner = [*answer.reasons, *source_lines(answer.detail), *code]
            lines += [f"    {line}".rstrip() for line in inner]
    if len(findings) > _FINDINGS:
        lines.append(f"… {len(findings) - _FINDINGS:,} more findings: report.findings")
    return lines


def finding_text(finding: Finding) -> str:
    """Return place, cause, evidence and sources of a finding, its lines, and how to replay it."""
    shown = detail(finding)
    said = [shown["relation"], sentence(finding.which), shown["advice"]]
    lines = [finding_head(finding), finding.evidence, *filter(None, said), *source_lines(shown)]
    pairs = pairs_table(shown["pairs"])
    if pairs is not None:
        lines += ["", *_aligned(pairs), ""]
    if shown["script"]:
        lines.append("a script that replays it: .script(), .save_repro(path)")
    return printable_lines(lines)


def difference_text(difference: Difference) -> str:
    """Return a difference with the figures of both sides and the metrics."""
    lines = [difference_line(difference), "", *_aligned(sides_table(difference))]
    metrics = [" ".join(line.cells) for line in metrics_table(difference).lines]
    return printable_lines([*lines, *(["", ", ".join(metrics)] if metrics else [])])
