"""Findings, ready to show: where, why, the line of both programs, and how these answer each other.

Text, pages and the explorer show the same `wire_findings.FindingDetail`.
"""

from __future__ import annotations

import textwrap
from pathlib import PurePath
from typing import NamedTuple

from llmdebug_nb.core.errors import StoreError
from llmdebug_nb.core.places import in_torch
from llmdebug_nb.core.printable import bracketed, sentence
from llmdebug_nb.findings.finding import Finding
from llmdebug_nb.findings.headline import Headline
from llmdebug_nb.show import wire, wire_findings
from llmdebug_nb.show.tables import Line, Table, aligned, figure
from llmdebug_nb.show.tensors import number
from llmdebug_nb.show.view_data import ViewData
from llmdebug_nb.source.lines import LinePair, Source
from llmdebug_nb.source.listings import Listing

_NONE = "does it otherwise, or not at all"
_BEHIND = "not so, behind "
_UNKNOWN = "its line was not recorded"
# as the explorer marks lines
_MARKS = {"": "", "equal": "=", "rewritten": "≡", "guilty": "✗", "inherited": "⤵"}
_AROUND, _WIDTH = 2, 68  # lines on each side of the blamed one, characters of a line of code


def view(finding: Finding, headline: Headline, step: int, mark: int) -> wire.FindingView:
    """Return a finding for a list. ``step``, ``mark``: indices of the overview's lists."""
    row, expected = finding.difference, finding.expected
    known = next((side for side in (finding.mine, finding.golden) if side and side.file), None)
    file = (known and known.file) or ""
    mine = "" if in_torch(file) else file  # then the listing has the line that calls it
    return {
        "path": finding.path,
        "op": finding.op,
        "step": step,
        "cause": finding.cause,
        "evidence": finding.evidence,
        "row": row.index if row else -1,
        "head": headline.head,
        "place": headline.place,
        "where": headline.where,
        "what": headline.what,
        "which": headline.which,
        "why": headline.why,
        "do": headline.do,
        "file": mine,
        "line": (known and mine and known.line) or 0,
        "proof": finding.proof.says if finding.proof else "",
        "expected": (expected.comment or str(expected)) if expected else "",
        "mark": mark,
    }


def detail(
    finding: Finding, save: str = "", listing: Listing | None = None
) -> wire_findings.FindingDetail:
    """Return the details of a finding. ``save``: the line of Python that writes its script.

    ``listing``: its code; None where it is not shown.
    """
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
        "listing": _code_view(listing or Listing()),
        "kernel": finding.kernel.name if finding.kernel else "",
        "code": finding.kernel.source if finding.kernel else "",
    }


def _code_view(listing: Listing) -> wire_findings.CodeView:
    return {
        "golden_file": listing.golden_file,
        "golden_function": listing.golden_function,
        "mine_file": listing.mine_file,
        "mine_function": listing.mine_function,
        "lines": [
            {
                "golden_line": line.golden_line,
                "golden": line.golden,
                "mine_line": line.mine_line,
                "mine": line.mine,
                "state": line.state,
                "error": number(line.error),
            }
            for line in listing.lines
        ],
        "at": listing.at,
        "note": listing.note,
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
        "place": f"{_BEHIND if source.lacks else ''}{source}" if source.file else _UNKNOWN,
        "call": "" if source.lacks else f"{source.path or '(root)'} ({source.op})",
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


class Answer(NamedTuple):
    """A finding for text and pages.

    ``head``: where. ``reasons``: what, why, what to do, and what a proof said. ``code``: both
    programs' lines around the blamed one, side by side. ``pairs``: all pairs of lines, or None.
    """

    head: str
    reasons: list[str]
    detail: wire_findings.FindingDetail
    code: list[str]
    pairs: Table | None


def answers(view: ViewData, most: int | None = None) -> list[Answer]:
    """Return the first findings of a report (None: all)."""
    overview = view.overview()
    made = []
    for at, finding in enumerate(overview["findings"][:most]):
        shown = view.finding({"op": "finding", "finding": at})
        expected = f"expected ({finding['expected']}): " if finding["expected"] else ""
        step = overview["steps"][finding["step"]]["label"]
        reasons = [finding[part] for part in ("what", "which", "why", "do", "proof")]
        made.append(
            Answer(
                f"{expected}{head_line(finding)}, step {step}",
                list(filter(None, reasons)),
                shown,
                _code_lines(shown["listing"]),
                pairs_table(shown["pairs"]),
            )
        )
    return made


def head_line(finding: wire.FindingView) -> str:
    """Return ``Made in port.py:31, layers.5.self_attn (FastAttention, was Attention)``."""
    place, where = finding["place"], finding["where"]
    return f"{finding['head']} {where if where.startswith(place) else f'{place}, {where}'}"


def _code_lines(code: wire_findings.CodeView) -> list[str]:
    """Return the lines around the blamed one, side by side; none if it is not known."""
    at = code["at"]
    if at < 0:
        return []
    near = code["lines"][max(0, at - _AROUND) : at + _AROUND + 1]
    golden = _listed([(line["golden_line"], line["golden"]) for line in near])
    mine = _listed([(line["mine_line"], line["mine"]) for line in near])
    errors = ["" if line["error"] is None else figure(line["error"]) for line in near]
    marks = [_MARKS[line["state"]] for line in near]
    names = (
        f"{which}: {PurePath(file).name} {function}".strip() if file else f"{which}: -"
        for which, file, function in (
            ("golden", code["golden_file"], code["golden_function"]),
            ("mine", code["mine_file"], code["mine_function"]),
        )
    )
    return aligned(["", *names, "error"], zip(marks, golden, mine, errors, strict=True))


def _listed(lines: list[tuple[int, str]]) -> list[str]:
    """Return numbered lines of code without the indentation that all have; long ones are cut."""
    texts = textwrap.dedent("\n".join(text for _, text in lines)).split("\n")
    numbered = (f"{at:4} {text}" if at else "" for (at, _), text in zip(lines, texts, strict=True))
    return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in numbered]


def finding_head(finding: Finding) -> str:
    """Return place and cause of a finding."""
    where = f"{finding.path or '(root)'}{bracketed(finding.op)}"
    return f"{where}, step {finding.step}: {finding.cause}"


def source_lines(shown: wire_findings.FindingDetail) -> list[str]:
    """Return the line of each program that makes the call."""
    lines = []
    for source in shown["sources"]:
        text = f"  {source['code']}" if source["code"] else ""
        known = source["place"] if source["place"] != _UNKNOWN else source["call"]
        lines.append(f"{source['which'] + ':':8}{known}{text}")
    return lines


def pairs_table(pairs: list[wire_findings.LinePairView]) -> Table | None:
    """Return golden's lines with those of mine, one pair a line; None for none."""
    if not pairs:
        return None
    lines = [
        Line([pair["state"], pair["golden"] or "-", pair["mine"] or "-", figure(pair["error"])])
        for pair in pairs
    ]
    return Table(["state", "golden", "mine", "error"], lines, len(lines), range(3, 4))
