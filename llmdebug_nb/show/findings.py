"""Findings, ready to show: where, why, the line of both programs, and how these answer each other.

Text, pages and the explorer show the same `wire_findings.FindingDetail`.
"""

from __future__ import annotations

from pathlib import PurePath

from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.findings import Finding, LinePair, Source, sentence
from llmdebug_nb.show import wire, wire_findings
from llmdebug_nb.show.tables import Line, Table, figure
from llmdebug_nb.show.tensors import number

_NONE = "makes no such call"
_UNKNOWN = "its line was not recorded"


def detail(finding: Finding, save: str) -> wire_findings.FindingDetail:
    """Return the details of a finding. ``save``: the line of Python that writes its script."""
    script = why = ""
    try:
        script = finding.script()
    except StoreError as error:
        why = str(error)
    proof = finding.proof.says if finding.proof else ""
    return {
        "script": script,
        "why": why,
        "save": save,
        "relation": " ".join(filter(None, (sentence(finding.relation), proof))),
        "advice": sentence(finding.advice),
        "sources": _sources(finding),
        "pairs": [_pair_view(pair) for pair in finding.pairs],
        "kernel": finding.kernel.name if finding.kernel else "",
        "code": finding.kernel.source if finding.kernel else "",
    }


def _sources(finding: Finding) -> list[wire_findings.SourceView]:
    """Return golden's and mine's source, or none if they say no more than the finding does."""
    golden, mine = finding.golden, finding.mine
    known = any(side is not None and side.file for side in (golden, mine))
    if not known and (golden and (golden.path, golden.op)) == (mine and (mine.path, mine.op)):
        return []
    return [_source_view("golden", finding.golden), _source_view("mine", finding.mine)]


def _source_view(which: wire.Which, source: Source | None) -> wire_findings.SourceView:
    if source is None:
        return {"which": which, "place": _NONE, "call": "", "code": "", "frames": []}
    return {
        "which": which,
        "place": str(source) if source.file else _UNKNOWN,
        "call": f"{source.path or '(root)'} ({source.op})",
        "code": source.code,
        "frames": [f"{frame.file}:{frame.line} {frame.function}" for frame in source.frames[1:]],
    }


def _pair_view(pair: LinePair) -> wire_findings.LinePairView:
    return {
        "state": pair.state,
        "golden": _line_text(pair.golden),
        "mine": _line_text(pair.mine),
        "error": number(pair.error),
    }


def _line_text(source: Source | None) -> str:
    """Return ``file.py:12  code``, or the call if its line is unknown; "" for none."""
    if source is None:
        return ""
    if source.file is None:
        return source.path or source.op
    return f"{PurePath(source.file).name}:{source.line}  {source.code}".rstrip()


def finding_line(finding: wire.FindingView, overview: wire.Overview) -> str:
    """Return a finding in one line."""
    step = overview["steps"][finding["step"]]["label"]
    where = f"{finding['path'] or '(root)'} ({finding['op']}), step {step}"
    expected = f"expected ({finding['expected']}): " if finding["expected"] else ""
    return f"{expected}{where}: {finding['cause']}; {finding['evidence']}"


def finding_head(finding: Finding) -> str:
    """Return place and cause of a finding."""
    return f"{finding.path or '(root)'} ({finding.op}), step {finding.step}: {finding.cause}"


def source_lines(shown: wire_findings.FindingDetail) -> list[str]:
    """Return the relation and the advice, and the line of each program that makes the call."""
    lines = [clause for clause in (shown["relation"], shown["advice"]) if clause]
    for source in shown["sources"]:
        code = f"  {source['code']}" if source["code"] else ""
        known = source["place"] if source["place"] != _UNKNOWN else source["call"]
        lines.append(f"{source['which'] + ':':8}{known}{code}")
    return lines


def pairs_table(pairs: list[wire_findings.LinePairView]) -> Table:
    """Return golden's lines with those of mine, one pair a line."""
    lines = [
        Line([pair["state"], pair["golden"] or "-", pair["mine"] or "-", figure(pair["error"])])
        for pair in pairs
    ]
    return Table(["state", "golden", "mine", "error"], lines, len(lines), range(3, 4))
